"""The report of a run, computed from its trace events as they occur.

Means leave out the warm-up (the start of a ring, the tuning of batches). Maxima and counts cover the whole run.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from paceline.observe.observer import Observer
from paceline.observe.trace import Identity


@dataclass(frozen=True)
class Gaps:
    """The distribution of the seconds between two consecutive arrivals of updates at the server."""

    zero_fraction: float
    p5: float
    p50: float
    p95: float


@dataclass(frozen=True)
class Report:
    """The figures of one run."""

    mean_iteration_seconds: float  # member-seconds per iteration
    samples_per_second: float  # samples whose updates changed the model
    blocking_seconds: float  # wait per iteration: from arrival to Grant, and from computed to Turn
    blocking_by_worker: dict[int, float]
    communication_seconds: float  # push and pull per iteration, including queueing
    max_staleness: int
    mean_staleness: float
    max_progress_gap: int
    update_gaps: Gaps
    batch_sizes: dict[int, int]
    updates: int  # applied or kept
    discarded: int
    warm_up_iterations: int
    updates_by_worker: dict[int, int] = field(default_factory=dict)
    lost: int = 0  # how often a worker was lost
    returned: int = 0  # how often a worker joined again
    seconds: float = 0.0  # that the rates cover: from the first member, or the end of the warm-up, to the last arrival
    clipped: dict[int, int] = field(default_factory=dict)  # worker → how many of its updates were clipped
    counts_samples: bool = True  # False if each update counts as one sample, because no batch size is known

    @property
    def rate_unit(self) -> str:
        """The unit of `samples_per_second`."""
        return rate_unit(self.counts_samples)


def rate_unit(counts_samples: bool) -> str:
    """Return the unit of a rate of samples. If each update counts as one sample, the rate is one of updates."""
    return "samples/s" if counts_samples else "updates/s"


class _WorkerTotals:
    __slots__ = (
        "arrived_at",
        "batch",
        "blocked",
        "communicated",
        "computed_at",
        "granted_at",
        "iterations",
        "lost",
        "turned_at",
        "updates",
    )

    def __init__(self) -> None:
        self.granted_at = self.computed_at = self.turned_at = 0.0
        self.arrived_at: float | None = None  # when it began to wait for a Grant
        self.batch = 0
        self.blocked = self.communicated = 0.0
        self.iterations = self.updates = 0
        self.lost = False  # was it given up, or did its connection end without a message?


class _Series:
    """A series of numbers in bounded memory: when it is full, every second number is dropped."""

    MAX_VALUES = 1 << 18

    def __init__(self) -> None:
        self.values = array("d")
        self._stride = 1
        self._skip = 0

    def add(self, value: float) -> None:
        self._skip += 1
        if self._skip < self._stride:
            return
        self._skip = 0
        self.values.append(value)
        if len(self.values) >= self.MAX_VALUES:
            self.values = self.values[::2]
            self._stride *= 2

    def percentiles(self, *of: float) -> list[float]:
        ordered = sorted(self.values)
        if not ordered:
            return [0.0 for _ in of]
        return [ordered[min(len(ordered) - 1, round(p / 100 * (len(ordered) - 1)))] for p in of]


class Summary(Observer):
    """An observer that computes a Report."""

    TOGETHER = 1e-6  # seconds; updates closer than this arrive at the same time

    def __init__(self, warm_up: int = 0) -> None:
        """warm_up: the number of arrivals after which means begin.

        If a run ends before that, or less than a round after it, its iteration time is that of the whole run.
        """
        self.warm_up = warm_up
        self.arrivals = 0
        self._workers: dict[int, _WorkerTotals] = {}
        self._members = 0
        self._member_seconds = 0.0
        self._members_since = 0.0
        self._warming_seconds = 0.0  # member-seconds of the warm-up
        self._began: float | None = 0.0 if warm_up == 0 else None  # of the first member, or of the end of the warm-up
        self._ended = 0.0
        self._iterations = 0
        self._samples = 0
        self._largest_batch = 0
        self._undecided: dict[Identity, int] = {}  # samples of the updates that the policy has not decided about
        self._updates = self._discarded = 0
        self._lost = self._returned = 0
        self._clipped: dict[int, int] = {}
        self._stale_total = self._stale_count = self._max_staleness = 0
        self._max_progress_gap = 0
        self._gaps = _Series()
        self._gap_count = self._gap_zeros = 0
        self._last_arrival: float | None = None

    def report(self) -> Report:
        """Return the figures of the run so far."""
        span = self._ended - (self._began or 0.0)
        seconds = self._member_seconds + self._members * (self._ended - self._members_since)
        iterations = max(self._iterations, 1)
        iteration_seconds = seconds / iterations
        if self._iterations < self._members:  # less than a round since the warm-up
            iteration_seconds = (self._warming_seconds + seconds) / max(self.arrivals, 1)
        workers = self._workers
        blocked = {number: self._blocked(worker) for number, worker in sorted(workers.items())}
        p5, p50, p95 = self._gaps.percentiles(5, 50, 95)
        return Report(
            mean_iteration_seconds=iteration_seconds,
            samples_per_second=self._samples / span if span > 0 else 0.0,
            blocking_seconds=sum(blocked.values()) / iterations,
            blocking_by_worker={number: blocked[number] / max(workers[number].iterations, 1) for number in blocked},
            communication_seconds=sum(worker.communicated for worker in workers.values()) / iterations,
            max_staleness=self._max_staleness,
            mean_staleness=self._stale_total / max(self._stale_count, 1),
            max_progress_gap=self._max_progress_gap,
            update_gaps=Gaps(self._gap_zeros / max(self._gap_count, 1), p5, p50, p95),
            batch_sizes={number: worker.batch for number, worker in sorted(workers.items())},
            updates=self._updates,
            discarded=self._discarded,
            clipped=dict(sorted(self._clipped.items())),
            warm_up_iterations=self.warm_up,
            updates_by_worker={number: worker.updates for number, worker in sorted(workers.items())},
            lost=self._lost,
            returned=self._returned,
            seconds=max(0.0, span),
            counts_samples=self._largest_batch != 1,
        )

    def joined(self, time: float, worker: int, incarnation: int = 1) -> None:
        self._count_members(time, +1)
        if not self._workers and self._began is not None:
            self._began = time
        known = self._workers.get(worker)
        if known:
            # All workers join once more if a script has loaded other weights. They were not away.
            self._returned += known.lost or known.iterations > 0
            known.arrived_at, known.lost = None, False
        else:
            self._workers[worker] = _WorkerTotals()

    def left(self, time: float, worker: int, lost: bool = False) -> None:
        self._count_members(time, -1)
        self._lost += lost
        known = self._workers[worker]
        known.arrived_at, known.lost = None, lost

    def granted(self, time: float, worker: int, batch_size: int | None, progress_gap: int) -> None:
        record = self._workers[worker]
        if progress_gap > self._max_progress_gap:
            self._max_progress_gap = progress_gap
        record.granted_at = time
        if record.arrived_at is not None:
            if self._began is not None:
                record.blocked += time - max(record.arrived_at, self._began)
            record.arrived_at = None

    def pulled(self, time: float, worker: int, version: int) -> None:
        if self._began is not None:
            record = self._workers[worker]
            record.communicated += time - record.granted_at

    def computed(self, time: float, worker: int, seconds: float | None = None) -> None:
        record = self._workers[worker]
        record.computed_at = time
        if seconds is not None and self._began is not None:  # `pulled` was called this much too late
            record.communicated -= min(seconds, time - record.granted_at)

    def turned(self, time: float, worker: int) -> None:
        record = self._workers[worker]
        record.turned_at = time
        if self._began is not None:
            record.blocked += time - record.computed_at

    def arrived(
        self,
        time: float,
        worker: int,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None:
        record = self._workers[worker]
        record.arrived_at = self._ended = time
        record.batch = batch_size
        if batch_size > self._largest_batch:
            self._largest_batch = batch_size
        self._undecided[worker, incarnation, iteration] = batch_size
        self.arrivals += 1
        if self._began is not None:
            record.communicated += time - record.turned_at
            record.iterations += 1
            self._iterations += 1
            if self._last_arrival is not None:
                gap = time - self._last_arrival
                self._gap_count += 1
                if gap <= self.TOGETHER:
                    self._gap_zeros += 1
                self._gaps.add(gap)
        elif self.arrivals == self.warm_up:
            self._began = time
            self._warming_seconds = self._member_seconds + self._members * (time - self._members_since)
            self._member_seconds, self._members_since = 0.0, time
        self._last_arrival = time

    def applied(
        self,
        time: float,
        version: int,
        workers: tuple[int, ...],
        iterations: tuple[int, ...],
        staleness: tuple[int, ...],
        incarnations: tuple[int, ...] = (),
    ) -> None:
        counts = self._began is not None and time > self._began
        if counts:
            self._stale_total += sum(staleness)
            self._stale_count += len(staleness)
        for stale in staleness:
            if stale > self._max_staleness:
                self._max_staleness = stale
        for index, worker in enumerate(workers):
            incarnation = incarnations[index] if incarnations else 1
            self._accept((worker, incarnation, iterations[index]), counts)

    def kept(self, time: float, worker: int, iteration: int, slot: int, incarnation: int = 1) -> None:
        self._accept((worker, incarnation, iteration), self._counts(time))

    def discarded(self, time: float, worker: int, iteration: int, incarnation: int = 1) -> None:
        self._discarded += 1
        self._undecided.pop((worker, incarnation, iteration), None)

    def clipped(self, time: float, worker: int, iteration: int, factor: float, incarnation: int = 1) -> None:
        self._clipped[worker] = self._clipped.get(worker, 0) + 1

    def _blocked(self, worker: _WorkerTotals) -> float:
        """Return how long the worker has waited. A wait that has not ended counts up to the end of the run."""
        if worker.arrived_at is None or self._began is None:
            return worker.blocked
        return worker.blocked + self._ended - max(worker.arrived_at, self._began)

    def _counts(self, time: float) -> bool:
        """Return whether this time is after the warm-up. The arrival that ends the warm-up still belongs to it."""
        return self._began is not None and time > self._began

    def _accept(self, update: Identity, counts: bool) -> None:
        """Count an update once, even if it is kept and applied several times."""
        samples = self._undecided.pop(update, None)
        if samples is not None:
            self._updates += 1
            self._workers[update[0]].updates += 1
            if counts:
                self._samples += samples

    def _count_members(self, time: float, change: int) -> None:
        if self._began is not None:
            self._member_seconds += self._members * (time - self._members_since)
        self._members_since = time
        self._members += change
