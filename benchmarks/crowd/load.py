"""The load that clients put on a server, and the resources that its processes use."""

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
    """The benchmark cannot run here, or the server made a mistake. The message says which."""


@dataclass(frozen=True)
class Load:
    """The load: each of the clients exchanges a model of some bytes for at least some rounds."""

    clients: int = 2000
    rounds: int = 3
    bytes: int = 1_000_000

    def __post_init__(self) -> None:
        if self.clients < 3 or self.rounds < 1 or self.bytes < ELEMENT or self.bytes % ELEMENT:
            raise ValueError("A load needs at least 3 clients, 1 round, and a model whose bytes are a multiple of 4.")

    @property
    def elements(self) -> int:
        return self.bytes // ELEMENT


@dataclass(frozen=True)
class Memory:
    """The memory of a process in bytes: with at most one client, with all connected, at its peak, and at the end."""

    empty: int
    connected: int
    peak: int
    settled: int


@dataclass(frozen=True)
class CrowdResult:
    """The measurements of one server under load."""

    seconds: float  # until every client had done its rounds
    exchanges: int  # of all clients in that time; some clients do more rounds than others
    least: int  # exchanges of the slowest client
    cpu_seconds: float  # of all processes of the server in that time
    memory: tuple[Memory, ...]  # by process
    connecting: float  # seconds until all clients were connected
    retries: int = 0  # of connections
    versions: int = 0  # of the model, at the end

    @property
    def cpu_each(self) -> float:
        """CPU seconds per exchange."""
        return self.cpu_seconds / self.exchanges


def allow(connections: int) -> None:
    """Raise this process's limit of open files. Raise CrowdError if the system does not allow it."""
    if (most := open_files.allow(connections)) < connections:
        raise CrowdError(f"{connections} open files are needed, but only {most} are allowed. Raise `ulimit -Hn`.")


@contextlib.contextmanager
def started(arguments: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server. Its port is the last word of the first line that it prints."""
    command = [sys.executable, "-W", "ignore", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment())
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip().rstrip(".").rpartition(":")[2]
        if not port.isdigit():
            raise CrowdError("The server did not start; its output above says why.")
        yield process, int(port)
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


class ServerUsage:
    """The CPU time and memory of a server's processes."""

    def __init__(self, process: int) -> None:
        self._processes = _family(process)
        self._resident: list[list[int]] = []
        self.sample_memory()

    def sample_memory(self) -> None:
        """Record the memory that is in use now."""
        self._resident.append([memory(process) for process in self._processes])

    def cpu_seconds(self) -> float:
        return sum(map(cpu_seconds, self._processes))

    def memory(self) -> tuple[Memory, ...]:
        """Return the memory of each process, from three samples."""
        peaks = [memory(process, "VmHWM") for process in self._processes]
        empty, connected, settled = self._resident
        return tuple(Memory(*each) for each in zip(empty, connected, peaks, settled, strict=True))


def _family(process: int) -> list[int]:
    """Return a process and its descendants, without the fork server, which does not take part in the load."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    itself = [] if Path(f"/proc/{process}/comm").read_text().strip() == forkserver.NAME else [process]
    return [*itself, *(each for child in children for each in _family(int(child)))]
