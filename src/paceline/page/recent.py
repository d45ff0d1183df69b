"""The recent past of all workers in bounded memory: their iterations, their present activity, and the use of the links.

A simulator reports when a pull begins and ends. A server learns of a pull only from the gradient that was computed from
it; the worker's own compute seconds then say where the pull ended.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, Literal, TypeVar

from paceline.observe.observer import Observer
from paceline.observe.trace import Identity, identities

Activity = Literal["computing", "pushing", "pulling", "waiting", "left"]
ACTIVITIES: tuple[Activity, ...] = ("computing", "pushing", "pulling", "waiting")

MAX_ITERATIONS = 4096  # finished iterations that are remembered
MAX_LINK_POINTS = 4096  # in each direction
MAX_STEPS = 1200  # of the counts of workers by activity
STEPS_PER_ROUND = 60
MEAN_OF = 1000  # iterations that the mean length of an iteration is about

T = TypeVar("T")


class RecentItems(Generic[T]):
    """The newest items of a series, and those of them that were added since the last `take`."""

    def __init__(self, most: int) -> None:
        self.items: deque[T] = deque(maxlen=most)
        self._added = 0

    def add(self, item: T) -> None:
        self.items.append(item)
        self._added += 1

    def take(self) -> list[T]:
        """Return the items that were added since the last call, or the newest of them if they are too many."""
        count, self._added = min(self._added, len(self.items)), 0
        return [self.items[index] for index in range(len(self.items) - count, len(self.items))]


class IterationRecord:
    """A finished iteration of a worker. Times are in seconds since the job began."""

    __slots__ = (
        *("number", "worker", "iteration", "began", "granted", "pulling", "computing", "computed", "pushing"),
        *("arrived", "batch", "loss", "staleness", "fate"),
    )

    def __init__(self, number: int, worker: Any, iteration: int, now: WorkerNow, batch: int, arrived: float) -> None:
        self.number, self.worker, self.iteration, self.batch, self.arrived = number, worker, iteration, batch, arrived
        self.began = now.began
        # A time that was not observed is that of the next thing that was.
        self.pushing = arrived if now.pushing is None else now.pushing
        self.computed = self.pushing if now.computed is None else now.computed
        self.granted = now.began if now.granted is None else now.granted
        self.computing = self.granted if now.computing is None else now.computing
        self.pulling = self.granted if now.pulling is None else now.pulling
        self.loss: float | None = None
        self.staleness: int | None = None
        self.fate = ""  # applied, kept or discarded; empty until the policy has decided

    @property
    def seconds(self) -> float:
        """The length of the iteration: from the arrival of the worker's update before to that of this one."""
        return self.arrived - self.began

    def share(self, activity: Activity) -> float:
        """Return the seconds that the worker spent on this activity."""
        if activity == "computing":
            return self.computed - self.computing
        if activity == "pulling":
            return self.computing - self.pulling
        if activity == "pushing":
            return self.arrived - self.pushing
        return self.pulling - self.began + self.pushing - self.computed

    def as_row(self) -> list[Any]:
        """Return the record as the page receives it."""
        times = (self.began, self.granted, self.pulling, self.computing, self.computed, self.pushing, self.arrived)
        who = [self.number, str(self.worker), self.iteration]
        return [*who, *(round(time, 6) for time in times), self.batch, self.loss, self.staleness, self.fate]


class WorkerNow:
    """The present activity of a worker, and the times of its current iteration."""

    __slots__ = (
        *("activity", "since", "began", "granted", "pulling", "computing", "computed", "pushing"),
        *("iteration", "pull_seconds", "batch", "loss", "staleness"),
    )

    def __init__(self) -> None:
        self.pull_seconds = 0.0  # of its last iteration
        self.batch = 0
        self.loss: float | None = None
        self.staleness: int | None = None
        self.join(0.0)

    def join(self, time: float) -> None:
        self.iteration = 0
        self.activity: Activity = "waiting"
        self.since = time
        self.begin(time)

    def begin(self, time: float) -> None:
        """Begin an iteration: the update of the one before has arrived."""
        self.began = time
        self.granted: float | None = None
        self.pulling: float | None = None
        self.computing: float | None = None
        self.computed: float | None = None
        self.pushing: float | None = None

    def as_row(self, worker: Any) -> list[Any]:
        """Return the worker's state as the page receives it."""
        times = (self.granted, self.pulling, self.computing, self.computed, self.pushing)
        rounded = [None if time is None else round(time, 6) for time in times]
        now = [str(worker), self.activity, round(self.since, 6), round(self.began, 6), self.iteration]
        return [*now, *rounded, round(self.pull_seconds, 6), self.batch, self.loss, self.staleness]


