"""A run for ui.perfetto.dev: its trace in the Trace Event Format of Chrome.

Every worker is a process with four lanes: compute, push, pull and wait. The server is one too, with a mark for each
Apply, and counters. The push and pull lanes add up to what a report calls communication, the wait lane to what it calls
blocking. Runs that follow one another in a trace lie one below the other, all beginning at zero.
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
UNKNOWN = "pull and compute"  # where nobody saw the one end and the other begin
#: Ids are this far apart, and lanes lie between: readers may look a lane up by its id alone, so none is used twice.
STEP = 10
#: Where a run's processes begin in the order of all.
RUN = 1_000_000


def write(events: Iterable[Event], file: IO[str]) -> None:
    """Write a trace as JSON that Perfetto and chrome://tracing open. Events are written as they come, not collected."""
    with Perfetto(file) as perfetto:
        replay(events, perfetto)


class _Slice(NamedTuple):
    """What a worker did, in microseconds."""

    lane: str
    name: str
    start: int
    end: int


class _Done(NamedTuple):
    """An iteration whose update is in."""

    pid: int
    slices: list[_Slice]
    about: dict[str, Any]


class _WorkerTrack:
    """A worker does one thing at a time."""

    __slots__ = ("iteration", "lane", "name", "pid", "since", "slices")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.iteration = 0
        self.slices: list[_Slice] = []  # of the iteration it is at
        self.lane: str | None = None  # of what it does now
        self.name = ""
        self.since = 0

    @property
    def awaits_pull(self) -> bool:
        """Is it granted, and has nobody seen it pull?"""
        return (self.lane, self.name) == ("pull", QUEUED)

    def do(self, lane: str | None, name: str, now: int) -> _Slice | None:
        """From now on it does this; what it did until now, if that took any time."""
        did = _Slice(self.lane, self.name, self.since, now) if self.lane and now > self.since else None
        self.lane, self.name, self.since = lane, name, now
        return did


