"""K-sync and K-batch-sync (Dutta et al., AISTATS 2018): a step is made of the first K that come.

K-sync takes the first K *workers*, each once; K-batch-sync the first K *updates*, so a fast worker that is done may
give another from the same weights. Then the rest abandon what they are doing and all start from the new model.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from paceline.policies.components import Weigher, Weights
from paceline.policies.contract import Apply, Cancel, Decisions, Discard, Grant, Policy, Update, WorkerId
from paceline.policies.options import Range

K: TypeAlias = Annotated[int, Range(1), "how many to wait for"]


class _FirstK(Policy):
    """What the two share: collect, and at K apply, cancel the rest and grant all."""

    def __init__(self, k: K, weights: Weights) -> None:
        self.k = k
        self.iteration: dict[WorkerId, int] = {}  # member → its Grants so far
        self.running: dict[WorkerId, None] = {}  # members with a Grant not yet answered
        self.pending: list[Update] = []
        self.weigher = Weigher(weights)

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.iteration[worker] = 0
        return [self._grant(worker)]

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if self.iteration.get(worker) != update.iteration:
            return [Discard(update)]  # an answer to a cancelled Grant; a newer one is out
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
        """How many make a step."""
        return min(self.k, len(self.iteration))

    def _meanwhile(self, worker: WorkerId) -> Decisions:
        """What a worker does whose update is in while K are not."""
        return []

    def _close(self) -> Decisions:
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
    summary = "apply the first `k` workers' updates; the others start again"

    def __init__(self, k: K = 4, weights: Weights = "sum") -> None:
        super().__init__(k, weights)

    @property
    def least_workers(self) -> int:
        return self.k


class KBatch(_FirstK):
    summary = "as ksync, but the first `k` updates, whoever they are from"

    def __init__(self, k: K = 4, weights: Weights = "sum") -> None:
        super().__init__(k, weights)

    def _meanwhile(self, worker: WorkerId) -> Decisions:
        return [self._grant(worker)]

    def _wanted(self) -> int:
        return self.k if self.iteration else 0
