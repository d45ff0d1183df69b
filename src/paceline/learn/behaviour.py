"""Ways to choose actions: fixed rules to learn from, and the network itself."""

from __future__ import annotations

import torch
from torch import nn

from paceline.learn.features import ALL, ITSELF, WAIT
from paceline.learn.fleet import Fleet, Tensor, Tick


class Network(nn.Sequential):
    """Q: 64 and 32 units with leaky rectifiers, as in the paper."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__(
            nn.Linear(inputs, 64), nn.LeakyReLU(), nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, actions)
        )


class Greedy:
    """The action of the highest Q. lean: what is added to an episode's Q of each action, all through."""

    def __init__(self, network: nn.Module, lean: Tensor | None = None) -> None:
        self.network, self.lean = network, lean

    def __call__(self, state: Tensor, fleet: Fleet, tick: Tick, rows: Tensor) -> Tensor:
        with torch.no_grad():
            q: Tensor = self.network(state)
        if self.lean is not None:
            q = q + self.lean[rows]
        alone = fleet.idle.sum(1) == 1
        q[:, ALL] = torch.where(alone, -torch.inf, q[:, ALL])
        return q.argmax(1)


class Rules:
    """Of each episode a rule of its own: let all idle go as soon as there are k; or SSP, with its bound.

    k = 1 is ASP and k = N is BSP. anew: how many updates a rule lasts on average before another k is drawn.
    """

    def __init__(self, k: Tensor, bound: Tensor, anew: float = 0.0, chance: torch.Generator | None = None) -> None:
        self.k, self.bound, self._anew, self._chance = k, bound, anew, chance  # a bound below 0: no SSP

    def __call__(self, state: Tensor, fleet: Fleet, tick: Tick, rows: Tensor) -> Tensor:
        if self._anew:
            device = "cpu" if self._chance is None else self._chance.device
            draw = torch.rand(len(self.k), generator=self._chance, device=device).to(rows.device)
            fresh = torch.randint(1, fleet.N + 1, (len(self.k),), generator=self._chance, device=device).to(rows.device)
            self.k = torch.where(draw < 1 / self._anew, fresh, self.k)
        k, bound = self.k[rows], self.bound[rows]
        idle = fleet.idle.sum(1)
        done = fleet.steps - (~fleet.idle).long()
        own = done[torch.arange(fleet.E, device=rows.device), tick.worker]
        lead = own - done.min(1).values
        by_count = torch.where(idle >= k, ALL, WAIT)
        by_lead = torch.where(lead > bound, WAIT, torch.where(lead == 0, ALL, ITSELF))
        return torch.where(bound >= 0, by_lead, by_count)


class Mixed:
    """Some episodes by one, the others by another."""

    def __init__(self, first: Greedy, second: Rules, use_first: Tensor) -> None:
        self._first, self._second, self._use = first, second, use_first

    def __call__(self, state: Tensor, fleet: Fleet, tick: Tick, rows: Tensor) -> Tensor:
        a, b = self._first(state, fleet, tick, rows), self._second(state, fleet, tick, rows)
        return torch.where(self._use[rows], a, b)