class RecentActivity(Observer):
    """An observer that remembers the last iterations of all workers, and the use of the links meanwhile."""

    def __init__(self) -> None:
        self.workers: dict[Any, WorkerNow] = {}
        self.iterations: deque[IterationRecord] = deque(maxlen=MAX_ITERATIONS)
        self.links = {"in": RecentItems[tuple[float, float]](MAX_LINK_POINTS)}
        self.links["out"] = RecentItems[tuple[float, float]](MAX_LINK_POINTS)
        self.counts: dict[Activity, int] = dict.fromkeys((*ACTIVITIES, "left"), 0)
        self.steps = RecentItems[list[float]](MAX_STEPS)  # a time, and the workers in each of ACTIVITIES
        self.applied_at: float | None = None
        self._mean_seconds = 0.0  # of recent iterations
        self._step_at = 0.0
        self._undecided: dict[Identity, IterationRecord] = {}
        self._changed: dict[int, IterationRecord] = {}
        self._number = 0
        self._sees_pulls = False

    def take(self) -> list[IterationRecord]:
        """Return the iterations that have ended or changed since the last call, as far as they are remembered."""
        changed = list(self._changed.values())
        self._changed.clear()
        oldest = self.iterations[0].number if self.iterations else 0
        return [record for record in changed if record.number >= oldest]

    def last(self, count: int) -> list[IterationRecord]:
        """Return the last `count` iterations."""
        size = len(self.iterations)
        return [self.iterations[index] for index in range(max(0, size - count), size)]

    def compute_seconds(self, count: int) -> dict[Any, list[float]]:
        """Return the compute times of each worker's last `count` iterations, as far as they are remembered."""
        times: dict[Any, list[float]] = {}
        for record in reversed(self.iterations):
            own = times.setdefault(record.worker, [])
            if len(own) < count:
                own.append(record.share("computing"))
        return times

    # Events

    def joined(self, time: float, worker: Any, incarnation: int = 1) -> None:
        known = self.workers.get(worker)
        if known is None:
            known = self.workers[worker] = WorkerNow()
        else:
            self.counts[known.activity] -= 1
        known.join(time)
        self.counts["waiting"] += 1
        self._step(time)

    def left(self, time: float, worker: Any, lost: bool = False) -> None:
        self._turn_to("left", worker, time)

    def granted(self, time: float, worker: Any, batch_size: int | None, progress_gap: int) -> None:
        record = self.workers[worker]
        record.iteration += 1
        record.granted = time
        self._turn_to("waiting" if self._sees_pulls else "computing", worker, time)

    def pulling(self, time: float, worker: Any) -> None:
        self._sees_pulls = True
        self.workers[worker].pulling = time
        self._turn_to("pulling", worker, time)

    def pulled(self, time: float, worker: Any, version: int) -> None:
        self.workers[worker].computing = time
        self._turn_to("computing", worker, time)

    def computed(self, time: float, worker: Any, seconds: float | None = None) -> None:
        record = self.workers[worker]
        record.computed = time
        if seconds is not None and not self._sees_pulls:
            record.computing = max(time - seconds, record.began if record.granted is None else record.granted)
        elif not self._sees_pulls:
            record.computing = record.granted
        self._turn_to("waiting", worker, time)

    def turned(self, time: float, worker: Any) -> None:
        if not self._sees_pulls:
            self.pushing(time, worker)

    def pushing(self, time: float, worker: Any) -> None:
        self.workers[worker].pushing = time
        self._turn_to("pushing", worker, time)

    def arrived(
        self,
        time: float,
        worker: Any,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None:
        now = self.workers[worker]
        self._number += 1
        record = IterationRecord(self._number, worker, iteration, now, batch_size, time)
        now.iteration, now.batch = iteration, batch_size
        now.pull_seconds = record.share("pulling")
        if loss is not None:
            record.loss = now.loss = loss
        now.begin(time)
        self._mean_seconds += (record.seconds - self._mean_seconds) / min(self._number, MEAN_OF)
        self.iterations.append(record)
        self._undecided[worker, incarnation, iteration] = record
        self._change(record)
        self._turn_to("waiting", worker, time)

    def applied(
        self,
        time: float,
        version: int,
        workers: tuple[Any, ...],
        iterations: tuple[int, ...],
        staleness: tuple[int, ...],
        incarnations: tuple[int, ...] = (),
    ) -> None:
        self.applied_at = time
        for update, stale in zip(identities(workers, iterations, incarnations), staleness, strict=True):
            record = self._undecided.pop(update, None)
            self.workers[update[0]].staleness = stale
            if record:
                record.staleness, record.fate = stale, "applied"
                self._change(record)

    def kept(self, time: float, worker: Any, iteration: int, slot: int, incarnation: int = 1) -> None:
        record = self._undecided.get((worker, incarnation, iteration))
        if record:
            record.fate = "kept"
            self._change(record)

    def discarded(self, time: float, worker: Any, iteration: int, incarnation: int = 1) -> None:
        record = self._undecided.pop((worker, incarnation, iteration), None)
        if record:
            record.fate = "discarded"
            self._change(record)

    def cancelled(self, time: float, worker: Any) -> None:
        now = self.workers[worker]
        began = now.began
        now.begin(began)
        self._turn_to("waiting", worker, time)

    def used(self, time: float, direction: str, fraction: float) -> None:
        points = self.links.get(direction)
        use = round(fraction, 3)
        if points is not None and not (points.items and points.items[-1][1] == use):
            points.add((round(time, 6), use))

    # Helpers

    def _turn_to(self, activity: Activity, worker: Any, time: float) -> None:
        now = self.workers[worker]
        self.counts[now.activity] -= 1
        self.counts[activity] += 1
        now.activity, now.since = activity, time
        self._step(time)

    def _step(self, time: float) -> None:
        """Note the counts of workers by activity, at most once in each step."""
        if self.steps.items and time - self._step_at < self._mean_seconds / STEPS_PER_ROUND:
            return
        self._step_at = time
        self.steps.add([time, *(self.counts[activity] for activity in ACTIVITIES)])

    def _change(self, record: IterationRecord) -> None:
        self._changed[record.number] = record
        if len(self._changed) > 2 * MAX_ITERATIONS:  # nobody takes them
            oldest = self.iterations[0].number
            self._changed = {number: each for number, each in self._changed.items() if number >= oldest}
        if len(self._undecided) > 2 * MAX_ITERATIONS:  # a policy may hold updates for long, but not this many
            del self._undecided[next(iter(self._undecided))]
