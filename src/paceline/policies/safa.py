"""SAFA, a semi-asynchronous protocol for federated averaging (Wu et al., IEEE Trans. Computers 70(5), 2021).

From the paper:
 - *Lag-tolerant distribution.* At the start of a round, two kinds of clients receive the new global model: up-to-date
   ones, whose updates have arrived, and deprecated ones, which are more than `lag` (the paper's τ) rounds behind. The
   tolerable ones in between continue with the model they have.
 - *Compensatory first-come-first-merge selection.* A round picks the first ⌈C·N⌉ updates (`fraction` is C) of clients
   that were not picked in the round before. Other updates that arrive meanwhile are undrafted. If the round ends short
   of its quota, they fill it in the order of arrival.
 - *Three-step aggregation with a cache of one entry per client.* First, the picked updates replace their entries, and
   the entries of deprecated clients are reset to the global model. Second, the new global model is the mean of all
   entries, weighted by n_k/n. Third, the undrafted updates replace their entries, to count from the next round on.

Beyond the paper:
 - A client without an entry, because it is new or deprecated, counts as the present global model: `mix` leaves this
   share of the global model in place.
 - A client's batch size stands for n_k, its amount of data.
 - The entry of a client that has left is dropped.
 - A round also ends when there is no client left to wait for, or after `limit` seconds.
"""

from __future__ import annotations

import math
from typing import Annotated

from paceline.policies.components import count_of
from paceline.policies.contract import (
    Apply,
    Cancel,
    Decisions,
    Discard,
    Grant,
    Keep,
    Policy,
    Update,
    WakeAt,
    WorkerId,
)
from paceline.policies.options import Range


class SAFA(Policy):
    summary = "federated rounds of the first `fraction` of clients; later updates are cached"
    keeps = True
    mixes = True

    def __init__(
        self,
        fraction: Annotated[
            float, Range(0, 1, open_low=True), "C, the fraction of the clients that a round picks"
        ] = 0.5,
        lag: Annotated[int, Range(0), "τ, the number of rounds that a client may be behind"] = 5,
        limit: Annotated[float, Range(0), "seconds after which a round ends; 0: no limit"] = 0.0,
    ) -> None:
        self.fraction, self.lag, self.limit = fraction, lag, limit
        self.round = 0
        self.round_began = -math.inf
        self.iteration: dict[WorkerId, int] = {}  # member → number of its Grants
        self.running: dict[WorkerId, int] = {}  # member that runs an iteration → the round of its model
        self.size: dict[WorkerId, int] = {}  # n_k, the amount of data of client k
        self.cache: dict[WorkerId, Update] = {}  # one entry per client
        self.picked: list[Update] = []  # P, the updates that this round picks
        self.undrafted: list[Update] = []  # Q, the other updates that arrive in this round
        self.picked_before: set[WorkerId] = set()

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.iteration[worker] = 0
        decisions: Decisions = [self._grant(worker)]
        if len(self.iteration) == 1:
            decisions += self._begin(now)
        return decisions

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if self.iteration.get(worker) != update.iteration:
            return [Discard(update)]  # its Grant was cancelled, and a newer one was sent
        self.running.pop(worker, None)
        self.size[worker] = update.batch_size
        (self.undrafted if worker in self.picked_before else self.picked).append(update)
        return self._close(now)

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if self.iteration.pop(worker, None) is None:
            return []
        for place in (self.running, self.cache):
            place.pop(worker, None)
        return self._close(now)

    def woke(self, now: float) -> Decisions:
        return self._close(now)

    def _close(self, now: float) -> Decisions:
        """End the round if the quota is met, no client is left to wait for, or its time is over."""
        quota = max(1, count_of(self.fraction, len(self.iteration)))  # after the last member left, there is none
        over = bool(self.limit) and now >= self.round_began + self.limit
        if not (len(self.picked) >= quota or not self.running or over):
            return []
        if not (self.picked or self.undrafted):
            return self._begin(now) if over and self.iteration else []
        short = max(0, quota - len(self.picked))
        picked, undrafted = self.picked + self.undrafted[:short], self.undrafted[short:]
        self.picked, self.undrafted = [], []
        self.picked_before = {update.worker for update in picked}
        self.round += 1
        deprecated = [worker for worker, since in self.running.items() if self.round - since > self.lag]

        for worker in deprecated:  # step 1
            self.cache.pop(worker, None)
        decisions: Decisions = [Keep(update, update.worker) for update in picked]
        self.cache.update((update.worker, update) for update in picked)
        decisions.append(self._aggregate())  # step 2
        decisions += [Keep(update, update.worker) for update in undrafted]  # step 3
        self.cache.update((update.worker, update) for update in undrafted)
        for worker in self.size.keys() - self.iteration.keys():
            self.cache.pop(worker, None)
            del self.size[worker]

        decisions += [Cancel(worker) for worker in deprecated]
        idle = [update.worker for update in picked + undrafted]
        decisions += [self._grant(worker) for worker in idle if worker in self.iteration and worker not in self.running]
        decisions += [self._grant(worker) for worker in deprecated]
        return decisions + self._begin(now)

    def _aggregate(self) -> Apply:
        """Return the mean of all entries, by n_k/n. A client without an entry counts as the global model."""
        clients = self.iteration.keys() | self.cache.keys()
        average = sum(self.size.values()) / len(self.size)
        total = sum(self.size.get(client, average) for client in clients)
        updates = tuple(self.cache[worker] for worker in sorted(self.cache))
        weights = [self.size[update.worker] / total for update in updates]
        share = sum(weights)
        return Apply(updates, tuple(weight / share for weight in weights), mix=min(1.0, share))

    def _begin(self, now: float) -> Decisions:
        """Begin the time limit of a round."""
        self.round_began = now
        return [WakeAt(now + self.limit)] if self.limit and self.iteration else []

    def _grant(self, worker: WorkerId) -> Grant:
        self.iteration[worker] += 1
        self.running[worker] = self.round
        return Grant(worker)
