"""Components that policies share: progress, waiting workers, iteration time, quorums, weights of updates."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeAlias

from paceline.policies.contract import Decisions, WakeAt, WorkerId

Weights: TypeAlias = Annotated[
    Literal["sum", "mean", "equal"],
    "the weight of an update. sum: its full learning rate; mean, the default of a real job: a round is one "
    "data-parallel step; equal: as mean, but all updates count alike",
]

ROUNDING = 1e-9  # relative error of a product that does not count: 0.1 · 30 is 3.0000000000000004, and means 3


def count_of(share: float, members: int) -> int:
    """Return the smallest number of members that is at least this share of them.

    Every share that becomes a number of members is rounded up here. In algorithm 2 of the FL-R²SP paper (ToN 2026), a
    client's update adds M/N to `frac_collected`, and lines 4 and 5 wait while `frac_collected < C`. So a group
    aggregates with the first update that brings it to C or above: with C = 0.75 the fourth of 5, and the eighth of 10.
    """
    return math.ceil(share * members * (1 - ROUNDING))


class Progress:
    """The completed iterations of each member. The minimum and the maximum cost O(1), amortised.

    A worker that joins starts at the slowest member's progress, so that no member waits for it to catch up.
    """

    def __init__(self) -> None:
        self._done: dict[WorkerId, int] = {}
        self._count_at: dict[int, int] = {}  # progress → number of members that have completed this many
        self.slowest = 0
        self.fastest = 0

    def __getitem__(self, worker: WorkerId) -> int:
        return self._done[worker]

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._done

    def __len__(self) -> int:
        return len(self._done)

    def gap(self, worker: WorkerId) -> int:
        """Return the number of iterations that a member is ahead of the slowest."""
        return self._done[worker] - self.slowest

    def add(self, worker: WorkerId) -> None:
        self._done[worker] = self.slowest
        self._count_at[self.slowest] = self._count_at.get(self.slowest, 0) + 1
        self.fastest = max(self.fastest, self.slowest)

    def advance(self, worker: WorkerId) -> int:
        """Count one more iteration and return the worker's new progress."""
        done, count_at = self._done, self._count_at
        before = done[worker]
        done[worker] = after = before + 1
        count_at[after] = count_at.get(after, 0) + 1
        if after > self.fastest:
            self.fastest = after
        members = count_at[before]
        if members > 1:
            count_at[before] = members - 1
        else:
            del count_at[before]
            if before == self.slowest:
                self.slowest = after
        return after

    def remove(self, worker: WorkerId) -> None:
        done = self._done.pop(worker)
        self._count_at[done] -= 1
        if self._count_at[done]:
            return
        del self._count_at[done]
        if not self._done:
            self.fastest = self.slowest
            return
        # Amortised O(1): an earlier advance has passed each step of these loops.
        while self.slowest not in self._count_at:
            self.slowest += 1
        while self.fastest not in self._count_at:
            self.fastest -= 1


