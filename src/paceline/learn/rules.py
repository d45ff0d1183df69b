"""Rules to keep to for a while: what the network chooses among.

A rule says, whenever an update comes in, which of the paper's three actions is taken. "Let all go as soon as so many
are idle" is ASP for one and BSP for all; SSP bounds how far anybody is ahead. Reinforcement learning calls such things
options: actions that last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.learn.features import ALL, ITSELF, NEXT, WAIT


@dataclass(frozen=True)
class Rule:
    """Either a share of the workers that is waited for, or SSP's bound, or turns in the order of a ring."""

    share: float = 0.0
    bound: int = -1
    ring: bool = False  # an extension: the paper's actions cannot say whose turn it is

    def __str__(self) -> str:
        if self.ring:
            return "ring"
        if self.bound >= 0:
            return f"ssp({self.bound})"
        return "asp" if self.share == 0 else "bsp" if self.share == 1 else f"{self.share:.0%}"

    def wanted(self, workers: int) -> int:
        """How many are waited for."""
        return max(1, math.ceil(self.share * workers - 1e-9))

    def action(self, workers: int, idle: int, lead: int) -> int:
        """What to do with so many idle, and the one who came so far ahead of the slowest."""
        if self.ring:
            return NEXT
        if self.bound < 0:
            return ALL if idle >= self.wanted(workers) else WAIT
        return WAIT if lead > self.bound else ALL if lead == 0 else ITSELF


def named(names: str) -> tuple[Rule, ...] | None:
    """The rules that are written so, one after the other with commas; None where there are no such."""
    known = {str(rule): rule for rule in (*RULES, Rule(ring=True))}
    found = [known.get(name) for name in names.split(",")]
    return None if None in found else tuple(rule for rule in found if rule)


RULES = (*(Rule(each / 10) for each in (0, 2, 3, 4, 5, 6, 7, 8, 9, 10)), Rule(bound=2), Rule(bound=5))
