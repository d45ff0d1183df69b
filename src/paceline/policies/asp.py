"""Asynchronous Parallel: every update is applied when it arrives, and its worker proceeds at once."""

from __future__ import annotations

from paceline.policies.components import Weights
from paceline.policies.contract import Decisions, Discard, Grant, Update, WorkerId
from paceline.policies.one_by_one import OneByOne


class ASP(OneByOne):
    summary = "apply each update when it arrives; no worker ever waits"

    def __init__(self, weights: Weights = "sum") -> None:
        super().__init__(weights)
        self.members: set[WorkerId] = set()

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.members.add(worker)
        return [Grant(worker)]

    def arrived(self, update: Update, now: float) -> Decisions:
        if update.worker not in self.members:
            return [Discard(update)]
        return [self._apply(update, len(self.members)), Grant(update.worker)]

    def left(self, worker: WorkerId, now: float) -> Decisions:
        self.members.discard(worker)
        self._forget(worker)
        return []

    def _members(self) -> set[WorkerId]:
        return self.members
