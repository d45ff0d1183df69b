"""K-sync and K-batch-sync (Dutta et al., AISTATS 2018): the first K updates make a step.

K-sync takes the updates of the first K *workers*, one of each. K-batch-sync takes the first K *updates*: a fast worker
may compute another one from the same weights. After the step, the other workers abandon their iterations, and all
workers start from the new model.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from paceline.policies.components import Weigher, Weights
from paceline.policies.contract import Apply, Cancel, Decisions, Discard, Grant, Policy, Update, WorkerId
from paceline.policies.options import Range

K: TypeAlias = Annotated[int, Range(1), "the number of updates to wait for"]


class _FirstK(Policy):
    """The part that both share: collect K updates, apply them, cancel the other iterations and grant all workers."""

    def __init__(self, k: K, weights: Weights) -> None:
        self.k = k
        self.iteration: dict[WorkerId, int] = {}  # member → number of its Grants
        self.running: dict[WorkerId, None] = {}  # members that hold an unanswered Grant
        self.pending: list[Update] = []
        self.weigher = Weigher(weights)

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.iteration[worker] = 0
        return [self._grant(worker)]

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if self.iteration.get(worker) != update.iteration:
            return [Discard(update)]  # its Grant was cancelled, and a newer one was sent
        self.weigher.see(worker, update.batch_size)
        self.running.pop(worker, None)
        self.pending.append(update)
        return self._close() or self._meanwhile(worker)

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if self.iteration.pop(worker, None) is None:
            return []
        self.running.pop(worker, None)
        self.weigher.forget(worker)
        return self._close()

    def _wanted(self) -> int:
        """Return the number of updates that make a step."""
        return min(self.k, len(self.iteration))

    def _meanwhile(self, worker: WorkerId) -> Decisions:
        """Return what a worker does after its update has arrived and before the step is made."""
        return []

    def _close(self) -> Decisions:
        """Make the step if enough updates have arrived."""
        if not self.pending or len(self.pending) < self._wanted():
            return []
        apply = Apply(tuple(self.pending), self.weigher.together(self.pending))
        cancelled = [Cancel(worker) for worker in self.running]
        self.pending = []
        return [apply, *cancelled, *(self._grant(worker) for worker in self.iteration)]

    def _grant(self, worker: WorkerId) -> Grant:
        self.iteration[worker] += 1
        self.running[worker] = None
        return Grant(worker)


class KSync(_FirstK):
    summary = "apply the updates of the first `k` workers; the others start again"

    def __init__(self, k: K = 4, weights: Weights = "sum") -> None:
        super().__init__(k, weights)

    @property
    def least_workers(self) -> int:
        return self.k


class KBatch(_FirstK):
    summary = "as ksync, but apply the first `k` updates, from any workers"

    def __init__(self, k: K = 4, weights: Weights = "sum") -> None:
        super().__init__(k, weights)

    def _meanwhile(self, worker: WorkerId) -> Decisions:
        return [self._grant(worker)]

    def _wanted(self) -> int:
        return self.k if self.iteration else 0
