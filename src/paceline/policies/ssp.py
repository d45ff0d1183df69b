"""Stale Synchronous Parallel (Ho et al., NIPS 2013): no worker runs more than `staleness` ahead of the slowest.

Papers count the lead in two ways. By default a worker with a lead of s = `staleness` still runs, and waits beyond it.
With `wait=at` a worker waits at a lead of s, as in the unified framework of Zhu et al. (ICLR 2020): the server lets a
worker run while 0 < pₛ − min pⱼ < s, and lets all idle workers run once the slowest has moved on. So it is the default
with a threshold of s − 1.
"""

from __future__ import annotations

from typing import Annotated, Literal

from paceline.policies.components import Progress, Waiting, Weights
from paceline.policies.contract import Decisions, Discard, Grant, Update, WorkerId, grant_all
from paceline.policies.one_by_one import OneByOne
from paceline.policies.options import PolicyError, Range


class SSP(OneByOne):
    summary = "as asp, but no worker runs more than `staleness` iterations ahead of the slowest"

    def __init__(
        self,
        staleness: Annotated[int, Range(0), "how many iterations a worker may be ahead of the slowest"] = 3,
        weights: Weights = "sum",
        wait: Annotated[
            Literal["beyond", "at"],
            "beyond: a worker waits when it is more than `staleness` ahead; at: as in Zhu et al. (ICLR 2020), "
            "when it is `staleness` ahead",
        ] = "beyond",
    ) -> None:
        if wait == "at" and staleness < 1:
            raise PolicyError("ssp: wait=at needs a staleness of at least 1; with 0, every worker would wait forever.")
        self.staleness, self.wait = staleness, wait
        self.most = staleness - 1 if wait == "at" else staleness  # the largest lead with which a worker may run
        super().__init__(weights)
        self.progress = Progress()
        self.waiting = Waiting()

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.progress.add(worker)
        return [Grant(worker)]  # it starts level with the slowest

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if worker not in self.progress:
            return [Discard(update)]
        done = self.progress.advance(worker)
        decisions: Decisions = [self._apply(update, len(self.progress))]
        if done - self.progress.slowest <= self.most:
            decisions.append(Grant(worker))
        else:
            self.waiting.add(worker, done)
        return decisions + self._release()

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if worker not in self.progress:
            return []
        self.progress.remove(worker)  # it may have been the slowest, so others may proceed now
        self.waiting.discard(worker)
        self._forget(worker)
        return self._release()

    def _members(self) -> Progress:
        return self.progress

    def _release(self) -> Decisions:
        """Grant every waiting worker within the bound. The slowest always is, so one worker always runs."""
        return grant_all(self.waiting.release(self.progress.slowest + self.most))
