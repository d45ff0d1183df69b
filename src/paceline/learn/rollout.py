"""Episodes: trainings from the first update to the target, many at once, under whatever chooses the actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline.learn.features import ALL, ITSELF, NEXT, PATIENCE
from paceline.learn.fleet import Fleet, Tensor, Tick
from paceline.learn.instance import Instance
from paceline.learn.watch import Watch
from paceline.workloads.data import Data

TEST_EVERY = 5  # updates
RECORD_EVERY = 3  # one update is much like the next


@dataclass(frozen=True)
class State:
    """What the network is shown."""

    history: int = 10  # H
    scene: bool = True  # what the paper's state leaves out too
    validated: bool = False  # the loss is of a validation batch, instead of the workers' own reports


class Chooser(Protocol):
    """Whatever chooses actions for rows of a fleet. `rows` says which episodes they are."""

    def __call__(self, state: Tensor, fleet: Fleet, tick: Tick, rows: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass
class Episodes:
    """What came of them: one entry each."""

    reached: Tensor  # was it, within the budget?
    updates: Tensor
    seconds: Tensor  # until the target, or until the budget was spent
    # Of every tick, where they were asked for: states, actions, seconds so far, loss as share of the first, episode
    ticks: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)


def allowed(action: Tensor, fleet: Fleet, tick: Tick, turn: Tensor, waited_since: Tensor) -> Tensor:
    """Whom an action (E,) lets go (E, N). Nobody waits for ever, and somebody always runs."""
    rows = torch.arange(fleet.E, device=fleet.device)
    who = fleet.idle & (action == ALL)[:, None]
    who[rows, tick.worker] |= action == ITSELF
    if bool((action == NEXT).any()):
        N = fleet.N
        order = (torch.arange(N, device=fleet.device)[None] - turn[:, None]) % N  # places from whose turn it is
        following = torch.where(fleet.idle, order, N).argmin(1)
        chosen = action == NEXT
        who[rows, following] |= chosen
        turn.copy_(torch.where(chosen, (following + 1) % N, turn))
    who |= fleet.idle & (fleet.updates - waited_since >= PATIENCE * fleet.N)
    nobody = ~(who | ~fleet.idle).any(1)
    return who | (fleet.idle & nobody[:, None])


def play(
    instances: Sequence[Instance],
    data: Data,
    chooser: Chooser,
    state: State,
    device: str = "cpu",
    record: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Episodes:
    """Play episodes of instances of one shape."""
    fleet = Fleet(instances, data, device)
    watch = Watch(fleet, state.history, state.scene, state.validated)
    E, dev = fleet.E, fleet.device
    rows = torch.arange(E, device=dev)
    target = torch.tensor([each.target for each in instances], device=dev)
    budget = torch.tensor([each.budget for each in instances], device=dev)
    turn = torch.zeros(E, dtype=torch.int64, device=dev)
    since = torch.zeros(E, fleet.N, dtype=torch.int64, device=dev)
    over = torch.zeros(E, dtype=torch.bool, device=dev)  # of the rows still there
    ended = Episodes(
        torch.zeros(E, dtype=torch.bool, device=dev),
        torch.zeros(E, dtype=torch.int64, device=dev),
        torch.zeros(E, dtype=torch.float64, device=dev),
    )
    loss = fleet.loss() if state.validated else None
    while True:
        tick = fleet.arrive()
        if state.validated:
            loss = fleet.loss()
        seen = watch.see(fleet, tick, loss)
        since[torch.arange(fleet.E, device=dev), tick.worker] = fleet.updates
        action, chosen = chooser(seen, fleet, tick, rows)
        alone = fleet.idle.sum(1) == 1
        action = torch.where(alone & (action == ALL), ITSELF, action)  # which is the same then
        who = allowed(action, fleet, tick, turn, since)
        if record and fleet.updates % RECORD_EVERY == 0:
            ended.ticks.append((seen, chosen.to(torch.int8), fleet.now.float(), (watch.fast / watch.first), torch.where(over, -1, rows)))
        some = who.any(1)
        fleet.apply(some)
        fleet.go(who)
        if fleet.updates % TEST_EVERY == 0:
            hit = (fleet.accuracy() >= target) & ~over
            lost = ~torch.isfinite(fleet.layers[-1].sum((1, 2))) if fleet.updates % 50 == 0 else torch.zeros_like(hit)
            now_over = (hit | lost | (fleet.updates >= budget)) & ~over
            which = rows[now_over]
            ended.reached[which] = hit[now_over]
            ended.updates[which] = fleet.updates
            spent = fleet.now * (budget / fleet.updates)  # what has diverged would have gone on for nothing
            ended.seconds[which] = torch.where(hit, fleet.now, spent)[now_over]
            over |= now_over
            left = int((~over).sum())
            if progress:
                progress(E - left, E)
            if not left:
                return ended
            if left < 0.85 * fleet.E:
                kept = (~over).nonzero()[:, 0]
                fleet.keep(kept)
                watch.keep(kept)
                rows, target, budget, turn, since, over = (x[kept] for x in (rows, target, budget, turn, since, over))