class Perfetto(Observer):
    """Writes what it sees to a file. `close` it, or use it in a `with`: what is under way then ends there.

    What is known of an iteration, its staleness above all, is known only when its update has been applied. Until then
    its few slices are held, so memory is bounded by the updates that the server itself holds.
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
        """Finish the file; it is not closed."""
        self._finish()
        self._file.write("\n]}\n")

    # What happens

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
        waited = record.do("pull", QUEUED, self._at(time))
        if waited:
            self._slice(record.pid, waited, {"iteration": record.iteration})
        record.iteration += 1

    def pulling(self, time: float, worker: int) -> None:
        self._sees_pulls = True
        self._go_on(worker, "pull", "pull", time)

    def pulled(self, time: float, worker: int, version: int) -> None:
        record = self._workers[worker]
        if record.awaits_pull:
            if not self._sees_pulls:
                return  # a server hears of a pull only with the gradient that was computed from it
            record.name = "pull"  # what was streamed came back by itself
        self._go_on(worker, "compute", "compute", time)

    def computed(self, time: float, worker: int, seconds: float | None = None) -> None:
        record = self._workers[worker]
        if record.awaits_pull and seconds is not None:
            record.name = "pull"
            self._go_on(worker, "compute", "compute", max(time - seconds, record.since / 1e6))
        elif record.awaits_pull:
            record.lane, record.name = "compute", UNKNOWN
        self._go_on(worker, "wait", "wait for turn", time)

    def turned(self, time: float, worker: int) -> None:
        self._go_on(worker, "push", QUEUED, time)

    def pushing(self, time: float, worker: int) -> None:
        self._go_on(worker, "push", "push", time)

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
        if record.name == QUEUED:  # nobody saw the push begin
            record.name = "push"
        self._go_on(worker, "wait", "wait for grant", time)
        record.iteration = iteration
        about: dict[str, Any] = {"iteration": iteration, "batch": batch_size}
        if loss is not None:
            about["loss"] = in_json(loss)
            if math.isfinite(loss):
                self._count("loss", time, {"last": loss})
        self._unsettled[worker, incarnation, iteration] = _Done(record.pid, record.slices, about)
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
        about = {"version": version, "workers": workers, "iterations": iterations, "staleness": staleness}
        self._instant(self._server, f"apply {version}", now, about, self._server + 1)
        self._count("staleness", time, {"mean": sum(staleness) / max(1, len(staleness))})
        for update, stale in zip(identities(workers, iterations, incarnations), staleness, strict=True):
            self._settle(update, {"staleness": stale, "version": version})

    def kept(self, time: float, worker: int, iteration: int, slot: int, incarnation: int = 1) -> None:
        self._at(time)
        self._settle((worker, incarnation, iteration), {"kept in": slot})

    def discarded(self, time: float, worker: int, iteration: int, incarnation: int = 1) -> None:
        self._at(time)
        self._settle((worker, incarnation, iteration), {"discarded": True})

    def cancelled(self, time: float, worker: int) -> None:
        self._abandon(self._workers[worker], self._at(time), "cancelled")

    def used(self, time: float, direction: str, fraction: float) -> None:
        self._links[direction] = fraction
        self._count("links", time, self._links)

    def progressed(self, time: float, epoch: int, done: int, total: int) -> None:
        self._count("samples", time, {"done": done})

    def measured(self, time: float, worker: int, kind: str, value: float) -> None:
        if math.isfinite(value):
            self._count(kind, time, {f"worker {worker}": value})

    # A run

    def _begin(self, name: str) -> None:
        self._runs += self._pids > 0  # what nobody took part in was no run
        self._name = name
        self._end = 0
        self._workers: dict[int, _WorkerTrack] = {}
        self._unsettled: dict[Identity, _Done] = {}  # updates that are in and not decided yet
        self._links = {"in": 0.0, "out": 0.0}
        self._server_pid: int | None = None
        self._sees_pulls = False

    def _finish(self) -> None:
        """Close whatever is open, where the run ends."""
        for record in self._workers.values():
            self._abandon(record, self._end, "cut off by the end")
        for done in self._unsettled.values():
            self._write_all(done.pid, done.slices, done.about)
        self._unsettled.clear()

    def _go_on(self, worker: int, lane: str, name: str, time: float) -> None:
        record = self._workers[worker]
        did = record.do(lane, name, self._at(time))
        if did:
            record.slices.append(did)

    def _abandon(self, record: _WorkerTrack, now: int, why: str) -> None:
        waits = record.name == "wait for grant"
        if record.awaits_pull and not self._sees_pulls:
            record.lane, record.name = "compute", UNKNOWN
        did = record.do(None, "", now)
        if did:
            record.slices.append(did)
        # Who waits for a Grant has nothing under way that could be cut off.
        self._write_all(record.pid, record.slices, {"iteration": record.iteration} | ({} if waits else {why: True}))
        record.slices = []

    def _settle(self, update: Identity, how: dict[str, Any]) -> None:
        done = self._unsettled.pop(update, None)
        if done:
            self._write_all(done.pid, done.slices, done.about | how)

    @property
    def _server(self) -> int:
        if self._server_pid is None:
            self._server_pid = self._process("server", 0, ("apply",))
        return self._server_pid

    def _at(self, time: float) -> int:
        """Whole microseconds: what ends and what begins at one time are rounded alike, so no slices overlap."""
        self._end = now = round(time * 1e6)
        return now

    # Lines of the file

    def _process(self, name: str, order: int, lanes: tuple[str, ...]) -> int:
        self._pids += STEP
        pid = self._pids
        self._emit({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": self._name + name}})
        place = {"sort_index": self._runs * RUN + order}
        self._emit({"name": "process_sort_index", "ph": "M", "pid": pid, "args": place})
        for number, lane in enumerate(lanes, 1):
            where = {"ph": "M", "pid": pid, "tid": pid + number}
            self._emit({"name": "thread_name"} | where | {"args": {"name": lane}})
            self._emit({"name": "thread_sort_index"} | where | {"args": {"sort_index": number}})
        return pid

    def _write_all(self, pid: int, slices: list[_Slice], about: dict[str, Any]) -> None:
        for did in slices:
            self._slice(pid, did, about)

    def _slice(self, pid: int, did: _Slice, about: dict[str, Any]) -> None:
        what = {"name": f"{did.name} {about['iteration']}", "cat": did.lane, "ph": "X"}
        when = {"ts": did.start, "dur": did.end - did.start}
        where = {"pid": pid, "tid": pid + 1 + LANES.index(did.lane)}
        self._emit(what | when | where | {"args": about})

    def _instant(self, pid: int, name: str, now: int, about: dict[str, Any], tid: int | None = None) -> None:
        where = {"s": "p", "pid": pid} if tid is None else {"s": "t", "pid": pid, "tid": tid}
        self._emit({"name": name, "ph": "i", "ts": now} | where | {"args": about})

    def _count(self, name: str, time: float, values: dict[str, float]) -> None:
        self._emit({"name": name, "ph": "C", "ts": self._at(time), "pid": self._server, "args": values})

    def _emit(self, line: dict[str, Any]) -> None:
        self._file.write("\n" if self._first else ",\n")
        self._first = False
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False))
