"""The director of a job of real processes.

It forks the processes and restarts those that are killed, as the product would. It wakes a stopped process when that
has been given up. At the end it checks that every promise was kept.
"""

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

from faults import actors
from faults.promises import broken_promises
from faults.scenario import Outcome, Scenario
from paceline.model import checkpoint

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Make this process die with the process that has forked it."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass
class Child:
    """A process of the job."""

    name: str
    pid: int
    worker: int | None = None
    stopped_at: float | None = None


class Director:
    """Runs one scenario. It has one thread, so that it can fork."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self.children: dict[int, Child] = {}
        self.problems: list[str] = []
        self.server_starts = 0
        self.done = False  # has the server ended without an error?
        self.server: socket.socket | None = None
        self.port = 0
        self.late: dict[int, int] = {}  # worker to restart when it is given up → how often it had left before
        self.worker_starts: Counter[int] = Counter()
        self.began = time.monotonic()
        self._events: list[dict[str, Any]] = []
        self._read_to: dict[Path, int] = {}
        self._read_at = 0.0

    def run(self) -> Outcome:
        """Run the scenario."""
        # Each scenario has its own address. A worker that wakes when its server is gone must not reach the server of
        # another scenario, which may have the same port.
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
            self.problems += broken_promises(self.scenario, self.folder / "checkpoints", self._events)
        if self.problems or os.environ.get("FAULTS_REPORT"):
            report = self._report()
        fired = [(self.folder / f"fired-{number}").exists() for number in range(len(self.scenario.faults))]
        generations = sum(event["event"] == "generation" for event in self._events)
        return Outcome(self.problems, fired, self._events, generations, seconds, report)

    # Supervision

    def _direct(self) -> None:
        """Supervise the processes until all of them have ended, or a promise is broken."""
        limit = self.began + self.scenario.limit
        while not self.problems:
            if time.monotonic() > limit:
                left = ", ".join(child.name for child in self.children.values())
                self.problems.append(f"The job did not end within {self.scenario.limit:g} s. These still run: {left}.")
                return
            self._fork_shards()
            self._reap()
            self._wake_stopped()
            if not self.port:
                self._start_workers_of_new_server()
                continue
            self._restart_late()
            if not self.children:
                return
            workers = [child for child in self.children.values() if child.worker is not None]
            if not workers and not self.late and self._nobody_joined():
                self._start_workers()  # the server has restored a checkpoint after all workers had left

    def _start_workers_of_new_server(self) -> None:
        """Start the workers as soon as the first server listens."""
        ports = [event["port"] for event in self.events() if event["event"] == "generation"]
        if ports:
            self.port = ports[0]
            self._start_workers()

    def _nobody_joined(self) -> bool:
        """Return whether no worker has joined the newest generation, which is not the first one."""
        newest = self._newest_generation()
        return len(newest) < len(self.events()) and not any(event["event"] == "joined" for event in newest)

    def _newest_generation(self) -> list[dict[str, Any]]:
        """Return the events of the newest generation of the server."""
        events = self.events()
        starts = [number for number, event in enumerate(events) if event["event"] == "generation"]
        return events[starts[-1] :] if starts else []

    def _reap(self) -> None:
        """Take note of processes that have ended or were stopped."""
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return
            child = self.children[pid]
            if os.WIFSTOPPED(status):
                child.stopped_at = time.monotonic()
                self._left_before = self._times_left(child.worker)
                continue
            del self.children[pid]
            code = os.waitstatus_to_exitcode(status)
            if code == -signal.SIGKILL:
                self._restart(child)
            elif code != 0:
                self.problems.append(f"The {child.name} ended with {code}.")
            elif child.name.startswith("server"):
                self.done = True
                for other in self.children.values():  # a worker that was killed at the end was restarted in vain
                    if other.worker is not None and self.worker_starts[other.worker] > 1:
                        os.kill(other.pid, signal.SIGKILL)

    def _restart(self, child: Child) -> None:
        """Restart a process that was killed, or note that its worker is to be restarted later."""
        if self.done:
            return
        if child.worker is not None:
            if self.scenario.restart == "late":
                self.late[child.worker] = self._times_left(child.worker)
            else:
                self._start_worker(child.worker)
        elif child.name.startswith("server"):
            if checkpoint.newest(self.folder / "checkpoints") is None:
                self.problems.append("The server was killed before there was a checkpoint.")
            else:
                self._start_server()

    def _wake_stopped(self) -> None:
        """Wake a stopped process when it has been given up, or after 2.5 leases if it was never a member."""
        for child in self.children.values():
            if child.stopped_at is None:
                continue
            slept = time.monotonic() - child.stopped_at
            given_up = child.worker is not None and self._times_left(child.worker) > self._left_before
            if given_up or slept > 2.5 * self.scenario.lease:
                child.stopped_at = None
                os.kill(child.pid, signal.SIGCONT)

    def _restart_late(self) -> None:
        """Restart the killed workers that have been given up."""
        for worker, before in list(self.late.items()):
            was_member = any(
                event["event"] == "joined" and event["worker"] == worker for event in self._newest_generation()
            )
            if not was_member or self._times_left(worker) > before:
                del self.late[worker]
                self._start_worker(worker)

    def _times_left(self, worker: int | None) -> int:
        """Return how often a worker has left the job."""
        return sum(event["event"] == "left" and event["worker"] == worker for event in self.events())

    # Processes

    def _start_server(self) -> None:
        if self.server:
            self.server.close()
        self.server_starts += 1
        ours, theirs = socket.socketpair()
        trace = self.folder / f"trace-{self.server_starts}.jsonl"
        port, again = self.port, self.server_starts > 1

        def serve() -> None:
            ours.close()
            actors.run_server(self.scenario, self.folder, theirs, trace, port, again)

        self._fork(f"server-{self.server_starts}", serve)
        theirs.close()
        self.server = ours

    def _start_workers(self) -> None:
        for number in range(self.scenario.workers):
            self._start_worker(number)

    def _start_worker(self, number: int) -> None:
        self.worker_starts[number] += 1
        name = f"worker-{number}-{self.worker_starts[number]}"
        self._fork(name, lambda: actors.run_worker(self.scenario, self.folder, number, self.port), number)

    def _fork_shards(self) -> None:
        """Fork the shards that the server asks for."""
        assert self.server is not None
        ready, _, _ = select.select([self.server], [], [], 0.01)
        if not ready:
            return
        requests = self.server.recv(4096)
        if not requests:
            time.sleep(0.01)  # the server has ended
            return
        for line in requests.splitlines():
            request = json.loads(line)
            place = request["shard"], request["replica"], request["port"]
            token = bytes.fromhex(request["token"])

            def run_shard(place: tuple[int, int, int] = place, token: bytes = token) -> None:
                actors.run_shard(self.scenario, self.folder, *place, token)

            pid = self._fork(f"shard-{place[0]}-{place[1]}", run_shard)
            with contextlib.suppress(OSError):
                self.server.sendall(str(pid).encode())

    def _fork(self, name: str, do: Callable[[], None], worker: int | None = None) -> int:
        """Call `do` in a new process that writes its output to a log. Return the id of the process."""
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
        """Make every process write its stack traces to its log."""
        for child in self.children.values():
            for number in (signal.SIGCONT, signal.SIGUSR1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)
        time.sleep(0.5)  # the report is more complete if they have written all of it

    def _end_all(self) -> None:
        """Kill all processes."""
        for pid in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)

    # What happened

    def events(self, now: bool = False) -> list[dict[str, Any]]:
        """Return the trace of all servers so far. now: also read what was written in the last 20 ms."""
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

    def _report(self) -> str:
        """Return the logs of all processes and the end of the trace."""
        logs = sorted(self.folder.glob("*.log"))
        texts = [f"--- {path.stem}\n{path.read_text(errors='replace')[-6000:]}" for path in logs]
        trace = "\n".join(json.dumps(event) for event in self._events[-60:])
        return "\n".join([*texts, "--- the end of the trace", trace])
