"""Rules to keep to for a while: what the network chooses among.

A rule says, whenever an update comes in, which of the paper's actions is taken. "Let all go as soon as so many are
idle" is ASP for one and BSP for all; SSP bounds how far anybody is ahead. Reinforcement learning calls such things
options: actions that last. The paper's network chooses single actions; those are here too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.rlp.features import ALL, ITSELF, NEXT, WAIT

NAMES = {WAIT: "wait", ITSELF: "itself", ALL: "all", NEXT: "next"}


@dataclass(frozen=True)
class Rule:
    """One of: a share of the workers that is waited for, SSP's bound, or always the same action."""

    share: float = 0.0
    bound: int = -1
    only: int = -1  # an action; to go by it for longer than an update makes sense for turns in a ring alone

    def __str__(self) -> str:
        if self.only >= 0:
            return NAMES[self.only]
        if self.bound >= 0:
            return f"ssp({self.bound})"
        return "asp" if self.share == 0 else "bsp" if self.share == 1 else f"{self.share:.0%}"

    def wanted(self, workers: int) -> int:
        """How many are waited for."""
        return max(1, math.ceil(self.share * workers - 1e-9))

    def action(self, workers: int, idle: int, lead: int) -> int:
        """What to do with so many idle, and the one who came so far ahead of the slowest."""
        if self.only >= 0:
            return self.only
        if self.bound < 0:
            return ALL if idle >= self.wanted(workers) else WAIT
        return WAIT if lead > self.bound else ALL if lead == 0 else ITSELF


#: In the order of a ring: an extension, for the paper's actions cannot say whose turn it is.
RING = Rule(only=NEXT)
#: What the network chooses among.
RULES = (*(Rule(each / 10) for each in (0, 2, 3, 4, 5, 6, 7, 8, 9, 10)), Rule(bound=2), Rule(bound=5))
#: What the paper's network chooses among, at every update.
ACTIONS = tuple(Rule(only=action) for action in (WAIT, ITSELF, ALL))


def last(rules: tuple[Rule, ...]) -> bool:
    """Do they last a round? Single actions do not."""
    return any(rule.only < 0 for rule in rules)


def named(names: str) -> tuple[Rule, ...] | None:
    """The rules that are written so, one after the other with commas; None where there are no such."""
    known = {str(rule): rule for rule in (*RULES, *ACTIONS, RING)}
    found = [known.get(name) for name in names.split(",")]
    return None if None in found else tuple(rule for rule in found if rule)
