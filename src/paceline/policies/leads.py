"""Two ways to count how far a worker is ahead, which DSSP bounds. Each also holds the workers that wait.

`ProgressLeads` counts from the slowest member's progress, as SSP and the DSSP paper do. `RunningLeads` counts only what
a worker has pushed while the longest-running iteration runs. A worker that is always faster falls ever further ahead by
the first count, and not by the second.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from typing import Protocol

from paceline.policies.components import Progress, Waiting
from paceline.policies.contract import WorkerId


class Leads(Protocol):
    """How far each member is ahead, and the workers that wait. Every method costs O(log N) or less."""

    def add(self, worker: WorkerId) -> None:
        """Add a member. It gets its first Grant now."""

    def remove(self, worker: WorkerId) -> None:
        """Remove a member."""

    def advance(self, worker: WorkerId) -> int:
        """Count an update of a worker. Return how far the worker is ahead now."""

    def asks(self, worker: WorkerId) -> bool:
        """Return whether a worker may ask the controller for extra iterations."""

    def slowest(self) -> WorkerId | None:
        """Return the worker whose next push the others wait for, if there is one."""

    def granted(self, worker: WorkerId) -> None:
        """Note that a worker gets a Grant now."""

    def wait(self, worker: WorkerId) -> None:
        """Let a worker wait."""

    def release(self) -> list[WorkerId]:
        """Remove and return the workers that need not wait any longer."""


class ProgressLeads:
    """A worker's lead is its progress minus that of the slowest. It waits until its lead is at most `low`."""

    def __init__(self, progress: Progress, low: int) -> None:
        self.progress, self.low = progress, low
        self.waiting = Waiting()
        self.members_at: dict[int, dict[WorkerId, None]] = {}  # progress → members that have completed this many

    def add(self, worker: WorkerId) -> None:
        self.progress.add(worker)
        self._enter(worker)

    def remove(self, worker: WorkerId) -> None:
        self._leave(worker)
        self.progress.remove(worker)
        self.waiting.discard(worker)

    def advance(self, worker: WorkerId) -> int:
        self._leave(worker)
        self.progress.advance(worker)
        self._enter(worker)
        return self.progress.gap(worker)

    def asks(self, worker: WorkerId) -> bool:
        return self.progress[worker] == self.progress.fastest

    def slowest(self) -> WorkerId | None:
        return next(iter(self.members_at[self.progress.slowest]))

    def granted(self, worker: WorkerId) -> None:
        pass

    def wait(self, worker: WorkerId) -> None:
        self.waiting.add(worker, self.progress[worker])

    def release(self) -> list[WorkerId]:
        return self.waiting.release(self.progress.slowest + self.low)

    def _enter(self, worker: WorkerId) -> None:
        """Add a worker to the members at its progress."""
        self.members_at.setdefault(self.progress[worker], {})[worker] = None

    def _leave(self, worker: WorkerId) -> None:
        """Remove a worker from the members at its progress."""
        members = self.members_at[self.progress[worker]]
        del members[worker]
        if not members:
            del self.members_at[self.progress[worker]]


class RunningLeads:
    """A worker's lead is the number of updates that it has pushed while the longest-running iteration runs.

    It waits until that iteration ends, and until its lead over the next one is at most `high`. A Grant to a lead of at
    most `high` means: while an iteration runs, no other worker pushes more than high + 1 updates.
    """

    def __init__(self, progress: Progress, high: int) -> None:
        self.progress, self.high = progress, high
        self.updates = 0  # that all workers have pushed; so each has a number, from 1
        self.waiting = Waiting()
        self._running: dict[WorkerId, int] = {}  # worker that holds a Grant → the number of updates before that Grant
        self._oldest: list[tuple[int, WorkerId]] = []  # the same as a heap; entries of ended iterations are skipped
        self._recent: dict[WorkerId, list[int]] = {}  # worker → the numbers of its latest high + 1 updates

    def add(self, worker: WorkerId) -> None:
        self.progress.add(worker)
        self._recent[worker] = []
        self.granted(worker)

    def remove(self, worker: WorkerId) -> None:
        self.progress.remove(worker)
        self._running.pop(worker, None)
        self.waiting.discard(worker)
        del self._recent[worker]

    def advance(self, worker: WorkerId) -> int:
        self.progress.advance(worker)
        self._running.pop(worker, None)
        self.updates += 1
        recent = self._recent[worker]
        recent.append(self.updates)
        del recent[: -self.high - 1]
        return len(recent) - bisect_right(recent, self._since())

    def asks(self, worker: WorkerId) -> bool:
        return True

    def slowest(self) -> WorkerId | None:
        while self._oldest and self._running.get(self._oldest[0][1]) != self._oldest[0][0]:
            heapq.heappop(self._oldest)
        return self._oldest[0][1] if self._oldest else None

    def granted(self, worker: WorkerId) -> None:
        self._running[worker] = self.updates
        heapq.heappush(self._oldest, (self.updates, worker))

    def wait(self, worker: WorkerId) -> None:
        recent = self._recent[worker]
        until = recent[0] if len(recent) > self.high else 0  # this update must be before the longest-running iteration
        self.waiting.add(worker, max(until, self._since() + 1))

    def release(self) -> list[WorkerId]:
        return self.waiting.release(self._since())

    def _since(self) -> int:
        """Return the number of updates before the longest-running iteration; all of them if none runs."""
        slowest = self.slowest()
        return self.updates if slowest is None else self._running[slowest]
