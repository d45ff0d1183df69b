"""Bulk Synchronous Parallel: a barrier. Everyone's update is applied together, then everyone goes on.

`backup=c` (Chen et al., 2016) closes the barrier when all but c have arrived; `fraction=C` when a fraction C has, as
FL-R²SP does inside its groups. The late ones' updates are discarded, and they are sent the newest model.

A round is open from one Apply to the next. Whoever joins is granted into the open round at once, because it starts
level with the slowest and the barrier must wait for it.
"""

from __future__ import annotations

import math
from typing import Annotated

from paceline.policies.contract import Apply, Decisions, Discard, Grant, Policy, Update, WorkerId
from paceline.policies.options import PolicyError, Range
from paceline.policies.pieces import Weigher, Weights
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
    ) -> None:
        if pipeline and (backup or fraction < 1):
            raise PolicyError("bsp: pipeline=true needs everyone's part, so backup and fraction must be left out.")
        self.backup, self.fraction, self.pipelined = backup, fraction, pipeline
        self.round = 0
        self.granted: dict[WorkerId, tuple[int, float]] = {}  # member → round and time of its Grant
        self.pending: list[Update] = []  # arrived in this round
        self.present: dict[WorkerId, None] = {}  # members among them, who wait
        self.weigher = Weigher(weights, tuned=tune_batches)
        self.tuner = BatchTuner(max_growth) if tune_batches else None

    @property
    def least_workers(self) -> int:
        return self.backup + 1

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        return [self._grant(worker, now)]

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if worker not in self.granted:
            return [Discard(update)]
        granted_round, granted_at = self.granted[worker]
        self.weigher.see(update)
        if self.tuner:
            self.tuner.observe(update, now - granted_at)
        if granted_round < self.round:  # late: its barrier has closed without it
            return [Discard(update), self._grant(worker, now)]
        self.pending.append(update)
        self.present[worker] = None
        return self._close(now)

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if self.granted.pop(worker, None) is None:
            return []
        self.present.pop(worker, None)
        self.weigher.forget(worker)
        if self.tuner:
            self.tuner.forget(worker)
        return self._close(now)

    def _close(self, now: float) -> Decisions:
        """End the round if enough have arrived."""
        if not self.pending or (self.granted and len(self.granted) - len(self.present) > self._may_miss()):
            return []
        apply = Apply(tuple(self.pending), self.weigher.together(self.pending))
        self.round += 1
        going, self.present, self.pending = self.present, {}, []
        return [apply, *(self._grant(worker, now) for worker in going)]

    def _may_miss(self) -> int:
        members = len(self.granted)
        quorum = members - self.backup
        if self.fraction < 1:
            quorum = min(quorum, math.floor(self.fraction * members + 1e-9))  # 0.29 · 100 is 28.999…
        return members - max(1, quorum)

    def _grant(self, worker: WorkerId, now: float) -> Grant:
        self.granted[worker] = (self.round, now)
        return Grant(worker, self.tuner.batch(worker) if self.tuner else None)
