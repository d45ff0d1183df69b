"""The part that ASP, SSP and DSSP share: each update is applied by itself, when it arrives or slice by slice."""

from __future__ import annotations

from abc import abstractmethod

from paceline.policies.components import AnnouncedUpdate, Progress, Weigher, Weights
from paceline.policies.contract import Apply, Decisions, Policy, Stream, Turn, Update, WorkerId, apply_one


class OneByOne(Policy):
    """Base of the policies that apply each update by itself."""

    streamable = True

    def __init__(self, weights: Weights) -> None:
        self.weigher = Weigher(weights)
        self.promised: dict[WorkerId, float] = {}  # streamed: the weight of each member's push

    @property
    def hears_ready(self) -> bool:
        return self.streamed

    @abstractmethod
    def _members(self) -> set[WorkerId] | Progress:
        """Return the members."""

    def ready(self, worker: WorkerId, batch_size: int, now: float) -> Decisions:
        if not self.streamed:
            return [Turn(worker)]
        members = self._members()
        if worker not in members:
            return []
        self.weigher.see(worker, batch_size)
        weights = self.weigher.in_round((AnnouncedUpdate(worker, batch_size),), len(members))
        (self.promised[worker],) = weights
        return [Turn(worker), Stream((worker,), weights, in_order=False)]

    def _apply(self, update: Update, members: int) -> Apply:
        if self.streamed:
            return apply_one(update, self.promised.pop(update.worker))
        self.weigher.see(update.worker, update.batch_size)
        return Apply((update,), self.weigher.in_round((update,), members))

    def _forget(self, worker: WorkerId) -> None:
        self.weigher.forget(worker)
        self.promised.pop(worker, None)
