"""Export a run for ui.perfetto.dev, in Chrome's Trace Event Format.

Every worker is a process with four lanes: compute, push, pull and wait. The server is a process with a mark for each
Apply, and with counters. The push and pull lanes together are the communication of a report, and the wait lane is its
blocking. Several runs of one trace are placed one below the other, and each starts at zero.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from types import TracebackType
from typing import IO, Any, NamedTuple

from paceline.observe.observer import Observer, replay
from paceline.observe.trace import Event, Identity, identities, in_json

LANES = ("compute", "push", "pull", "wait")
QUEUED = "queued"
UNKNOWN = "pull and compute"  # where the end of the pull was not observed
#: The distance between two process ids. The ids of a process's lanes are in between, so that no id is used twice: some
#: readers identify a lane by its id alone.
PID_STEP = 10
#: The distance between two runs in the order of all processes.
RUN_STEP = 1_000_000


def write(events: Iterable[Event], file: IO[str]) -> None:
    """Write a trace as JSON for Perfetto and chrome://tracing. Events are not collected first."""
    with Perfetto(file) as perfetto:
        replay(events, perfetto)


class _Slice(NamedTuple):
    """One activity of a worker, with its times in microseconds."""

    lane: str
    name: str
    start: int
    end: int


class _FinishedIteration(NamedTuple):
    """An iteration whose update has arrived."""

    pid: int
    slices: list[_Slice]
    details: dict[str, Any]


class _WorkerTrack:
    """The current activity of a worker; there is one at a time."""

    __slots__ = ("iteration", "lane", "name", "pid", "since", "slices")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.iteration = 0
        self.slices: list[_Slice] = []  # of the current iteration
        self.lane: str | None = None  # of the current activity
        self.name = ""  # of the current activity
        self.since = 0  # microseconds

    @property
    def awaits_pull(self) -> bool:
        """Whether the worker has a Grant, but no pull was observed yet."""
        return (self.lane, self.name) == ("pull", QUEUED)

    def start(self, lane: str | None, name: str, now: int) -> _Slice | None:
        """Start an activity. Return the previous one, unless it took no time."""
        previous = _Slice(self.lane, self.name, self.since, now) if self.lane and now > self.since else None
        self.lane, self.name, self.since = lane, name, now
        return previous


