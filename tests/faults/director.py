"""A job of real processes: the director forks them, starts again what is killed as the product would, wakes what was
stopped when it has been given up, and in the end looks whether every promise was kept."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from faults import actors
from faults.scenario import Outcome, Scenario
from paceline import policies
from paceline.model import checkpoint

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Child:
    """A process of the job."""

    name: str
    pid: int
    worker: int | None = None
    stopped: float | None = None  # since when


class Director:
    """Runs one scenario. It has one thread, so that it may fork."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self.children: dict[int, Child] = {}
        self.problems: list[str] = []
        self.server_starts = 0
        self.over = False  # has the server ended well?
        self.link: socket.socket | None = None
        self.port = 0
        self.late: dict[int, int] = {}  # workers to be started again when they are given up → Left events before
        self.worker_starts: Counter[int] = Counter()
        self.began = time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._read_to: dict[Path, int] = {}
        self._read_at = 0.0

    def run(self) -> Outcome:
        # An address of its own: a worker that wakes when its server is gone must not meet another scenario's server,
        # which may have got the same port.
        pid = os.getpid()
        actors.HOST = f"127.{1 + (pid >> 16) % 254}.{(pid >> 8) % 256}.{1 + pid % 254}"
        self._start_server()
        try:
            self._direct()
        except Exception:
            self.problems.append(traceback.format_exc())
        report = ""
        if self.problems:
            self._dump()
        self._end_all()
        seconds = time.monotonic() - self.began
        self.events(now=True)
        if not self.problems:
            self.problems += self._broken_promises()
        if self.problems or os.environ.get("FAULTS_REPORT"):
            report = self._words()
        fired = [(self.folder / f"fired-{number}").exists() for number in range(len(self.scenario.faults))]
        generations = sum(event["event"] == "generation" for event in self._events)
        return Outcome(self.problems, fired, self._events, generations, seconds, report)

    # Supervision

    def _direct(self) -> None:
        limit = self.began + self.scenario.limit
        while not self.problems:
            if time.monotonic() > limit:
                left = ", ".join(child.name for child in self.children.values())
                self.problems.append(f"It did not end within {self.scenario.limit:g} s; still there: {left}.")
                return
            self._answer()
            self._reap()
            self._wake()
            if not self.port:
                self._meet()
                continue
            self._start_late()
            if not self.children:
                return
            workers = [child for child in self.children.values() if child.worker is not None]
            if not workers and not self.late and self._nobody_joined():
                self._start_workers()  # the server went back to a checkpoint when all had left

    def _meet(self) -> None:
        ports = [event["port"] for event in self.events() if event["event"] == "generation"]
        if ports:
            self.port = ports[0]
            self._start_workers()

    def _nobody_joined(self) -> bool:
        """Has the server's generation seen nobody yet?"""
        names = [event["event"] for event in self.events()]
        last = len(names) - 1 - names[::-1].index("generation")
        return last > 0 and "joined" not in names[last:]

    def _reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            child = self.children[pid]
            if os.WIFSTOPPED(status):
                child.stopped = time.monotonic()
                self._left_before = self._left(child.worker)
                continue
            del self.children[pid]
            code = os.waitstatus_to_exitcode(status)
            if code == -signal.SIGKILL:
                self._killed(child)
            elif code != 0:
                self.problems.append(f"The {child.name} ended with {code}.")
            elif child.name.startswith("server"):
                self.over = True
                for other in self.children.values():  # killed when all was done, and started again for nothing
                    if other.worker is not None and self.worker_starts[other.worker] > 1:
                        os.kill(other.pid, signal.SIGKILL)

    def _killed(self, child: Child) -> None:
        if self.over:
            return
        if child.worker is not None:
            if self.scenario.restart == "late":
                self.late[child.worker] = self._left(child.worker)
            else:
                self._start_worker(child.worker)
        elif child.name.startswith("server"):
            if checkpoint.newest(self.folder / "checkpoints") is None:
                self.problems.append("The server was killed before there was a checkpoint.")
            else:
                self._start_server()

    def _wake(self) -> None:
        """Wake whoever was stopped, when it has been given up; or was never a member, and has slept long enough."""
        for child in self.children.values():
            if child.stopped is None:
                continue
            slept = time.monotonic() - child.stopped
            given_up = child.worker is not None and self._left(child.worker) > self._left_before
            if given_up or slept > 2.5 * self.scenario.lease:
                child.stopped = None
                os.kill(child.pid, signal.SIGCONT)

    def _start_late(self) -> None:
        for worker, before in list(self.late.items()):
            was_member = any(event["event"] == "joined" and event["worker"] == worker for event in self.events())
            if not was_member or self._left(worker) > before:
                del self.late[worker]
                self._start_worker(worker)

    def _left(self, worker: int | None) -> int:
        return sum(event["event"] == "left" and event["worker"] == worker for event in self.events())

    # Processes

    def _start_server(self) -> None:
        if self.link:
            self.link.close()
        self.server_starts += 1
        ours, theirs = socket.socketpair()
        trace = self.folder / f"trace-{self.server_starts}.jsonl"
        port, again = self.port, self.server_starts > 1

        def serve() -> None:
            ours.close()
            actors.serve(self.scenario, self.folder, theirs, trace, port, again)

        self._fork(f"server-{self.server_starts}", serve)
        theirs.close()
        self.link = ours

    def _start_workers(self) -> None:
        for number in range(self.scenario.workers):
            self._start_worker(number)

    def _start_worker(self, number: int) -> None:
        self.worker_starts[number] += 1
        name = f"worker-{number}-{self.worker_starts[number]}"
        self._fork(name, lambda: actors.work(self.scenario, self.folder, number, self.port), number)

    def _answer(self) -> None:
        """Fork the shards that the server asks for."""
        assert self.link is not None
        ready, _, _ = select.select([self.link], [], [], 0.01)
        if not ready:
            return
        asked = self.link.recv(4096)
        if not asked:
            time.sleep(0.01)  # the server has ended
            return
        for line in asked.splitlines():
            wanted = json.loads(line)
            number, port, token = wanted["shard"], wanted["port"], bytes.fromhex(wanted["token"])

            def hold(number: int = number, port: int = port, token: bytes = token) -> None:
                actors.hold(self.scenario, self.folder, number, port, token)

            pid = self._fork(f"shard-{number}", hold)
            with contextlib.suppress(OSError):
                self.link.sendall(str(pid).encode())

    def _fork(self, name: str, do: Callable[[], None], worker: int | None = None) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with_parent()
                log = os.open(self.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 (it stays open)
                faulthandler.enable(file=2)
                faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
                do()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        self.children[pid] = Child(f"{name} (pid {pid})", pid, worker)
        return pid

    def _dump(self) -> None:
        """Have every process say where it stands."""
        for child in self.children.values():
            for number in (signal.SIGCONT, signal.SIGUSR1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)
        time.sleep(0.5)  # nothing depends on it but how much they have said

    def _end_all(self) -> None:
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)

    # What happened

    def events(self, now: bool = False) -> list[dict[str, Any]]:
        """The trace so far, of all servers."""
        if not now and time.monotonic() - self._read_at < 0.02:
            return self._events
        self._read_at = time.monotonic()
        for start in range(1, self.server_starts + 1):
            path = self.folder / f"trace-{start}.jsonl"
            if path.exists():
                text = path.read_bytes()[self._read_to.get(path, 0) :]
                whole = text[: text.rfind(b"\n") + 1]
                self._read_to[path] = self._read_to.get(path, 0) + len(whole)
                self._events += [json.loads(line) for line in whole.splitlines()]
        return self._events

    def _words(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        words = [f"--- {path.stem}\n{path.read_text(errors='replace')[-6000:]}" for path in logs]
        trace = "\n".join(json.dumps(event) for event in self._events[-60:])
        return "\n".join([*words, "--- the end of the trace", trace])

    # Promises

    def _broken_promises(self) -> list[str]:
        scenario = self.scenario
        found = checkpoint.newest(self.folder / "checkpoints")
        if found is None:
            return ["There is no checkpoint at the end."]
        broken = []
        weights = checkpoint.weights(found)
        lost = sum(map(_ends_a_push, self._events)) if scenario.streamed else 0
        if not lost and not np.array_equal(weights["once"], weights["again"]):
            broken.append("The shards do not hold the same.")
        samples = found.job["samples"]
        if samples is None:
            return ["The last checkpoint is of a model that has not been trained."]
        if samples["open"] or samples["trained"] != scenario.samples * samples["epochs"]:
            broken.append(f"Not every sample is done: {samples}.")
        in_full = not scenario.policy.startswith("fl-r2sp")  # there an update weighs a part of its group's mean
        if in_full and not policies.make(scenario.policy).keeps:
            for counts in (weights[name][: scenario.samples] for name in ("once", "again")):
                over = counts - samples["epochs"]
                # Streamed, what of a push was applied when it was ended stays, and its samples are trained on again.
                if over.min() < 0 or over.sum() > lost * scenario.batch:
                    broken.append(f"Every sample must count {samples['epochs']} times: {counts.tolist()}.")
        return broken + self._broken_in_trace(found.version)

    def _broken_in_trace(self, final: int) -> list[str]:
        """In each generation versions follow one another, and every update that arrived is decided at most once."""
        broken: list[str] = []
        version, open_updates = 0, Counter[tuple[int, int]]()
        kept: set[tuple[int, int]] = set()
        for event in self._events:
            match event["event"]:
                case "generation":
                    version, open_updates, kept = event["version"], Counter(), set()
                case "arrived":
                    open_updates[event["worker"], event["iteration"]] += 1
                case "kept":
                    kept.add((event["worker"], event["iteration"]))
                case "discarded":
                    open_updates[event["worker"], event["iteration"]] -= 1
                case "applied":
                    if event["version"] != version + 1:
                        broken.append(f"Version {event['version']} followed {version}.")
                    version = event["version"]
                    for update in zip(event["workers"], event["iterations"], strict=True):
                        if update not in kept:
                            open_updates[update] -= 1
        for update in kept:
            open_updates.pop(update, None)
        if version != final:
            broken.append(f"The last version was {version}, and the last checkpoint is of {final}.")
        undecided = {update: count for update, count in open_updates.items() if count}
        if undecided:
            broken.append(f"Updates that arrived and were not applied or discarded once: {undecided}.")
        return broken


def _ends_a_push(event: dict[str, Any]) -> bool:
    """Is a worker lost, or its push cancelled since others wait for it? It may have been in the midst of it."""
    return event["event"] == "cancelled" or (event["event"] == "left" and bool(event["lost"]))