class Waiting:
    """Workers that wait for the slowest. They are released in the order of their progress, least first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, WorkerId]] = []
        self._ticket: dict[WorkerId, int] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._ticket)

    def add(self, worker: WorkerId, progress: int) -> None:
        self._tickets += 1
        self._ticket[worker] = self._tickets
        heapq.heappush(self._heap, (progress, self._tickets, worker))

    def discard(self, worker: WorkerId) -> None:
        self._ticket.pop(worker, None)  # `release` skips its entry in the heap

    def release(self, limit: int) -> list[WorkerId]:
        """Remove and return the workers whose progress is at most `limit`."""
        released = []
        while self._heap and self._heap[0][0] <= limit:
            _, ticket, worker = heapq.heappop(self._heap)
            if self._ticket.get(worker) == ticket:
                del self._ticket[worker]
                released.append(worker)
        return released


class RecentMax:
    """The largest value in the last one to two rounds of observations, in O(1). Older values are forgotten."""

    def __init__(self) -> None:
        self.value = 0.0
        self._this_round = self._last_round = 0.0
        self._seen = 0

    def see(self, value: float, members: int) -> None:
        """Observe the value of one member. A round is one observation of each of `members` members."""
        if value > self._this_round:
            self._this_round = value
        self._seen += 1
        if self._seen >= members:
            self._last_round, self._this_round, self._seen = self._this_round, 0.0, 0
        self.value = self._this_round if self._this_round > self._last_round else self._last_round


class IterationTime:
    """T, the iteration time of R²SP: the largest of the workers' exponential moving averages.

    The wait for a turn is not part of an iteration. Otherwise every round would last at least T, and T could only grow.
    A worker's first iteration counts only until its second one. Caches, compilers and GPUs warm up in it, so it may
    take a hundred times as long as a later one. Its average begins with the median of its next START iterations. If it
    began with one of them, and a transfer stalled in that one, the gaps would be too long for ten rounds.
    """

    WEIGHT = 0.1  # weight of the newest observation
    START = 3  # iterations after the first one, with whose median an average begins

    def __init__(self) -> None:
        self.T: float | None = None  # None before the first observation
        self._mean: dict[WorkerId, float] = {}
        self._first: dict[WorkerId, list[float]] = {}  # worker → its iterations before its average begins
        self._recent = RecentMax()

    def observe(self, worker: WorkerId, seconds: float) -> None:
        first = self._first.setdefault(worker, [])
        if len(first) <= self.START:
            first.append(seconds)
            warm = sorted(first[1:]) or first
            mean = warm[(len(warm) - 1) // 2]  # the less of two
        else:
            mean = self._mean[worker]
            mean += self.WEIGHT * (seconds - mean)
        self._mean[worker] = mean
        self._recent.see(mean, len(self._mean))
        self.T = self._recent.value

    def forget(self, worker: WorkerId) -> None:
        self._mean.pop(worker, None)
        self._first.pop(worker, None)


class MeanIterationTime(IterationTime):
    """T of FL-R²SP: one exponential moving average over the iterations of all workers."""

    def observe(self, worker: WorkerId, seconds: float) -> None:
        self.T = seconds if self.T is None else self.T + self.WEIGHT * (seconds - self.T)


class WakeTimes:
    """The wake times of several policies, merged into the WakeAt of one. Each policy is known by a number."""

    def __init__(self) -> None:
        self._wanted: dict[int, float] = {}  # policy → when it wants to be woken
        self._heap: list[tuple[float, int]] = []  # (time, policy); outdated entries are skipped
        self._set = math.inf  # time of the WakeAt that is set

    def set(self, number: int, time: float) -> None:
        self._wanted[number] = time
        heapq.heappush(self._heap, (time, number))

    def cancel(self, number: int) -> None:
        self._wanted.pop(number, None)

    def due(self, now: float) -> list[int]:
        """Remove and return the policies to wake now. The WakeAt that was set is over."""
        self._set = math.inf
        due = []
        while self._heap and self._heap[0][0] <= now:
            time, number = heapq.heappop(self._heap)
            if self._wanted.get(number) == time:
                del self._wanted[number]
                due.append(number)
        return due

    def next(self) -> Decisions:
        """Return a WakeAt for the earliest wake time, if it is earlier than the one that is set."""
        while self._heap and self._wanted.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if not self._heap or self._heap[0][0] >= self._set:
            return []
        self._set = self._heap[0][0]
        return [WakeAt(self._set)]


class Batch(Protocol):
    """An update, or the announcement of one, that has a weight."""

    @property
    def worker(self) -> WorkerId: ...
    @property
    def batch_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class AnnouncedUpdate:
    """An update that a worker is ready to push."""

    worker: WorkerId
    batch_size: int


class Weigher:
    """Computes the weights of the updates of an Apply (the option `weights`).

    sum: each update has its own full learning rate, scaled linearly with its batch if the policy tunes batches.
    mean: one round moves the model as far as one step of data-parallel training on the samples of the round.
    equal: as mean, but every update of a round has the same weight, whatever its batch size.

    A worker that leaves is still a member of the rounds of updates that others have begun. Otherwise the last updates
    of a job that ends would count more and more: those of four workers 1/4, 1/3, 1/2 and 1.
    """

    def __init__(self, kind: str, tuned: bool = False) -> None:
        self.kind, self.tuned = kind, tuned
        self._all_equal = kind == "equal" or (kind == "sum" and not tuned)  # batch sizes do not matter
        self._own: dict[WorkerId, int] = {}  # worker → its own batch size, as reported or from its first iteration
        self._latest: dict[WorkerId, int] = {}  # worker → its latest batch size
        self._total = 0  # sum of the latest batch sizes
        self._members: dict[WorkerId, int] = {}  # worker → the members of the round of its last update

    def set_own(self, worker: WorkerId, batch_size: int) -> None:
        """Note the batch size that a worker computes if a Grant names none."""
        if not self._all_equal:
            self._own[worker] = batch_size

    def see(self, worker: WorkerId, batch_size: int) -> None:
        """Note a worker's batch size, once per iteration: when its update arrives or, if streamed, is announced."""
        if self._all_equal:
            return
        self._own.setdefault(worker, batch_size)
        self._total += batch_size - self._latest.get(worker, 0)
        self._latest[worker] = batch_size

    def forget(self, worker: WorkerId) -> None:
        self._own.pop(worker, None)
        self._members.pop(worker, None)
        self._total -= self._latest.pop(worker, 0)

    def together(self, updates: Sequence[Batch]) -> tuple[float, ...]:
        """Return the weights of updates that are applied together and form a round."""
        if self._all_equal:
            return (1.0 / len(updates) if self.kind == "equal" else 1.0,) * len(updates)
        if self.kind == "mean":
            total = sum(update.batch_size for update in updates)
            return tuple(update.batch_size / total for update in updates)
        return tuple(self._scale(update) for update in updates)

    def in_round(self, updates: Sequence[Batch], members: int) -> tuple[float, ...]:
        """Return the weights of updates that are part of a round of `members` members."""
        if self.kind == "sum":
            return tuple(self._scale(update) if self.tuned else 1.0 for update in updates)
        members = max(1, members)
        counted = [self._counted(update.worker, members) for update in updates]
        if self.kind == "equal":
            return tuple(1.0 / max(count, len(updates)) for count in counted)
        # Assume the average batch size for members that have not sent an update yet, and for those that have left.
        seen = self._total * max(1.0, members / len(self._latest)) if self._latest else 0
        total = max(seen, sum(update.batch_size for update in updates))
        pairs = zip(updates, counted, strict=True)
        return tuple(update.batch_size / (total * count / members) for update, count in pairs)

    def _counted(self, worker: WorkerId, members: int) -> int:
        """Return the members of the round of a worker's update: those of now, or of its last one if there were more."""
        before, self._members[worker] = self._members.get(worker, members), members
        return max(before, members)

    def _scale(self, update: Batch) -> float:
        """Return an update's batch size in units of its worker's own."""
        return update.batch_size / self._own.get(update.worker, update.batch_size)