class Perfetto(Observer):
    """An observer that writes the run to a file. `close` it, or use it in a `with` block, to end current activities.

    The staleness of an iteration is known only when its update is applied. Until then its few slices are held in
    memory, so the memory is bounded by the number of updates that the server holds.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._pids = 0
        self._runs = 0
        self._first = True
        file.write('{"traceEvents":[')
        self._begin("")

    def __enter__(self) -> Perfetto:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Write the end of the JSON. The file itself stays open."""
        self._finish()
        self._file.write("\n]}\n")

    # Events

    def began(self, time: float, cluster: str, policy: str, apply: str, seed: int) -> None:
        self._finish()
        self._begin(f"{policy}{' (streamed)' if apply == 'streamed' else ''} | ")
        self._at(time)

    def joined(self, time: float, worker: int, incarnation: int = 1) -> None:
        now = self._at(time)
        record = self._workers.get(worker)
        if record is None:
            pid = self._process(f"worker {worker}", 1 + worker, LANES)
            record = self._workers[worker] = _WorkerTrack(pid)
        record.iteration = 0
        self._instant(record.pid, "joined", now, {"incarnation": incarnation})

    def left(self, time: float, worker: int, lost: bool = False) -> None:
        now = self._at(time)
        record = self._workers[worker]
        self._abandon(record, now, "left")
        self._instant(record.pid, "lost" if lost else "left", now, {})

    def granted(self, time: float, worker: int, batch_size: int | None, progress_gap: int) -> None:
        record = self._workers[worker]
        waited = record.start("pull", QUEUED, self._at(time))
        if waited:
            self._slice(record.pid, waited, {"iteration": record.iteration})
        record.iteration += 1

    def pulling(self, time: float, worker: int) -> None:
        self._sees_pulls = True
        self._start(worker, "pull", "pull", time)

    def pulled(self, time: float, worker: int, version: int) -> None:
        record = self._workers[worker]
        if record.awaits_pull:
            if not self._sees_pulls:
                return  # a server learns of a pull only from the gradient that was computed from it
            record.name = "pull"  # streamed weights return without a pull
        self._start(worker, "compute", "compute", time)

    def computed(self, time: float, worker: int, seconds: float | None = None) -> None:
        record = self._workers[worker]
        if record.awaits_pull and seconds is not None:
            record.name = "pull"
            self._start(worker, "compute", "compute", max(time - seconds, record.since / 1e6))
        elif record.awaits_pull:
            record.lane, record.name = "compute", UNKNOWN
        self._start(worker, "wait", "wait for turn", time)

    def turned(self, time: float, worker: int) -> None:
        self._start(worker, "push", QUEUED, time)

    def pushing(self, time: float, worker: int) -> None:
        self._start(worker, "push", "push", time)

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
        if record.name == QUEUED:  # the start of the push was not observed
            record.name = "push"
        self._start(worker, "wait", "wait for grant", time)
        record.iteration = iteration
        details: dict[str, Any] = {"iteration": iteration, "batch": batch_size}
        if loss is not None:
            details["loss"] = in_json(loss)
            if math.isfinite(loss):
                self._count("loss", time, {"last": loss})
        self._undecided[worker, incarnation, iteration] = _FinishedIteration(record.pid, record.slices, details)
        record.slices = []

    def applied(
        self,
        time: float,
        version: int,
        workers: tuple[int, ...],
        iterations: tuple[int, ...],
        staleness: tuple[int, ...],
        incarnations: tuple[int, ...] = (),
    ) -> None:
        now = self._at(time)
        details = {"version": version, "workers": workers, "iterations": iterations, "staleness": staleness}
        self._instant(self._server, f"apply {version}", now, details, self._server + 1)
        self._count("staleness", time, {"mean": sum(staleness) / max(1, len(staleness))})
        for update, stale in zip(identities(workers, iterations, incarnations), staleness, strict=True):
            self._decide(update, {"staleness": stale, "version": version})

    def kept(self, time: float, worker: int, iteration: int, slot: int, incarnation: int = 1) -> None:
        self._at(time)
        self._decide((worker, incarnation, iteration), {"kept in": slot})

    def discarded(self, time: float, worker: int, iteration: int, incarnation: int = 1) -> None:
        self._at(time)
        self._decide((worker, incarnation, iteration), {"discarded": True})

    def clipped(self, time: float, worker: int, iteration: int, factor: float, incarnation: int = 1) -> None:
        self._at(time)
        self._decide((worker, incarnation, iteration), {"clipped to": factor})

    def cancelled(self, time: float, worker: int) -> None:
        self._abandon(self._workers[worker], self._at(time), "cancelled")

    def used(self, time: float, direction: str, fraction: float) -> None:
        self._links[direction] = fraction
        self._count("links", time, self._links)

    def progressed(self, time: float, epoch: int, done: int, total: int) -> None:
        self._count("samples", time, {"done": done})

    def saved(self, time: float, version: int, seconds: float | None = None) -> None:
        self._instant(self._server, f"checkpoint {version}", self._at(time), {"version": version}, self._server + 1)

    def measured(self, time: float, worker: int, kind: str, value: float) -> None:
        if math.isfinite(value):
            self._count(kind, time, {f"worker {worker}": value})

    # A run

    def _begin(self, name: str) -> None:
        self._runs += self._pids > 0  # a run without processes does not count
        self._name = name
        self._end = 0
        self._workers: dict[int, _WorkerTrack] = {}
        self._undecided: dict[Identity, _FinishedIteration] = {}  # updates that the policy has not decided about
        self._links = {"in": 0.0, "out": 0.0}
        self._server_pid: int | None = None
        self._sees_pulls = False

    def _finish(self) -> None:
        """End all current activities at the end of the run."""
        for record in self._workers.values():
            self._abandon(record, self._end, "cut off by the end")
        for finished in self._undecided.values():
            self._write_all(finished.pid, finished.slices, finished.details)
        self._undecided.clear()

    def _start(self, worker: int, lane: str, name: str, time: float) -> None:
        """Start an activity of a worker, and record the previous one."""
        record = self._workers[worker]
        previous = record.start(lane, name, self._at(time))
        if previous:
            record.slices.append(previous)

    def _abandon(self, record: _WorkerTrack, now: int, reason: str) -> None:
        """End the current activity of a worker, and write its iteration with the reason."""
        waits = record.name == "wait for grant"  # then there is no iteration to abandon
        if record.awaits_pull and not self._sees_pulls:
            record.lane, record.name = "compute", UNKNOWN
        previous = record.start(None, "", now)
        if previous:
            record.slices.append(previous)
        self._write_all(record.pid, record.slices, {"iteration": record.iteration} | ({} if waits else {reason: True}))
        record.slices = []

    def _decide(self, update: Identity, decision: dict[str, Any]) -> None:
        """Write the iteration of an update with the policy's decision. It is written once."""
        finished = self._undecided.pop(update, None)
        if finished:
            self._write_all(finished.pid, finished.slices, finished.details | decision)

    @property
    def _server(self) -> int:
        if self._server_pid is None:
            self._server_pid = self._process("server", 0, ("apply",))
        return self._server_pid

    def _at(self, time: float) -> int:
        """Return the time in whole microseconds. Equal times are rounded equally, so that no slices overlap."""
        self._end = now = round(time * 1e6)
        return now

    # The lines of the file

    def _process(self, name: str, order: int, lanes: tuple[str, ...]) -> int:
        self._pids += PID_STEP
        pid = self._pids
        self._emit({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": self._name + name}})
        place = {"sort_index": self._runs * RUN_STEP + order}
        self._emit({"name": "process_sort_index", "ph": "M", "pid": pid, "args": place})
        for number, lane in enumerate(lanes, 1):
            where = {"ph": "M", "pid": pid, "tid": pid + number}
            self._emit({"name": "thread_name"} | where | {"args": {"name": lane}})
            self._emit({"name": "thread_sort_index"} | where | {"args": {"sort_index": number}})
        return pid

    def _write_all(self, pid: int, slices: list[_Slice], details: dict[str, Any]) -> None:
        for activity in slices:
            self._slice(pid, activity, details)

    def _slice(self, pid: int, activity: _Slice, details: dict[str, Any]) -> None:
        what = {"name": f"{activity.name} {details['iteration']}", "cat": activity.lane, "ph": "X"}
        when = {"ts": activity.start, "dur": activity.end - activity.start}
        where = {"pid": pid, "tid": pid + 1 + LANES.index(activity.lane)}
        self._emit(what | when | where | {"args": details})

    def _instant(self, pid: int, name: str, now: int, details: dict[str, Any], tid: int | None = None) -> None:
        where = {"s": "p", "pid": pid} if tid is None else {"s": "t", "pid": pid, "tid": tid}
        self._emit({"name": name, "ph": "i", "ts": now} | where | {"args": details})

    def _count(self, name: str, time: float, values: dict[str, float]) -> None:
        self._emit({"name": name, "ph": "C", "ts": self._at(time), "pid": self._server, "args": values})

    def _emit(self, line: dict[str, Any]) -> None:
        self._file.write("\n" if self._first else ",\n")
        self._first = False
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False))
