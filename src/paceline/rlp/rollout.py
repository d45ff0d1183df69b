"""Plays episodes, many at once. An episode is one training, from its first update until the target accuracy.

In `play`, a chooser picks the actions. `follow` trains in the order of updates that a fixed policy produces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from paceline.rlp.features import ALL, ITSELF, NEXT, PATIENCE, StateFeatures
from paceline.rlp.fleet import Fleet, FleetTick, Tensor
from paceline.rlp.fleet_correction import CorrectedFleet
from paceline.rlp.fleet_state import FleetState
from paceline.rlp.instance import Instance
from paceline.rlp.update_order import UpdateOrder
from paceline.workloads.data import Data

TEST_EVERY = 5  # updates between tests of the accuracy

Progress = Callable[[int, int], None]  # the number of episodes that are over, and of all episodes
Ended = Callable[[Tensor, Tensor], None]  # the episodes that are over now, and whether they reached the target


class Chooser(Protocol):
    """Chooses an action for each episode. Returns the actions (E,) and the numbers of the choices behind them (E,).

    A choice is a rule or an action, depending on the chooser. rows: the numbers of the episodes.
    """

    def __call__(self, state: Tensor, fleet: Fleet, tick: FleetTick, rows: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass
class ChoiceRecord:
    """The states and choices of the running episodes at one update."""

    state: Tensor
    choice: Tensor
    seconds: Tensor
    loss: Tensor  # relative to the first loss
    episode: Tensor  # number of the episode; −1 if it is over


@dataclass
class Episodes:
    """The outcomes of episodes, with one entry for each."""

    reached: Tensor  # whether the target was reached within the budget
    updates: Tensor
    seconds: Tensor  # until the target, or until the budget was spent
    records: list[ChoiceRecord] = field(default_factory=list)


def play(
    instances: Sequence[Instance],
    data: Data,
    chooser: Chooser,
    features: StateFeatures,
    device: str = "cpu",
    record: Callable[[int, int], bool] | None = None,
    progress: Progress | None = None,
    ended: Ended | None = None,
) -> Episodes:
    """Play one episode on each of these instances, which have the same shape, with the actions of a chooser.

    record: given the numbers of updates and workers, whether to keep a ChoiceRecord of this update. An episode that is
    over may be played on until rows are dropped. ended: called when episodes are over, so that a chooser can tell.
    """
    fleet = Fleet(instances, data, device)
    states = FleetState(fleet, features)
    outcomes = _Outcomes(fleet, progress, ended)
    guard = Guard(fleet)
    while True:
        tick = fleet.next_arrivals()
        state = states.observe(fleet, tick, fleet.loss() if features.validated else None)
        action, choice = chooser(state, fleet, tick, outcomes.rows)
        if record and record(fleet.updates, fleet.N):
            episode = torch.where(outcomes.over, -1, outcomes.rows)
            loss = states.fast / states.first
            outcomes.episodes.records.append(ChoiceRecord(state, choice, fleet.now.float(), loss, episode))
        granted = guard.granted(action, fleet, tick)
        fleet.apply(granted.any(1))
        fleet.grant(granted)
        kept = outcomes.check(fleet)
        if kept is None:
            return outcomes.episodes
        if len(kept) < fleet.E:
            for each in (fleet, states, outcomes, guard):
                each.keep(kept)


def follow(
    instances: Sequence[Instance],
    orders: Sequence[UpdateOrder],
    data: Data,
    device: str = "cpu",
    progress: Progress | None = None,
    corrected: bool = False,
) -> Episodes:
    """Play one episode on each of these instances, which have the same shape, with updates in these orders.

    corrected: whether staleness that the policy knows in advance is corrected.
    """
    fleet = CorrectedFleet(instances, data, device) if corrected else Fleet(instances, data, device)
    outcomes = _Outcomes(fleet, progress)
    arrays = [
        np.stack(each) for each in zip(*(order.arrays(instances[0].budget, fleet.N) for order in orders), strict=True)
    ]
    most_steps = np.maximum.accumulate(arrays[1].max(0)) + 1
    worker, step, seconds, completes, turns, pulled_by = (torch.from_numpy(each).to(fleet.device) for each in arrays)
    while True:
        at = fleet.updates
        fleet.draw(int(most_steps[at]))
        fleet.receive(worker[:, at], seconds[:, at], step[:, at])
        if isinstance(fleet, CorrectedFleet):
            fleet.turns, fleet.ahead = turns[:, at].float(), pulled_by[:, at].clamp(min=0).float()
        fleet.apply(completes[:, at])
        fleet.pull(pulled_by[:, at] >= 0)
        kept = outcomes.check(fleet)
        if kept is None:
            return outcomes.episodes
        if len(kept) < fleet.E:
            fleet.keep(kept)
            outcomes.keep(kept)
            worker, step, seconds, completes, turns, pulled_by = (
                each[kept] for each in (worker, step, seconds, completes, turns, pulled_by)
            )


class Guard:
    """Turns actions into workers to grant. Whatever the actions, no worker waits forever and one always runs."""

    def __init__(self, fleet: Fleet) -> None:
        self._turn = torch.zeros(fleet.E, dtype=torch.int64, device=fleet.device)  # the next worker in the ring
        self._since = torch.zeros(fleet.E, fleet.N, dtype=torch.int64, device=fleet.device)  # idle since this update

    def granted(self, action: Tensor, fleet: Fleet, tick: FleetTick) -> Tensor:
        """Return which workers (E, N) these actions (E,) grant."""
        N, worker = fleet.N, tick.worker[:, None]
        numbers = torch.arange(N, device=fleet.device)[None]
        self._since.scatter_(1, worker, fleet.updates)
        granted = fleet.idle & (action == ALL)[:, None]
        granted |= (action == ITSELF)[:, None] & (numbers == worker)
        in_turn = (action == NEXT)[:, None] & fleet.idle.gather(1, self._turn[:, None])
        granted |= in_turn & (numbers == self._turn[:, None])
        self._turn = (self._turn + in_turn[:, 0]) % N
        count = (action - NEXT).clamp(0, N)
        waited = torch.where(fleet.idle, self._since, fleet.updates + 1)
        longest = waited.sort(1).values.gather(1, (count[:, None] - 1).clamp(min=0))
        granted |= fleet.idle & (count > 0)[:, None] & (waited <= longest)
        granted |= fleet.idle & (fleet.updates - self._since >= PATIENCE * N)
        none_runs = ~(granted | ~fleet.idle).any(1, keepdim=True)
        return granted | (fleet.idle & none_runs)

    def keep(self, rows: Tensor) -> None:
        """Drop all clusters but these."""
        self._turn, self._since = self._turn[rows], self._since[rows]


class _Outcomes:
    """Tests which episodes have reached the target or spent the budget, and records their outcomes."""

    def __init__(self, fleet: Fleet, progress: Progress | None, ended: Ended | None = None) -> None:
        E, device = fleet.E, fleet.device
        self._count, self._progress, self._ended = E, progress, ended
        self.rows = torch.arange(E, device=device)
        self.over = torch.zeros(E, dtype=torch.bool, device=device)
        self._target = torch.tensor([each.target for each in fleet.instances], device=device)
        self._budget = torch.tensor([each.budget for each in fleet.instances], device=device)
        self.episodes = Episodes(
            torch.zeros(E, dtype=torch.bool, device=device),
            torch.zeros(E, dtype=torch.int64, device=device),
            torch.zeros(E, dtype=torch.float64, device=device),
        )

    def check(self, fleet: Fleet) -> Tensor | None:
        """Return the rows of the fleet to keep, or None if all episodes are over.

        Rows are dropped only if many episodes are over; dropping a few is not worth the copies.
        """
        if fleet.updates % TEST_EVERY:
            return self.rows
        reached = fleet.accuracy() >= self._target
        diverged = ~torch.isfinite(fleet.layers[-1].sum((1, 2)))
        new = (reached | diverged | (fleet.updates >= self._budget)) & ~self.over
        which = self.rows[new]
        self.episodes.reached[which] = reached[new]
        self.episodes.updates[which] = torch.where(reached, fleet.updates, self._budget)[new]
        # A training that has diverged counts as if it had gone on until the budget was spent.
        spent = fleet.now * (self._budget / fleet.updates)
        self.episodes.seconds[which] = torch.where(reached, fleet.now, spent)[new]
        self.over |= new
        if self._ended and len(which):
            self._ended(which, reached[new])
        left = int((~self.over).sum())
        if self._progress:
            self._progress(self._count - left, self._count)
        if not left:
            return None
        return (~self.over).nonzero()[:, 0] if left < 0.85 * fleet.E else self.rows

    def keep(self, rows: Tensor) -> None:
        """Drop all episodes but those in these rows."""
        self.rows, self.over = self.rows[rows], self.over[rows]
        self._target, self._budget = self._target[rows], self._budget[rows]
