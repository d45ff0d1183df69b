"""Asynchronous Parallel: every update is applied as it comes and its worker goes on at once."""

from __future__ import annotations

from paceline.policies.contract import Decisions, Discard, Grant, Policy, Update, WorkerId, apply_one
from paceline.policies.pieces import Weigher, Weights


class ASP(Policy):
    summary = "apply each update as it comes; nobody ever waits"
    streamable = True

    def __init__(self, weights: Weights = "sum") -> None:
        self.members: set[WorkerId] = set()
        self.weigher = Weigher(weights)

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.members.add(worker)
        return [Grant(worker)]

    def arrived(self, update: Update, now: float) -> Decisions:
        if update.worker not in self.members:
            return [Discard(update)]
        self.weigher.see(update)
        (weight,) = self.weigher.in_round((update,), len(self.members))
        return [apply_one(update, weight), Grant(update.worker)]

    def left(self, worker: WorkerId, now: float) -> Decisions:
        self.members.discard(worker)
        self.weigher.forget(worker)
        return []
