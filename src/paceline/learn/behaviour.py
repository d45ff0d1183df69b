"""Rules to keep to for a while, and what chooses among them.

A rule says, whenever an update comes in, which of the paper's actions is taken. "let all go as soon as so many are
idle" is ASP for one and BSP for all; SSP bounds how far anybody is ahead. Reinforcement learning calls such things
options: actions that last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from paceline.learn.features import ALL, ITSELF, WAIT
from paceline.learn.fleet import Fleet, Tensor, Tick


@dataclass(frozen=True)
class Rule:
    """Either a share of the workers that is waited for, or SSP's bound."""

    share: float = 0.0
    bound: int = -1

    def __str__(self) -> str:
        if self.bound >= 0:
            return f"ssp({self.bound})"
        return "asp" if self.share == 0 else "bsp" if self.share == 1 else f"{self.share:.0%}"

    def wanted(self, workers: int) -> int:
        """How many are waited for."""
        return max(1, math.ceil(self.share * workers - 1e-9))


RULES = (*(Rule(each / 10) for each in (0, 2, 3, 4, 5, 6, 7, 8, 9, 10)), Rule(bound=2), Rule(bound=5))


class Network(nn.Sequential):
    """Q: 64 and 32 units with leaky rectifiers, as in the paper."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Linear(inputs, 64), nn.LeakyReLU(), nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, outputs)
        )


def carried_out(rule: Tensor, fleet: Fleet, tick: Tick) -> Tensor:
    """The action (E,) that each one's rule, by its number, takes now."""
    wanted, bound = (table[rule] for table in _tables(fleet.N, fleet.device))
    done = fleet.steps - (~fleet.idle).long()
    lead = done.gather(1, tick.worker[:, None])[:, 0] - done.min(1).values
    by_count = torch.where(fleet.idle.sum(1) >= wanted, ALL, WAIT)
    by_lead = torch.where(lead > bound, WAIT, torch.where(lead == 0, ALL, ITSELF))
    return torch.where(bound >= 0, by_lead, by_count)


@lru_cache
def _tables(workers: int, device: torch.device) -> tuple[Tensor, Tensor]:
    wanted, bound = [rule.wanted(workers) for rule in RULES], [rule.bound for rule in RULES]
    return torch.tensor(wanted, device=device), torch.tensor(bound, device=device)


class Fixed:
    """To each episode its rule."""

    def __init__(self, rule: Tensor) -> None:
        self.rule = rule

    def __call__(self, state: Tensor, fleet: Fleet, tick: Tick, rows: Tensor) -> tuple[Tensor, Tensor]:
        rule = self.rule[rows]
        return carried_out(rule, fleet, tick), rule


class Greedy:
    """The rule of the highest Q."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __call__(self, state: Tensor, fleet: Fleet, tick: Tick, rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            rule = self.network(state).argmax(1)
        return carried_out(rule, fleet, tick), rule


class Trying:
    """The network's choice, but now and then another rule for a while.

    begins: the update from which an episode keeps to its `rule`; ends: the one from which it does no longer.
    """

    def __init__(self, network: nn.Module, rule: Tensor, begins: Tensor, ends: Tensor) -> None:
        self.network, self.rule, self.begins, self.ends = network, rule, begins, ends

    def __call__(self, state: Tensor, fleet: Fleet, tick: Tick, rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            best = self.network(state).argmax(1)
        trying = (fleet.updates >= self.begins[rows]) & (fleet.updates < self.ends[rows])
        rule = torch.where(trying, self.rule[rows], best)
        return carried_out(rule, fleet, tick), rule
