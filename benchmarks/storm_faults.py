"""The faults of `benchmarks/storm.py`: they strike the processes of a job from outside, at random from a seed.

A connection is cut or reset through a copy of the victim's socket, which pidfd_getfd gives (Linux 5.6). A full disk is
a limit of 0 bytes on the files that the server's processes write. So nothing here needs root or a hook in the product.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import os
import random
import resource
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

PIDFD_GETFD = 438
LIBC = ctypes.CDLL(None, use_errno=True)
MEAN_PAUSE = 1.5  # seconds between two faults
RECOVERY_SECONDS = 6.0  # after a fault of the server, in which a second one often follows
#: The kinds of faults, with their weights.
KINDS = {
    "kill worker": 8,
    "stop worker": 4,
    "cut worker": 6,
    "reset worker": 6,
    "kill shard": 2,
    "stop shard": 2,
    "cut shard": 2,
    "reset shard": 1,
    "kill fork server": 1,
    "kill coordinator": 2,
    "stop coordinator": 2,
    "cut coordinator": 2,
    "reset coordinator": 1,
    "full disk": 2,
}
#: Faults from which a job recovers in a new generation.
OF_SERVER = {"kill shard", "kill fork server", "kill coordinator", "damage"}
SECOND = ("kill coordinator", "kill shard", "kill fork server", "kill worker", "cut worker", "stop shard")


class Storm:
    """Strikes the processes of one job."""

    def __init__(self, rng: random.Random, seconds: float, lease: float, damage: bool) -> None:
        self._rng, self._seconds, self._lease = rng, seconds, lease
        self._kinds = KINDS | ({"damage": 2} if damage else {})
        self.strikes: Counter[str] = Counter()
        self.log: list[str] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # actions, each with its time
        self._order = itertools.count()
        self._began = 0.0
        self._launcher = 0
        self._checkpoints = Path()
        self._ends_recovery = 0.0

    def run(self, process: subprocess.Popen[bytes], checkpoints: Path, within: float) -> None:
        """Strike the job until the storm or the job is over. Begin when it has a checkpoint, and undo all stops."""
        self._launcher, self._checkpoints = process.pid, checkpoints
        limit = time.monotonic() + within
        while not any(checkpoints.glob("version-*[0-9]")) and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        self._began = time.monotonic()
        following = self._began
        while process.poll() is None and time.monotonic() < self._began + self._seconds:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            if now >= following:
                self._strike(self._rng.choices([*self._kinds], [*self._kinds.values()])[0])
                following = now + self._rng.expovariate(1 / MEAN_PAUSE)
            time.sleep(0.02)
        for _, _, do in sorted(self._due, key=lambda due: due[0]):
            do()
        for pid in _descendants(self._launcher):
            _signal(pid, signal.SIGCONT)
        self._limit_server(None)

    def _later(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), do))

    def _strike(self, kind: str) -> None:
        what, _, party = kind.partition(" ")
        victims = self._victims("coordinator" if kind in ("full disk", "damage") else party)
        if not victims:
            return
        pid, now = self._rng.choice(victims), time.monotonic()
        match what:
            case "kill":
                _signal(pid, signal.SIGKILL)
            case "stop":
                _signal(pid, signal.SIGSTOP)
                seconds = self._rng.choice((0.3, 1.0, 2.0)) * self._lease * self._rng.random()
                self._later(seconds, lambda: _signal(pid, signal.SIGCONT))
            case "cut" | "reset":
                if not _disconnect(pid, self._rng, reset=what == "reset"):
                    return
            case "full":
                self._fill_disk()
            case "damage":
                if not self._damage_newest():
                    return
                _signal(pid, signal.SIGKILL)
        self.strikes[kind] += 1
        if now < self._ends_recovery:
            self.strikes["during recovery"] += 1
        self.log.append(f"{now - self._began:7.2f} {kind} (pid {pid})")
        if kind in OF_SERVER:
            self._ends_recovery = now + RECOVERY_SECONDS
            if self._rng.random() < 0.6:
                second = self._rng.choice(SECOND)
                self._later(self._rng.uniform(0.0, RECOVERY_SECONDS), lambda: self._strike(second))

    def _fill_disk(self) -> None:
        """Let the server and its shards write no file for a while."""
        self._limit_server(0)
        self._later(self._rng.uniform(0.5, 5.0), lambda: self._limit_server(None))

    def _limit_server(self, size: int | None) -> None:
        """Limit the files of the server's processes. Shards inherit the fork server's, so they come last."""
        for party in ("coordinator", "fork server", "shard"):
            for pid in self._victims(party):
                _limit_files(pid, size)

    def _damage_newest(self) -> bool:
        """Truncate a file of the newest checkpoint, or flip a bit of it. Return False if it is the only one."""
        found = sorted(path.parent for path in self._checkpoints.glob("version-*[0-9]/job.json"))
        if len(found) < 2:
            return False
        with contextlib.suppress(OSError):  # it may be removed at this moment
            path = self._rng.choice(sorted(found[-1].iterdir()))
            content = bytearray(path.read_bytes())
            place = self._rng.randrange(len(content))
            if self._rng.random() < 0.5:
                content = content[:place]
            else:
                content[place] ^= 1 << self._rng.randrange(8)
            with path.open("r+b") as file:
                file.write(content)
                file.truncate()
            return True
        return False

    def _victims(self, party: str) -> list[int]:
        """Return the processes of the job of this kind."""
        return [pid for pid in _descendants(self._launcher) if _kind_of(pid) == party]


def _kind_of(pid: int) -> str:
    """Return what a process of the job is: coordinator, fork server, shard or worker."""
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if name == "fork server":
            return name
        if name.startswith("shard "):
            return "shard"
        if arguments[1:3] == ["-m", "paceline.serve"]:
            return "coordinator"
        if any(argument.endswith("storm_job.py") for argument in arguments[1:2]):
            return "worker"
    return ""


def _descendants(pid: int) -> list[int]:
    """Return all processes that this one started, directly or indirectly, in a fixed order."""
    children: dict[int, list[int]] = {}
    for entry in sorted(Path("/proc").iterdir()):
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int(entry.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, open_ = list[int](), [pid]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return sorted(found)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _limit_files(pid: int, size: int | None) -> None:
    """Limit the size of the files that a process may write. None: no limit."""
    with contextlib.suppress(ProcessLookupError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most if size is None else size, most))


def _disconnect(pid: int, rng: random.Random, reset: bool) -> bool:
    """Cut or reset one TCP connection of a process. Return False if it has none."""
    with contextlib.suppress(OSError):
        links = [entry for entry in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(entry).startswith("socket:")]
        rng.shuffle(links)
        process = os.pidfd_open(pid)
        try:
            for link in links:
                handle = LIBC.syscall(PIDFD_GETFD, process, int(link.name), 0)
                if handle >= 0:
                    with socket.socket(fileno=handle) as copy:
                        if _is_connection(copy):
                            _end(copy, reset)
                            return True
        finally:
            os.close(process)
    return False


def _is_connection(copy: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return copy.family in (socket.AF_INET, socket.AF_INET6) and bool(copy.getpeername())
    return False


def _end(copy: socket.socket, reset: bool) -> None:
    """End a connection in order, or with a reset: a connect to no address makes the kernel send one."""
    if reset:
        LIBC.connect(copy.fileno(), bytes(16), 16)
    else:
        copy.shutdown(socket.SHUT_RDWR)
