"""Bulk Synchronous Parallel: a barrier. Everyone's update is applied together, then everyone goes on.

`backup=c` (Chen et al., 2016) closes the barrier when all but c have arrived; `fraction=C` when a fraction C has, as
FL-R²SP does inside its groups. The late ones' updates are discarded, and they are sent the newest model.

A round is open from one Apply to the next. Whoever joins is granted into the open round at once, because it starts
level with the slowest and the barrier must wait for it.

Pipelined (`pipeline=true`), a round is settled earlier: when the last of its members is ready to push, a Stream names
them all, and their slices are applied and returned as they come. From then on nobody can be let in, so whoever joins
waits for the next round; and whoever leaves before it was wholly in is missing from the Apply.
"""

from __future__ import annotations

import math
from typing import Annotated

from paceline.policies.components import AnnouncedUpdate, Weigher, Weights
from paceline.policies.contract import Add, Apply, Decisions, Discard, Grant, Policy, Stream, Turn, Update, WorkerId
from paceline.policies.options import PolicyError, Range
from paceline.policies.tuning import BatchTuner


class BSP(Policy):
    summary = "a barrier: apply all updates together, then let everyone go on"

    def __init__(
        self,
        backup: Annotated[int, Range(0), "how many of the slowest not to wait for"] = 0,
        fraction: Annotated[float, Range(0, 1, open_low=True), "the fraction of the members to wait for"] = 1.0,
        pipeline: Annotated[bool, "return each part as soon as it is complete"] = False,
        tune_batches: Annotated[bool, "let faster workers compute larger batches"] = False,
        max_growth: Annotated[float, Range(1), "how many times its own a tuned batch may grow to"] = 4.0,
        weights: Weights = "sum",
        running: Annotated[bool, "add updates up as they come, so that servers need not hold them"] = False,
    ) -> None:
        if pipeline and (backup or fraction < 1):
            raise PolicyError("bsp: pipeline=true needs everyone's part, so backup and fraction must be left out.")
        if running and (pipeline or tune_batches):
            raise PolicyError("bsp: running=true is for plain rounds, so leave pipeline and tune_batches out.")
        self.backup, self.fraction, self.pipelined, self.running = backup, fraction, pipeline, running
        self.round = 0
        self.granted: dict[WorkerId, tuple[int, float]] = {}  # member → round and time of its Grant
        self.pending: list[Update] = []  # arrived in this round
        self.present: dict[WorkerId, None] = {}  # members among them, who wait
        self.announced: dict[
            WorkerId, AnnouncedUpdate
        ] = {}  # pipelined: members who are ready, until the Stream names them
        self.promised: dict[WorkerId, float] = {}  # pipelined: what the updates of this round's Stream weigh
        self.joiners: dict[WorkerId, None] = {}  # pipelined: who came after the Stream, for the next round
        self.weigher = Weigher(weights, tuned=tune_batches)
        self.tuner = BatchTuner(max_growth) if tune_batches else None

    @property
    def least_workers(self) -> int:
        return self.backup + 1

    @property
    def hears_ready(self) -> bool:
        return self.pipelined

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        if self.promised:
            self.joiners[worker] = None
            return []
        return [self._grant(worker, now)]

    def ready(self, worker: WorkerId, batch_size: int, now: float) -> Decisions:
        if not self.pipelined:
            return [Turn(worker)]
        if worker not in self.granted:
            return []
        self.weigher.see(worker, batch_size)
        self.announced[worker] = AnnouncedUpdate(worker, batch_size)
        return [Turn(worker), *self._stream()]

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if worker not in self.granted:
            return [Discard(update)]
        granted_round, granted_at = self.granted[worker]
        if not self.pipelined:
            self.weigher.see(worker, update.batch_size)
        if self.tuner:
            self.tuner.observe(update, now - granted_at)
        if granted_round < self.round:  # late: its barrier has closed without it
            return [Discard(update), self._grant(worker, now)]
        self.pending.append(update)
        self.present[worker] = None
        added: Decisions = [Add(update, self.round, self._raw(update))] if self.running else []
        return added + self._close(now)

    def left(self, worker: WorkerId, now: float) -> Decisions:
        self.joiners.pop(worker, None)
        if self.granted.pop(worker, None) is None:
            return []
        self.present.pop(worker, None)
        self.announced.pop(worker, None)
        self.weigher.forget(worker)
        if self.tuner:
            self.tuner.forget(worker)
        decisions: Decisions = []
        if self.pipelined and not self.promised:  # the Stream is of members, and cannot name it any more
            decisions += [Discard(update) for update in self.pending if update.worker == worker]
            self.pending = [update for update in self.pending if update.worker != worker]
        return decisions + self._stream() + self._close(now)

    def _stream(self) -> Decisions:
        """Pipelined: settle the round if all its members are ready."""
        if not self.announced or len(self.announced) < len(self.granted):
            return []
        workers, weights = tuple(self.announced), self.weigher.together(list(self.announced.values()))
        self.promised = dict(zip(workers, weights, strict=True))
        self.announced = {}
        return [Stream(workers, weights)]

    def _close(self, now: float) -> Decisions:
        """End the round if enough have arrived."""
        if not (self.promised if self.pipelined else self.pending):
            return []
        if self.granted and len(self.granted) - len(self.present) > self._may_miss():
            return []
        applied = self._apply()
        self.round += 1
        going = [*self.present, *self.joiners]
        self.present, self.joiners, self.promised, self.pending = {}, {}, {}, []
        return [*applied, *(self._grant(worker, now) for worker in going)]

    def _apply(self) -> Decisions:
        """What the round came to: nothing, if all who were streamed have left in mid-push."""
        if not self.pipelined:
            weights = self.weigher.together(self.pending)
            sums = ((self.round, weights[0] / self._raw(self.pending[0])),) if self.running else ()
            return [Apply(tuple(self.pending), weights, sums=sums)]
        by_worker = {update.worker: update for update in self.pending}
        updates = tuple(by_worker[worker] for worker in self.promised if worker in by_worker)
        return [Apply(updates, tuple(self.promised[update.worker] for update in updates))] if updates else []

    def _raw(self, update: Update) -> float:
        """What an update weighs in a running sum: all that is known of its weight before the round is over."""
        return float(update.batch_size) if self.weigher.kind == "mean" else 1.0

    def _may_miss(self) -> int:
        members = len(self.granted)
        quorum = members - self.backup
        if self.fraction < 1:
            quorum = min(quorum, math.floor(self.fraction * members + 1e-9))  # 0.29 · 100 is 28.999…
        return members - quorum if quorum > 1 else members - 1

    def _grant(self, worker: WorkerId, now: float) -> Grant:
        self.granted[worker] = (self.round, now)
        return Grant(worker, self.tuner.batch(worker) if self.tuner else None)
