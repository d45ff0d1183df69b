"""FedBuff, buffered asynchronous aggregation (Nguyen et al., AISTATS 2022).

Nobody waits: whoever hands in an update is given the newest model at once. The server collects K updates and then makes
a step of them together, `rate` (the paper's η_g) times their mean. An update that is τ versions old weighs
(1+τ)^−discount; the paper's is 0.5.
"""

from __future__ import annotations

from typing import Annotated

from paceline.policies.contract import Apply, Decisions, Discard, Grant, Policy, Update, WorkerId
from paceline.policies.options import Range


class FedBuff(Policy):
    summary = "nobody waits; every `k` updates make a step (federated)"

    def __init__(
        self,
        k: Annotated[
            int, Range(1), "K, how many updates make a step; as many as there are clients, if they are fewer"
        ] = 10,
        rate: Annotated[
            float, Range(0, open_low=True), "η_g, how far a step goes, in units of the updates' mean"
        ] = 1.0,
        discount: Annotated[float, Range(0), "weigh an update τ versions old by (1+τ)^−discount"] = 0.5,
    ) -> None:
        self.k, self.rate, self.discount = k, rate, discount
        self.version = 0
        self.members: set[WorkerId] = set()
        self.buffer: list[Update] = []

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.members.add(worker)
        return [Grant(worker)]

    def arrived(self, update: Update, now: float) -> Decisions:
        if update.worker not in self.members:
            return [Discard(update)]
        self.version = max(self.version, update.base_version)  # a resumed model does not begin with 0
        self.buffer.append(update)
        return [*self._step(), Grant(update.worker)]

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if worker not in self.members:
            return []
        self.members.remove(worker)
        return self._step()

    def _step(self) -> Decisions:
        if not self.buffer or len(self.buffer) < min(self.k, len(self.members)):
            return []
        updates, self.buffer = tuple(self.buffer), []
        stale = [self.version - update.base_version for update in updates]
        self.version += 1
        return [Apply(updates, tuple(self.rate * (1 + each) ** -self.discount / len(updates) for each in stale))]
