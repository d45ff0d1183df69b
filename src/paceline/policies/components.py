"""Pieces that policies share: who has done how much, who waits, what an iteration takes, what an update weighs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeAlias

from paceline.policies.contract import WorkerId

Weights: TypeAlias = Annotated[
    Literal["sum", "mean", "equal"],
    "sum: each update in full; mean: a round is one data-parallel step; equal: as mean, whatever the batches",
]


class Progress:
    """Completed iterations of each member, and the least and the most of them in O(1) amortised.

    A joiner starts at the slowest member's progress, so that it holds nobody back for work done before it came.
    """

    def __init__(self) -> None:
        self._done: dict[WorkerId, int] = {}
        self._at: dict[int, int] = {}  # progress → how many members stand there
        self.slowest = 0
        self.fastest = 0

    def __getitem__(self, worker: WorkerId) -> int:
        return self._done[worker]

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._done

    def __len__(self) -> int:
        return len(self._done)

    def gap(self, worker: WorkerId) -> int:
        """How far a member is ahead of the slowest."""
        return self._done[worker] - self.slowest

    def add(self, worker: WorkerId) -> None:
        self._done[worker] = self.slowest
        self._at[self.slowest] = self._at.get(self.slowest, 0) + 1
        self.fastest = max(self.fastest, self.slowest)

    def advance(self, worker: WorkerId) -> int:
        """One iteration more; the worker's new progress."""
        done, at = self._done, self._at
        before = done[worker]
        done[worker] = after = before + 1
        at[after] = at.get(after, 0) + 1
        if after > self.fastest:
            self.fastest = after
        standing = at[before]
        if standing > 1:
            at[before] = standing - 1
        else:
            del at[before]
            if before == self.slowest:
                self.slowest = after
        return after

    def remove(self, worker: WorkerId) -> None:
        stood = self._done.pop(worker)
        self._at[stood] -= 1
        if self._at[stood]:
            return
        del self._at[stood]
        if not self._done:
            self.fastest = self.slowest
            return
        # Each step over an empty place is paid for by the advance that once passed it.
        while self.slowest not in self._at:
            self.slowest += 1
        while self.fastest not in self._at:
            self.fastest -= 1


class Waiting:
    """Workers that wait until the slowest has come within reach, those nearest to it first."""

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
        self._ticket.pop(worker, None)  # its place in the heap is skipped when it comes up

    def release(self, limit: int) -> list[WorkerId]:
        """Everyone whose progress is at most `limit`, who then waits no longer."""
        released = []
        while self._heap and self._heap[0][0] <= limit:
            _, ticket, worker = heapq.heappop(self._heap)
            if self._ticket.get(worker) == ticket:
                del self._ticket[worker]
                released.append(worker)
        return released


class RecentMax:
    """The largest value of the last one to two rounds of observations: O(1), and it forgets who recovered or left."""

    def __init__(self) -> None:
        self.value = 0.0
        self._this = self._last = 0.0
        self._seen = 0

    def see(self, value: float, members: int) -> None:
        """Observe one member's value, of `members` who are each observed once a round."""
        if value > self._this:
            self._this = value
        self._seen += 1
        if self._seen >= members:
            self._last, self._this, self._seen = self._this, 0.0, 0
        self.value = self._this if self._this > self._last else self._last


class IterationTime:
    """T, the iteration time: an exponential moving average for each worker, and the slowest worker's of them.

    Iterations are measured without the time spent waiting for a turn; otherwise every round would last at least T
    and T could only grow. A worker's first iteration counts only until its second: caches, compilers and GPUs warm up
    in it, and it may take a hundred times as long as any other.
    """

    WEIGHT = 0.1  # of the newest observation

    def __init__(self) -> None:
        self.T: float | None = None  # None while nothing has been observed
        self._mean: dict[WorkerId, float] = {}
        self._warm: set[WorkerId] = set()  # those whose mean begins with their second iteration
        self._recent = RecentMax()

    def observe(self, worker: WorkerId, seconds: float) -> None:
        mean = self._mean.get(worker)
        if mean is None or worker not in self._warm:
            if mean is not None:
                self._warm.add(worker)
            mean = seconds
        else:
            mean += self.WEIGHT * (seconds - mean)
        self._mean[worker] = mean
        self._recent.see(mean, len(self._mean))
        self.T = self._recent.value

    def forget(self, worker: WorkerId) -> None:
        self._mean.pop(worker, None)
        self._warm.discard(worker)


class MeanIterationTime(IterationTime):
    """T as FL-R²SP has it: one exponential moving average of everyone's iterations."""

    def observe(self, worker: WorkerId, seconds: float) -> None:
        self.T = seconds if self.T is None else self.T + self.WEIGHT * (seconds - self.T)


class Batch(Protocol):
    """What is weighed: an update, or the announcement of one."""

    @property
    def worker(self) -> WorkerId: ...
    @property
    def batch_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class AnnouncedUpdate:
    """An update that its worker is ready to push."""

    worker: WorkerId
    batch_size: int


class Weigher:
    """What each update of an Apply weighs (`weights=sum` or `weights=mean`).

    sum: each update has its own full learning rate, scaled linearly where the policy tunes batches.
    mean: one round moves the model as far as one step of data-parallel training on all its samples would.
    equal: the same, but every update of a round counts alike, however many samples it is of.
    """

    def __init__(self, kind: str, tuned: bool = False) -> None:
        self.kind, self.tuned = kind, tuned
        self._all_equal = kind == "equal" or (kind == "sum" and not tuned)  # then there is nothing to note
        self._own: dict[WorkerId, int] = {}  # the batch a worker brought with it
        self._latest: dict[WorkerId, int] = {}
        self._total = 0

    def see(self, worker: WorkerId, batch_size: int) -> None:
        """Note a worker's batch: once an iteration, when its update arrives or, if it is streamed, is announced."""
        if self._all_equal:
            return
        self._own.setdefault(worker, batch_size)
        self._total += batch_size - self._latest.get(worker, 0)
        self._latest[worker] = batch_size

    def forget(self, worker: WorkerId) -> None:
        self._own.pop(worker, None)
        self._total -= self._latest.pop(worker, 0)

    def together(self, updates: Sequence[Batch]) -> tuple[float, ...]:
        """The weights of updates applied together, which are a round of their own."""
        if self._all_equal:
            return (1.0 / len(updates) if self.kind == "equal" else 1.0,) * len(updates)
        if self.kind == "mean":
            total = sum(update.batch_size for update in updates)
            return tuple(update.batch_size / total for update in updates)
        return tuple(self._scale(update) for update in updates)

    def in_round(self, updates: Sequence[Batch], members: int) -> tuple[float, ...]:
        """The weights of updates that are part of a round in which every one of `members` takes part once."""
        if self._all_equal:
            return (1.0 / max(members, len(updates)) if self.kind == "equal" else 1.0,) * len(updates)
        if self.kind == "mean":
            # Members not heard of yet are taken to be average ones.
            seen = self._total * max(1.0, members / len(self._latest)) if self._latest else 0
            total = max(seen, sum(update.batch_size for update in updates))
            return tuple(update.batch_size / total for update in updates)
        return tuple(self._scale(update) for update in updates)

    def _scale(self, update: Batch) -> float:
        return update.batch_size / self._own.get(update.worker, update.batch_size)
