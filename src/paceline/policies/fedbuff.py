"""FedBuff, buffered asynchronous aggregation (Nguyen et al., AISTATS 2022).

No client waits: a client whose update has arrived is granted the newest model at once. The server collects K updates
and applies them together, as a step of `rate` (the paper's η_g) times their mean. The weight of an update that is τ
versions old is (1+τ)^−discount. The paper uses 0.5.
"""

from __future__ import annotations

from typing import Annotated

from paceline.policies.contract import Apply, Decisions, Discard, Grant, Policy, Update, WorkerId
from paceline.policies.options import Range


class FedBuff(Policy):
    summary = "no client waits; every `k` updates make a step (federated)"

    def __init__(
        self,
        k: Annotated[
            int, Range(1), "K, the number of updates that make a step, or the number of clients if that is smaller"
        ] = 10,
        rate: Annotated[
            float, Range(0, open_low=True), "η_g, the length of a step, in units of the mean of the updates"
        ] = 1.0,
        discount: Annotated[float, Range(0), "the weight of an update τ versions old is (1+τ)^−discount"] = 0.5,
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
        self.version = max(self.version, update.base_version)  # the versions of a resumed model do not start at 0
        self.buffer.append(update)
        return [*self._step(), Grant(update.worker)]

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if worker not in self.members:
            return []
        self.members.remove(worker)
        return self._step()

    def _step(self) -> Decisions:
        """Apply the buffer if it holds enough updates."""
        if not self.buffer or len(self.buffer) < min(self.k, len(self.members)):
            return []
        updates, self.buffer = tuple(self.buffer), []
        staleness = [self.version - update.base_version for update in updates]
        self.version += 1
        return [Apply(updates, tuple(self.rate * (1 + tau) ** -self.discount / len(updates) for tau in staleness))]
