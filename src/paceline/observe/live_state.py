"""The current state of a running job, computed from its trace events.

Rates and shares cover the recent past, between one and two windows long. The cost of an event does not grow with the
number of workers: it takes a few additions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from paceline.observe.observer import Observer
from paceline.observe.summary import rate_unit
from paceline.observe.trace import Identity, identities

State = Literal["computing", "waiting", "pushing", "left"]

SMOOTH = 50  # the job's loss is the mean of about this many recent losses
MAX_METRICS = 4  # names of metrics that are remembered; the least recent one is forgotten
INTERNAL_METRICS = frozenset({"cosine"})  # reported by the job itself for each update, not by the training script


class _WorkerCounts(NamedTuple):
    """The counts of a worker at some time."""

    time: float
    samples: int
    waited: float


class LiveWorker:
    """The current state of one worker."""

    __slots__ = (
        "_window",
        "arrived_at",
        "incarnation",
        "iteration",
        "loss",
        "newer",
        "older",
        "samples",
        "staleness",
        "state",
        "waited",
        "waits_since",
    )

    def __init__(self, window: float) -> None:
        self._window = window
        self.samples = 0  # in updates that have arrived
        self.waited = 0.0
        self.staleness: int | None = None  # of its update that was applied last
        self.loss: float | None = None  # of its last update that had one
        self.join(0.0, 1)

    def join(self, time: float, incarnation: int) -> None:
        """Start a new incarnation, which has done nothing yet."""
        self.incarnation = incarnation
        self.iteration = 0  # the current one
        self.state: State = "waiting"
        self.waits_since: float | None = None
        self.arrived_at = time
        self.older = self.newer = _WorkerCounts(time, self.samples, self.waited)

    def arrive(self, time: float, samples: int) -> None:
        """Count an update that has arrived."""
        self.samples += samples
        self.arrived_at = time
        # Counts are saved only when an update arrives, so that there are whole iterations between two of them.
        if time - self.newer.time >= self._window:
            self.older, self.newer = self.newer, _WorkerCounts(time, self.samples, self.waited)

    def stop_waiting(self, time: float) -> None:
        """Add the current wait, if there is one, to the time spent waiting."""
        if self.waits_since is not None:
            self.waited += time - self.waits_since
            self.waits_since = None

    def samples_per_second(self, now: float) -> float:
        """Return the recent rate up to the last arrival, or up to now if the next arrival is long overdue.

        The rate of a worker that hangs therefore falls.
        """
        spent = self.arrived_at - self.older.time
        if now - self.arrived_at > max(self._window, spent):
            spent = now - self.older.time
        return _ratio(self.samples - self.older.samples, spent)

    def waiting_share(self, now: float) -> float:
        """Return the share of the recent time in which the worker waited for a Grant or a Turn."""
        waited = self.waited + (0.0 if self.waits_since is None else now - self.waits_since)
        return _ratio(waited - self.older.waited, now - self.older.time)


class _Integral:
    """The integral of a count over time."""

    __slots__ = ("_since", "_total", "count")

    def __init__(self) -> None:
        self.count = 0
        self._total = self._since = 0.0

    def change(self, time: float, by: int) -> None:
        self._total, self._since = self.total(time), time
        self.count += by

    def total(self, now: float) -> float:
        return self._total + self.count * (now - self._since)


class _JobCounts(NamedTuple):
    """The counts of the job at some time."""

    time: float = 0.0
    samples: int = 0
    stale: int = 0
    stale_count: int = 0
    waiting_seconds: float = 0.0
    member_seconds: float = 0.0
    done: int = 0


class Live(Observer):
    """The current state of a job and its workers. When another run begins, it replaces the previous one."""

    def __init__(self, policy: str = "", window: float = 10.0, shorten: Callable[[str], str] = str) -> None:
        """policy: the name of the policy until a Began event gives it, to be shortened. window: in seconds."""
        self.policy = policy
        self.window = window
        self._shorten = shorten
        self._reset()

    def _reset(self) -> None:
        self.time = 0.0  # of the last event
        self.began_at: float | None = None  # when the first worker joined
        self.workers: dict[int, LiveWorker] = {}
        self.joined_early = self.missing = 0  # workers that wait for the job to begin, and those that it waits for
        self.version = 0
        self.updates = 0  # applied or kept
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}  # the last value of each metric that a worker has reported
        self.epoch = self.done = self.total = 0
        self._losses = 0
        self._samples = 0
        self._largest_batch = 0
        self._stale = self._stale_count = 0
        self._undecided: dict[Identity, int] = {}  # samples of the updates that the policy has not decided about
        self._waiting, self._members = _Integral(), _Integral()
        self._older = self._newer = _JobCounts()

    # The current state

    @property
    def members(self) -> int:
        """The number of workers that are members now."""
        return self._members.count

    @property
    def rate_unit(self) -> str:
        """The unit of `samples_per_second`: updates/s if each update counts as one sample."""
        return rate_unit(self._largest_batch != 1)

    def seconds(self, now: float) -> float:
        """Return the seconds since the first worker joined, or since the job was started if none has joined yet."""
        return now - (self.began_at or 0.0)

    def samples_per_second(self, now: float) -> float:
        """Return the recent rate of samples whose updates changed the model."""
        return _ratio(self._samples - self._older.samples, now - self._older.time)

    def waiting_share(self, now: float) -> float:
        """Return the share of all members' recent time in which they waited for a Grant or a Turn."""
        counts, older = self._counts(now), self._older
        return _ratio(counts.waiting_seconds - older.waiting_seconds, counts.member_seconds - older.member_seconds)

    def staleness(self) -> float | None:
        """Return the mean staleness of recent updates, or None if there were none."""
        count = self._stale_count - self._older.stale_count
        return (self._stale - self._older.stale) / count if count else None

    def progress(self) -> float | None:
        """Return the share of the job that is done, from 0 to 1, or None if its size is unknown."""
        return self.done / self.total if self.total else None

    def seconds_left(self, now: float) -> float | None:
        """Return the remaining seconds at the recent rate, or None if they cannot be estimated."""
        rate = _ratio(self.done - self._older.done, now - self._older.time)
        return (self.total - self.done) / rate if self.total and rate > 0 else None

    # Events

    def began(self, time: float, cluster: str, policy: str, apply: str, seed: int) -> None:
        self.policy = self._shorten(policy)
        self._reset()
        self.time = time

    def awaited(self, time: float, joined: int, missing: int) -> None:
        self._advance(time)
        self.joined_early, self.missing = joined, missing

    def joined(self, time: float, worker: int, incarnation: int = 1) -> None:
        self._advance(time)
        self.joined_early = self.missing = 0
        if not self.workers:  # rates are measured from the first member on
            self._older = self._newer = self._counts(time)
            self.began_at = time
        record = self.workers.get(worker)
        if record is None:
            record = self.workers[worker] = LiveWorker(self.window)
        record.join(time, incarnation)
        self._members.change(time, +1)

    def left(self, time: float, worker: int, lost: bool = False) -> None:
        self._advance(time)
        record = self.workers[worker]
        self._stop_waiting(record, time)
        record.state = "left"
        self._members.change(time, -1)

    def granted(self, time: float, worker: int, batch_size: int | None, progress_gap: int) -> None:
        self._advance(time)
        record = self.workers[worker]
        self._stop_waiting(record, time)
        record.iteration += 1
        record.state = "computing"  # includes the pull: a server does not see where it ends

    def computed(self, time: float, worker: int, seconds: float | None = None) -> None:
        self._advance(time)
        self._wait(self.workers[worker], time)

    def turned(self, time: float, worker: int) -> None:
        self._advance(time)
        record = self.workers[worker]
        self._stop_waiting(record, time)
        record.state = "pushing"

    def arrived(
        self,
        time: float,
        worker: int,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None:
        self._advance(time)
        record = self.workers[worker]
        self._stop_waiting(record, time)
        record.iteration = iteration
        record.arrive(time, batch_size)
        self._largest_batch = max(self._largest_batch, batch_size)
        self._wait(record, time)
        self._undecided[worker, incarnation, iteration] = batch_size
        if loss is not None:
            record.loss = loss
            self._add_loss(loss)

    def applied(
        self,
        time: float,
        version: int,
        workers: tuple[int, ...],
        iterations: tuple[int, ...],
        staleness: tuple[int, ...],
        incarnations: tuple[int, ...] = (),
    ) -> None:
        self._advance(time)
        self.version = version
        for update, stale in zip(identities(workers, iterations, incarnations), staleness, strict=True):
            self.workers[update[0]].staleness = stale
            self._accept(update)
        self._stale += sum(staleness)
        self._stale_count += len(staleness)

    def kept(self, time: float, worker: int, iteration: int, slot: int, incarnation: int = 1) -> None:
        self._advance(time)
        self._accept((worker, incarnation, iteration))

    def discarded(self, time: float, worker: int, iteration: int, incarnation: int = 1) -> None:
        self._advance(time)
        self._undecided.pop((worker, incarnation, iteration), None)

    def cancelled(self, time: float, worker: int) -> None:
        self._advance(time)
        record = self.workers[worker]
        self._stop_waiting(record, time)
        record.state = "waiting"

    def progressed(self, time: float, epoch: int, done: int, total: int) -> None:
        self._advance(time)
        self.epoch, self.done, self.total = epoch, done, total

    def measured(self, time: float, worker: int, kind: str, value: float) -> None:
        self._advance(time)
        if kind not in INTERNAL_METRICS:
            self.metrics.pop(kind, None)
            self.metrics[kind] = value
            if len(self.metrics) > MAX_METRICS:
                del self.metrics[next(iter(self.metrics))]

    def _advance(self, time: float) -> None:
        """Move to the time of an event. Once in each window, forget the older counts."""
        self.time = time
        if time - self._newer.time >= self.window:
            self._older, self._newer = self._newer, self._counts(time)

    def _counts(self, now: float) -> _JobCounts:
        waiting, members = self._waiting.total(now), self._members.total(now)
        return _JobCounts(now, self._samples, self._stale, self._stale_count, waiting, members, self.done)

    def _wait(self, record: LiveWorker, time: float) -> None:
        record.state = "waiting"
        record.waits_since = time
        self._waiting.change(time, +1)

    def _stop_waiting(self, record: LiveWorker, time: float) -> None:
        if record.waits_since is not None:
            record.stop_waiting(time)
            self._waiting.change(time, -1)

    def _accept(self, update: Identity) -> None:
        """Count an update once, even if it is kept and applied several times."""
        samples = self._undecided.pop(update, None)
        if samples is not None:
            self.updates += 1
            self._samples += samples

    def _add_loss(self, loss: float) -> None:
        """Update the mean. A loss that is not finite shows at once, and the next finite one replaces it."""
        if self.loss is None or not math.isfinite(self.loss + loss):
            self.loss, self._losses = loss, 1
        else:
            self._losses = min(self._losses + 1, SMOOTH)
            self.loss += (loss - self.loss) / self._losses


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
