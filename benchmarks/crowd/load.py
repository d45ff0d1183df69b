"""A server that bears a crowd of clients: how much they ask of it, and what its processes use meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import environment
from benchmarks.transports.load import ELEMENT
from paceline.observe.process_usage import cpu_seconds, memory
from paceline.serve import open_files
from paceline.serve.shard import forkserver

STOPPING = 10.0  # seconds that a server has to stop before it is killed


class CrowdError(RuntimeError):
    """It cannot be measured here, or the server did not do what it must; the message says which."""


@dataclass(frozen=True)
class Load:
    """What the crowd does: each of so many clients exchanges a model of so many bytes at least so often."""

    clients: int = 2000
    rounds: int = 3
    bytes: int = 1_000_000

    def __post_init__(self) -> None:
        if self.clients < 3 or self.rounds < 1 or self.bytes < ELEMENT or self.bytes % ELEMENT:
            raise ValueError("A load is of 3 clients or more, a round or more, and a model of 4 bytes or a multiple.")

    @property
    def elements(self) -> int:
        return self.bytes // ELEMENT


@dataclass(frozen=True)
class Memory:
    """Of one process, in bytes: when nobody had come, when all were connected, at most, and when all was over."""

    empty: int
    connected: int
    peak: int
    settled: int


@dataclass(frozen=True)
class CrowdResult:
    """How one server bore it."""

    seconds: float  # in which all of them did their rounds
    exchanges: int  # that were made then, in all: some clients are quicker
    least: int  # that any client made
    cpu_seconds: float  # of the server meanwhile, all its processes
    memory: tuple[Memory, ...]  # of each of its processes
    connecting: float  # seconds until all were connected
    turned_away: int = 0  # connections that had to be tried again
    versions: int = 0  # of the model, at the end

    @property
    def cpu_each(self) -> float:
        """CPU seconds of an exchange."""
        return self.cpu_seconds / self.exchanges


def allow(connections: int) -> None:
    """Let this process hold so many connections. CrowdError if the system does not."""
    if (most := open_files.allow(connections)) < connections:
        raise CrowdError(f"{connections} open files are needed, and there may be {most}: raise `ulimit -Hn`.")


@contextlib.contextmanager
def started(arguments: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server, and the port that it says it listens at, which is the last thing on its first line."""
    command = [sys.executable, "-W", "ignore", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment())
    assert process.stdout is not None
    try:
        said = process.stdout.readline().strip().rstrip(".").rpartition(":")[2]
        if not said.isdigit():
            raise CrowdError("The server did not start; its output above says why.")
        yield process, int(said)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOPPING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


class Watched:
    """What the processes of a server use, looked at step by step."""

    def __init__(self, process: int) -> None:
        self._processes = _family(process)
        self._resident: list[list[int]] = []
        self.look()

    def look(self) -> None:
        """Note how much memory there is in use now."""
        self._resident.append([memory(process) for process in self._processes])

    def cpu_seconds(self) -> float:
        return sum(map(cpu_seconds, self._processes))

    def memory(self) -> tuple[Memory, ...]:
        """Of each process, if it was looked at three times."""
        peaks = [memory(process, "VmHWM") for process in self._processes]
        empty, connected, settled = self._resident
        return tuple(Memory(*each) for each in zip(empty, connected, peaks, settled, strict=True))


def _family(process: int) -> list[int]:
    """A process and those that it started, but for the fork server, which has nothing to do with the load."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    itself = [] if Path(f"/proc/{process}/comm").read_text().strip() == forkserver.NAME else [process]
    return [*itself, *(each for child in children for each in _family(int(child)))]
