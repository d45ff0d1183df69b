"""The numbers of a job that a monitoring system keeps: counters, gauges and histograms, computed from its trace events.

An event costs a few additions. No number has a label for a worker, so their count does not grow with the workers.
"""

from __future__ import annotations

import math
import time as clock
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

from paceline.metrics.histogram import COUNTS, Histogram
from paceline.observe.live_state import INTERNAL_METRICS
from paceline.observe.observer import Observer
from paceline.observe.trace import Identity, identities

ELEMENT_BYTES = 4
MAX_REPORTED = 20  # names of metrics that workers report; any others are left out
MAX_NAME = 80  # letters of such a name
#: The upper bounds of the size of a batch.
BATCHES = tuple(2**power for power in range(0, 21, 2))

MetricKind = Literal["counter", "gauge", "histogram", "info"]
Labels: TypeAlias = tuple[str, ...]


class Family(NamedTuple):
    """A metric with a value for each combination of its labels."""

    kind: MetricKind
    name: str
    help: str
    labels: Labels
    values: Mapping[Labels, float | Histogram]


class _Waiters:
    """The number of workers that wait now, and the seconds that all have waited together."""

    __slots__ = ("_since", "_total", "count")

    def __init__(self) -> None:
        self.count = 0
        self._total = self._since = 0.0

    def change(self, time: float, by: int) -> None:
        self._total += self.count * (time - self._since)
        self._since = time
        self.count += by

    def total(self, time: float) -> float:
        return self._total + self.count * max(0.0, time - self._since)


class _MemberTimes:
    """The times at which a member's current iteration reached each of its steps."""

    __slots__ = ("computed", "granted", "turned", "waits", "waits_since")

    def __init__(self) -> None:
        self.granted = self.computed = self.turned = 0.0
        self.waits = ""  # "turn" or "grant", while it waits for one
        self.waits_since = 0.0


