"""Dynamic Stale Synchronous Parallel (Zhao et al., ICDCS 2019): the staleness threshold is chosen at run time.

A worker that is at most `low` (s_L) iterations ahead of the slowest proceeds as under SSP. Beyond that, the fastest
worker asks the synchronization controller (algorithm 2). The controller returns the number r* of extra iterations, at
most r_max = high − low, after which that worker waits the shortest time for the slowest. The worker may run these extra
iterations one by one. Every other worker waits for the slowest.

The paper promises two things that no algorithm can keep together if one worker is always faster: a threshold within
[low, high] (its text and theorem 2), and the speed of ASP (its table I). A bound on the lead in iterations makes the
faster worker proceed at the slowest one's pace in the long run. So `bound` names what is promised:

gap (the default) keeps the text's promise: the progress gap is at most `high`. The speed is that of SSP.

staleness counts a lead afresh for each iteration of the slowest worker: it is the number of updates that a worker has
pushed while the longest-running iteration runs. Every worker may ask the controller. A worker that waits goes on when
that iteration ends, as in figure 2 of the paper and as algorithm 2 assumes. So while an iteration runs, no other worker
pushes more than high + 1 updates. The staleness of N workers is then at most (high + 1)·(N − 1), if updates are applied
whole. The progress gap has no bound. The speed is that of ASP while the fastest worker is up to `high` times as fast as
the slowest.

none is algorithm 1 as printed: the OK on line 14 uses up none of the r* iterations, and a worker that has used them up
may ask again. It bounds nothing.

If low = high, `gap` and `none` are SSP.
"""

from __future__ import annotations

from typing import Annotated, Literal

from paceline.policies.components import Progress, Weights
from paceline.policies.contract import Decisions, Discard, Grant, Update, WorkerId
from paceline.policies.leads import Leads, ProgressLeads, RunningLeads
from paceline.policies.one_by_one import OneByOne
from paceline.policies.options import PolicyError, Range


class DSSP(OneByOne):
    summary = "as ssp, with a threshold chosen at run time; for workers of unequal speed, use bound=staleness"

    def __init__(
        self,
        low: Annotated[int, Range(0), "s_L, the threshold that every worker may reach"] = 3,
        high: Annotated[int, Range(0), "s_U, the highest threshold that the controller may choose"] = 15,
        bound: Annotated[
            Literal["gap", "staleness", "none"],
            "what `high` bounds. gap: the progress gap, as the paper promises; as slow as ssp if workers are unequal. "
            "staleness: the updates of a worker during another one's iteration; as fast as asp. none: nothing, as the "
            "paper's algorithm is printed",
        ] = "gap",
        weights: Weights = "sum",
    ) -> None:
        if high < low:
            raise PolicyError(f"dssp: high must be at least low ({low}); got {high}.")
        self.low, self.high, self.bound = low, high, bound
        super().__init__(weights)
        self.progress = Progress()
        self.leads: Leads = (
            RunningLeads(self.progress, high) if bound == "staleness" else ProgressLeads(self.progress, low)
        )
        self.extra: dict[WorkerId, int] = {}  # r_p: the extra iterations that worker p may still run
        self.pushes: dict[WorkerId, tuple[float, float]] = {}  # table A: times of the latest two pushes, latest first

    def joined(self, worker: WorkerId, now: float) -> Decisions:
        self.leads.add(worker)
        self.pushes[worker] = (now, now)  # its first Grant stands in for a push until there is one
        self.extra[worker] = 0
        return [Grant(worker)]

    def arrived(self, update: Update, now: float) -> Decisions:
        worker = update.worker
        if worker not in self.progress:
            return [Discard(update)]
        ahead = self.leads.advance(worker)
        self.pushes[worker] = (now, self.pushes[worker][0])
        decisions: Decisions = [self._apply(update, len(self.progress))]
        if self._may_proceed(worker, ahead):
            self.leads.granted(worker)
            decisions.append(Grant(worker))
        else:
            self.leads.wait(worker)
        return decisions + self._release()

    def left(self, worker: WorkerId, now: float) -> Decisions:
        if worker not in self.progress:
            return []
        self.leads.remove(worker)
        self._forget(worker)
        del self.extra[worker], self.pushes[worker]
        return self._release()

    def _may_proceed(self, worker: WorkerId, ahead: int) -> bool:
        """Algorithm 1, lines 3 to 16."""
        bounded = self.bound != "none"
        if self.extra[worker] > 0 and (not bounded or ahead <= self.high):
            self.extra[worker] -= 1
            return True
        if ahead <= self.low:
            return True
        if not self.leads.asks(worker) or (bounded and ahead > self.high):
            return False
        most = self.high - self.low
        if bounded:
            most = min(most, self.high - ahead + 1)  # this OK is the first of the extra iterations
        extra = self._controller(worker, most)
        if extra > 0:
            self.extra[worker] = extra - 1 if bounded else extra
        return extra > 0

    def _controller(self, worker: WorkerId, most: int) -> int:
        """Algorithm 2: the number r* ≤ most of extra iterations after which the wait for the slowest is shortest."""
        latest, before = self.pushes[worker]
        interval = latest - before  # I_p
        slowest = self.leads.slowest()
        if slowest is None:  # there is no iteration to wait for
            return most
        slow_latest, slow_before = self.pushes[slowest]
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
        """Line 17: grant every worker that need not wait for the slowest any longer."""
        decisions: Decisions = []
        for worker in self.leads.release():
            self.leads.granted(worker)
            decisions.append(Grant(worker))
        return decisions
