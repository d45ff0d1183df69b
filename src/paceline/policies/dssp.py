"""Dynamic Stale Synchronous Parallel (Zhao et al., ICDCS 2019): the staleness threshold is chosen at run time.

A worker that is at most `low` (s_L) iterations ahead of the slowest proceeds as under SSP. Beyond that, the fastest
worker asks the synchronization controller (algorithm 2). The controller returns the number r* of extra iterations, at
most r_max = high − low, after which that worker waits the shortest time for the slowest. The worker may run these extra
iterations one by one. Every other worker waits for the slowest.

The paper's text and its theorem 2 keep the threshold within [low, high]. Its algorithm 1, as printed, does not: the OK
on line 14 uses up none of the r* iterations, and a worker that has used them up may ask again. `bounded=true` (the
default) keeps the promise that the progress gap is at most `high`. `bounded=false` follows the printed algorithm, whose
gap has no bound. If low = high, both are SSP.
"""

from __future__ import annotations

from typing import Annotated

from paceline.policies.components import Progress, Waiting, Weights
from paceline.policies.contract import Decisions, Discard, Grant, Update, WorkerId, grant_all
from paceline.policies.one_by_one import OneByOne
from paceline.policies.options import PolicyError, Range


class DSSP(OneByOne):
    summary = "as ssp, with a threshold chosen at run time between `low` and `high`"

    def __init__(
        self,
        low: Annotated[int, Range(0), "s_L, the threshold that every worker may reach"] = 3,
        high: Annotated[int, Range(0), "s_U, the highest threshold that the controller may choose"] = 15,
        bounded: Annotated[bool, "keep the gap within `high`; false: the paper's algorithm as printed"] = True,
        weights: Weights = "sum",
    ) -> None:
        if high < low:
            raise PolicyError(f"dssp: high must be at least low ({low}); got {high}.")
        self.low, self.high, self.bounded = low, high, bounded
        super().__init__(weights)
        self.progress = Progress()
        self.waiting = Waiting()
        self.extra: dict[WorkerId, int] = {}  # r_p: the extra iterations that worker p may still run
        self.pushes: dict[WorkerId, tuple[float, float]] = {}  # table A: times of the latest two pushes, latest first
        self.members_at: dict[int, dict[WorkerId, None]] = {}  # progress → members that have completed this many

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.progress.add(worker)
        self._enter(worker)
        self.pushes[worker] = (now, now)  # its first Grant stands in for a push until there is one
        self.extra[worker] = 0
        return [Grant(worker)]

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if worker not in self.progress:
            return [Discard(update)]
        self._leave(worker)
        done = self.progress.advance(worker)
        self._enter(worker)
        self.pushes[worker] = (now, self.pushes[worker][0])
        decisions: Decisions = [self._apply(update, len(self.progress))]
        if self._may_proceed(worker, done):
            decisions.append(Grant(worker))
        else:
            self.waiting.add(worker, done)
        return decisions + self._release()

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if worker not in self.progress:
            return []
        self._leave(worker)
        self.progress.remove(worker)
        self.waiting.discard(worker)
        self._forget(worker)
        del self.extra[worker], self.pushes[worker]
        return self._release()

    def _may_proceed(self, worker: WorkerId, done: int) -> bool:
        """Algorithm 1, lines 3 to 16."""
        ahead = done - self.progress.slowest
        if self.extra[worker] > 0 and (not self.bounded or ahead <= self.high):
            self.extra[worker] -= 1
            return True
        if ahead <= self.low:
            return True
        if done < self.progress.fastest or (self.bounded and ahead > self.high):
            return False
        most = self.high - self.low
        if self.bounded:
            most = min(most, self.high - ahead + 1)  # this OK is the first of the extra iterations
        extra = self._controller(worker, most)
        if extra > 0:
            self.extra[worker] = extra - 1 if self.bounded else extra
        return extra > 0

    def _controller(self, worker: WorkerId, most: int) -> int:
        """Algorithm 2: the number r* ≤ most of extra iterations after which the wait for the slowest is shortest."""
        latest, before = self.pushes[worker]
        interval = latest - before  # I_p
        slow_latest, slow_before = self.pushes[next(iter(self.members_at[self.progress.slowest]))]
        slow_interval = slow_latest - slow_before  # I_slowest
        if slow_interval <= 0:  # the interval of the slowest is unknown
            return 0
        best, shortest = 0, float("inf")
        for r in range(most + 1):
            mine = latest + r * interval  # Sim_p[r]
            # Sim_slowest[k] = first + k·I_slowest for k in [0, r_max]. The nearest k needs no search.
            first = slow_latest + slow_interval
            k = min(max(round((mine - first) / slow_interval), 0), self.high - self.low)
            wait = abs(first + k * slow_interval - mine)
            if wait < shortest:
                best, shortest = r, wait
        return best

    def _members(self) -> Progress:
        return self.progress

    def _release(self) -> Decisions:
        """Line 17: grant every waiting worker that is now at most `low` ahead of the slowest."""
        return grant_all(self.waiting.release(self.progress.slowest + self.low))

    def _enter(self, worker: WorkerId) -> None:
        """Add a worker to the members at its progress."""
        self.members_at.setdefault(self.progress[worker], {})[worker] = None

    def _leave(self, worker: WorkerId) -> None:
        """Remove a worker from the members at its progress."""
        members = self.members_at[self.progress[worker]]
        del members[worker]
        if not members:
            del self.members_at[self.progress[worker]]
