"""Episodes: trainings from the first update to the target, many at once.

`play` lets something choose the actions; `replay` follows the order that a fixed policy makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from paceline.rlp.features import ALL, ITSELF, NEXT, PATIENCE, StateFeatures
from paceline.rlp.fleet import Fleet, FleetTick, Tensor
from paceline.rlp.fleet_state import FleetState
from paceline.rlp.instance import Instance
from paceline.rlp.update_order import UpdateOrder
from paceline.workloads.data import Data

TEST_EVERY = 5  # updates

Progress = Callable[[int, int], None]


class Chooser(Protocol):
    """Chooses actions (E,), and says by what number it goes by its choice. `rows` are the episodes' numbers."""

    def __call__(self, state: Tensor, fleet: Fleet, tick: FleetTick, rows: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass
class Moment:
    """One update of each episode that is still going on."""

    state: Tensor
    choice: Tensor
    seconds: Tensor
    loss: Tensor  # as a share of the first
    episode: Tensor  # its number; −1: it is over


@dataclass
class Episodes:
    """What came of them: one entry each."""

    reached: Tensor  # was the target, within the budget?
    updates: Tensor
    seconds: Tensor  # until the target, or until the budget was spent
    moments: list[Moment] = field(default_factory=list)


def play(
    instances: Sequence[Instance],
    data: Data,
    chooser: Chooser,
    state: StateFeatures,
    device: str = "cpu",
    record: Callable[[int, int], bool] | None = None,
    progress: Progress | None = None,
) -> Episodes:
    """Episodes on instances of one shape, with the actions that are chosen.

    record: of so many updates and workers, whether a Moment is to be noted.
    """
    fleet = Fleet(instances, data, device)
    watch = FleetState(fleet, state)
    race = _Race(fleet, progress)
    guard = Guard(fleet)
    while True:
        tick = fleet.arrive()
        seen = watch.see(fleet, tick, fleet.loss() if state.validated else None)
        action, choice = chooser(seen, fleet, tick, race.rows)
        if record and record(fleet.updates, fleet.N):
            episode = torch.where(race.over, -1, race.rows)
            race.ended.moments.append(Moment(seen, choice, fleet.now.float(), watch.fast / watch.first, episode))
        who = guard.let_go(action, fleet, tick)
        fleet.apply(who.any(1))
        fleet.go(who)
        kept = race.look(fleet)
        if kept is None:
            return race.ended
        if len(kept) < fleet.E:
            for each in (fleet, watch, race, guard):
                each.keep(kept)


def replay(
    instances: Sequence[Instance],
    orders: Sequence[UpdateOrder],
    data: Data,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Episodes:
    """Episodes on instances of one shape, with updates in these orders."""
    fleet = Fleet(instances, data, device)
    race = _Race(fleet, progress)
    worker, seconds, whole, given = (
        torch.from_numpy(np.stack(each)).to(fleet.device)
        for each in zip(*(order.arrays(instances[0].budget, fleet.N) for order in orders), strict=True)
    )
    while True:
        at = fleet.updates
        fleet.take(worker[:, at], seconds[:, at])
        fleet.apply(whole[:, at])
        fleet.go(given[:, at])
        kept = race.look(fleet)
        if kept is None:
            return race.ended
        if len(kept) < fleet.E:
            fleet.keep(kept)
            race.keep(kept)
            worker, seconds, whole, given = (each[kept] for each in (worker, seconds, whole, given))


class Guard:
    """Makes of actions whom they let go. Whatever they are, nobody waits for ever and somebody always runs."""

    def __init__(self, fleet: Fleet) -> None:
        self._turn = torch.zeros(fleet.E, dtype=torch.int64, device=fleet.device)  # whose it is, in the ring
        self._since = torch.zeros(fleet.E, fleet.N, dtype=torch.int64, device=fleet.device)  # which update it waits

    def let_go(self, action: Tensor, fleet: Fleet, tick: FleetTick) -> Tensor:
        """Who (E, N) is let go by an action (E,)."""
        N, came = fleet.N, tick.worker[:, None]
        self._since.scatter_(1, came, fleet.updates)
        who = fleet.idle & (action == ALL)[:, None]
        who |= (action == ITSELF)[:, None] & (torch.arange(N, device=fleet.device)[None] == came)
        by_turn = (action == NEXT)[:, None] & fleet.idle.gather(1, self._turn[:, None])
        who |= by_turn & (torch.arange(N, device=fleet.device)[None] == self._turn[:, None])
        self._turn = (self._turn + by_turn[:, 0]) % N
        who |= fleet.idle & (fleet.updates - self._since >= PATIENCE * N)
        nobody = ~(who | ~fleet.idle).any(1, keepdim=True)
        return who | (fleet.idle & nobody)

    def keep(self, rows: Tensor) -> None:
        self._turn, self._since = self._turn[rows], self._since[rows]


class _Race:
    """Who has reached the target, or spent the budget."""

    def __init__(self, fleet: Fleet, progress: Progress | None) -> None:
        E, device = fleet.E, fleet.device
        self._all, self._progress = E, progress
        self.rows = torch.arange(E, device=device)
        self.over = torch.zeros(E, dtype=torch.bool, device=device)
        self._target = torch.tensor([each.target for each in fleet.instances], device=device)
        self._budget = torch.tensor([each.budget for each in fleet.instances], device=device)
        self.ended = Episodes(
            torch.zeros(E, dtype=torch.bool, device=device),
            torch.zeros(E, dtype=torch.int64, device=device),
            torch.zeros(E, dtype=torch.float64, device=device),
        )

    def look(self, fleet: Fleet) -> Tensor | None:
        """Which rows to go on with; None if all are over. It is not worth the while to drop a few."""
        if fleet.updates % TEST_EVERY:
            return self.rows
        hit = fleet.accuracy() >= self._target
        lost = ~torch.isfinite(fleet.layers[-1].sum((1, 2)))
        new = (hit | lost | (fleet.updates >= self._budget)) & ~self.over
        which = self.rows[new]
        self.ended.reached[which] = hit[new]
        self.ended.updates[which] = torch.where(hit, fleet.updates, self._budget)[new]
        # What has diverged would have gone on for nothing until the budget was spent.
        spent = fleet.now * (self._budget / fleet.updates)
        self.ended.seconds[which] = torch.where(hit, fleet.now, spent)[new]
        self.over |= new
        left = int((~self.over).sum())
        if self._progress:
            self._progress(self._all - left, self._all)
        if not left:
            return None
        return (~self.over).nonzero()[:, 0] if left < 0.85 * fleet.E else self.rows

    def keep(self, rows: Tensor) -> None:
        self.rows, self.over = self.rows[rows], self.over[rows]
        self._target, self._budget = self._target[rows], self._budget[rows]