class JobMetrics(Observer):
    """An observer that computes the metrics of a job."""

    def __init__(
        self, policy: str = "", is_stalled: Callable[[], bool] = bool, now: Callable[[], float] = clock.time
    ) -> None:
        """policy: its name, if it is known before the job begins. is_stalled: see StallDetector. now: the Unix time."""
        self._policy, self._apply, self._is_stalled, self._now = policy, "", is_stalled, now
        self._began = self._joined = self._left = self._lost = 0
        self._iterations = self._samples = self._applied = self._kept = self._discarded = self._clipped = 0
        self._cancelled = self._pulls = self._pushes = self._checkpoints = 0
        self._version = self._elements = self._epoch = self._done = self._planned = self._saved_version = 0
        self._saved_at = 0.0
        self._loss = math.nan
        self._reported: dict[str, float] = {}
        self._iteration, self._staleness, self._batch = Histogram(), Histogram(COUNTS), Histogram(BATCHES)
        self._phases = {phase: Histogram() for phase in ("compute", "turn", "push", "grant")}
        self._saving = Histogram()
        self._time = 0.0
        self._members = _Waiters()
        self._waiting = {"turn": _Waiters(), "grant": _Waiters()}
        self._workers: dict[int, _MemberTimes] = {}
        self._undecided: dict[Identity, int] = {}  # samples of the updates that the policy has not decided about

    # Events

    def began(self, time: float, cluster: str, policy: str, apply: str, seed: int) -> None:
        self._policy, self._apply = policy, apply
        self._began += 1
        self._time = time
        for record in self._workers.values():
            self._stop_waiting(record, time)
        self._members.change(time, -len(self._workers))
        self._workers.clear()
        self._undecided.clear()

    def described(self, time: float, elements: int, optimizer: str) -> None:
        self._elements = elements

    def joined(self, time: float, worker: int, incarnation: int = 1) -> None:
        self._time = time
        self._joined += 1
        self._workers[worker] = _MemberTimes()
        self._members.change(time, +1)

    def left(self, time: float, worker: int, lost: bool = False) -> None:
        self._time = time
        self._left += 1
        self._lost += lost
        self._stop_waiting(self._workers.pop(worker), time)
        self._members.change(time, -1)

    def granted(self, time: float, worker: int, batch_size: int | None, progress_gap: int) -> None:
        self._time = time
        record = self._workers[worker]
        if record.waits:
            self._stop_waiting(record, time)
        record.granted = time

    def pulled(self, time: float, worker: int, version: int) -> None:
        self._pulls += 1

    def computed(self, time: float, worker: int, seconds: float | None = None) -> None:
        self._time = time
        record = self._workers[worker]
        record.computed = time
        if seconds is not None:
            self._phases["compute"].observe(seconds)
        self._wait(record, "turn", time)

    def turned(self, time: float, worker: int) -> None:
        self._time = time
        record = self._workers[worker]
        self._stop_waiting(record, time)
        record.turned = time

    def arrived(
        self,
        time: float,
        worker: int,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None:
        self._time = time
        record = self._workers[worker]
        self._iterations += 1
        self._pushes += 1
        if loss is not None:
            self._loss = loss
        self._batch.observe(batch_size)
        self._iteration.observe(time - record.granted)
        if record.waits:  # a streamed update may arrive before its turn is over
            self._stop_waiting(record, time)
        else:
            self._phases["push"].observe(time - record.turned)
        self._wait(record, "grant", time)
        self._undecided[worker, incarnation, iteration] = batch_size

    def applied(
        self,
        time: float,
        version: int,
        workers: tuple[int, ...],
        iterations: tuple[int, ...],
        staleness: tuple[int, ...],
        incarnations: tuple[int, ...] = (),
    ) -> None:
        self._time, self._version = time, version
        observe = self._staleness.observe
        for stale in staleness:
            observe(stale)
        self._applied += len(staleness)
        for update in identities(workers, iterations, incarnations):
            self._samples += self._undecided.pop(update, 0)

    def kept(self, time: float, worker: int, iteration: int, slot: int, incarnation: int = 1) -> None:
        self._kept += 1
        self._samples += self._undecided.pop((worker, incarnation, iteration), 0)

    def discarded(self, time: float, worker: int, iteration: int, incarnation: int = 1) -> None:
        self._discarded += 1
        self._undecided.pop((worker, incarnation, iteration), None)

    def clipped(self, time: float, worker: int, iteration: int, factor: float, incarnation: int = 1) -> None:
        self._clipped += 1

    def cancelled(self, time: float, worker: int) -> None:
        self._time = time
        self._cancelled += 1
        record = self._workers[worker]
        self._stop_waiting(record, time)
        self._wait(record, "grant", time)

    def progressed(self, time: float, epoch: int, done: int, total: int) -> None:
        self._epoch, self._done, self._planned = epoch, done, total

    def saved(self, time: float, version: int, seconds: float | None = None) -> None:
        self._checkpoints += 1
        self._saved_version, self._saved_at = version, self._now()
        if seconds is not None:
            self._saving.observe(seconds)

    def measured(self, time: float, worker: int, kind: str, value: float) -> None:
        if kind in self._reported or (len(self._reported) < MAX_REPORTED and kind not in INTERNAL_METRICS):
            self._reported[kind] = value

    def _wait(self, record: _MemberTimes, what: str, time: float) -> None:
        record.waits, record.waits_since = what, time
        self._waiting[what].change(time, +1)

    def _stop_waiting(self, record: _MemberTimes, time: float) -> None:
        if record.waits:
            self._phases[record.waits].observe(time - record.waits_since)
            self._waiting[record.waits].change(time, -1)
            record.waits = ""

    # The metrics

    def families(self) -> Iterator[Family]:
        """Yield every metric with its present values."""

        def counter(name: str, help: str, value: float) -> Family:
            return Family("counter", name, help, (), {(): value})

        def gauge(name: str, help: str, value: float) -> Family:
            return Family("gauge", name, help, (), {(): value})

        def histogram(name: str, help: str, value: Histogram) -> Family:
            return Family("histogram", name, help, (), {(): value})

        # The event loop may add to these dictionaries while another thread reads them.
        waiting, size = dict(self._waiting), self._elements * ELEMENT_BYTES
        yield Family("info", "paceline_job", "The policy, and how updates are applied.", *self._job())
        yield counter("paceline_starts_total", "Starts of the server, of which all but one are restarts.", self._began)
        yield gauge("paceline_members", "Workers that are members of the job.", self._members.count)
        yield counter("paceline_workers_joined_total", "Workers that joined, each time they did.", self._joined)
        yield counter("paceline_workers_left_total", "Workers that left, for whatever reason.", self._left)
        yield counter(
            "paceline_leases_lost_total",
            "Workers that were given up because they fell silent.",
            self._lost,
        )
        yield counter("paceline_iterations_total", "Updates that have arrived.", self._iterations)
        yield counter(
            "paceline_samples_total", "Samples whose updates changed the model or were kept for it.", self._samples
        )
        outcomes = {"applied": self._applied, "kept": self._kept, "discarded": self._discarded}
        yield Family(
            *("counter", "paceline_updates_total", "Updates by what the policy did with them.", ("outcome",)),
            {(outcome,): count for outcome, count in outcomes.items()},
        )
        yield counter("paceline_updates_clipped_total", "Updates that were scaled down (--max-norm).", self._clipped)
        yield counter("paceline_iterations_cancelled_total", "Iterations that the policy cancelled.", self._cancelled)
        yield Family(
            *("counter", "paceline_transferred_bytes_total"),
            "Bytes of updates (in) and of the model (out), at four bytes an element; 0 until the model is known.",
            ("direction",),
            {("in",): self._pushes * size, ("out",): self._pulls * size},
        )
        yield counter(
            "paceline_member_seconds_total",
            "Seconds that workers have been members, added up over the workers.",
            self._members.total(self._time),
        )
        yield Family(
            *("counter", "paceline_waiting_seconds_total"),
            "Seconds that workers have waited for a turn to push or for a grant to go on, added up over the workers.",
            ("reason",),
            {(what,): each.total(self._time) for what, each in waiting.items()},
        )
        yield Family(
            *("gauge", "paceline_waiting_workers", "Workers that wait for a turn or for a grant.", ("reason",)),
            {(what,): each.count for what, each in waiting.items()},
        )
        yield gauge(
            "paceline_queued_updates",
            "Updates that have arrived and that the policy has not decided about.",
            len(self._undecided),
        )
        yield histogram(
            "paceline_iteration_seconds", "Seconds of an iteration, from its grant to its arrival.", self._iteration
        )
        yield Family(
            *("histogram", "paceline_phase_seconds"),
            "Seconds of a phase: to compute, to wait for a turn, to push, and to wait for a grant.",
            ("phase",),
            {(phase,): each for phase, each in self._phases.items()},
        )
        yield histogram(
            "paceline_staleness_versions", "Versions by which an update was stale when it was applied.", self._staleness
        )
        yield histogram("paceline_batch_samples", "Samples of an update.", self._batch)
        yield gauge("paceline_model_version", "The version of the model: how often it was changed.", self._version)
        yield gauge("paceline_model_bytes", "The size of the model; 0 until it is known.", size)
        yield gauge("paceline_loss", "The loss that a worker reported last; NaN before the first one.", self._loss)
        yield Family(
            *("gauge", "paceline_reported", f"The last value of each metric of session.log; at most {MAX_REPORTED}."),
            ("metric",),
            {(name[:MAX_NAME],): value for name, value in list(self._reported.items())},
        )
        yield gauge("paceline_epoch", "The epoch, from 0.", self._epoch)
        yield gauge("paceline_progress_samples", "Samples of the job that are done, in all epochs.", self._done)
        yield gauge("paceline_planned_samples", "Samples of the whole job; 0 if unknown.", self._planned)
        yield counter("paceline_checkpoints_total", "Checkpoints that were written.", self._checkpoints)
        yield gauge(
            "paceline_last_checkpoint_timestamp_seconds",
            "When the last checkpoint was written, as Unix time; 0 if none was.",
            self._saved_at,
        )
        yield gauge(
            "paceline_checkpoint_age_seconds",
            "Seconds since the last checkpoint; NaN if none was written.",
            max(0.0, self._now() - self._saved_at) if self._checkpoints else math.nan,
        )
        yield gauge("paceline_checkpoint_version", "The version of the last checkpoint.", self._saved_version)
        yield histogram("paceline_checkpoint_write_seconds", "Seconds to write a checkpoint.", self._saving)
        yield gauge(
            "paceline_stalled", "1 if nothing has changed the model for much longer than usual.", self._is_stalled()
        )

    def _job(self) -> tuple[Labels, dict[Labels, float]]:
        return ("policy", "apply"), {(self._policy, self._apply): 1.0}
