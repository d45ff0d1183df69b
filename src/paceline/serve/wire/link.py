"""Emulated links: the processes of a job on one machine exchange bytes as if each host had a link of a limited rate.

Each worker is a host, and each shard is one too, unless it shares the host of its worker. Every host has a full-duplex
link of the same rate. The sender of a piece waits until its own link and then the receiver's link have carried the
piece, and only then passes it to the kernel. So a message arrives when a real link would have delivered it, and pieces
of different senders take turns on the link of their receiver.

A small file that all processes of the job map into memory holds, for each direction of each link, the time at which it
is free again. All processes of a machine read the same monotonic clock. A record lock guards each time, so a process
that is killed holds nothing. No process needs root. Receivers know nothing of all this.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from paceline.serve.environment import LINK

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MIN_RATE, MAX_RATE = 10e3 / 8, 10e9 / 8  # bytes per second that can be emulated
PIECE_SECONDS = 0.001  # that one piece of a message takes; senders that share a link take turns after each piece
MIN_PIECE, MAX_PIECE = 1448, 1 << 18  # bytes; the smallest piece is the payload of one packet
#: Ethernet and TCP/IP headers take a part of a link: 66 bytes of each frame of 1514, or of 9014 on a fast link. A lab
#: has the same frames.
FAST = 12.5e6  # bytes per second
PAYLOAD_SHARE, FAST_PAYLOAD_SHARE = 1448 / 1514, 8948 / 9014
#: Seconds by which a busy machine may wake a sender too late. A real link would have carried its bytes meanwhile, so
#: the sender catches up.
LATE_SECONDS = 0.05
BACK_TO_BACK = 0.002  # seconds between two messages of a sender that count as one stream of bytes
NO_SLEEP = 5e-5  # seconds; a sleep is not more precise than that

_HEADER = struct.Struct("=dII")  # the rate, the number of hosts, the host of shard 0
_TIME = struct.Struct("=d")
SENDING, RECEIVING = 0, 1


def check_rate(rate: float) -> None:
    """Raise ValueError if links of this rate, in bytes per second, cannot be emulated."""
    if fcntl is None:
        raise ValueError("links cannot be emulated on this system, which has no record locks.")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ValueError("links can be emulated from 10kbit to 10Gbit.")


class EmulatedLinks:
    """The links of all hosts of a job, as the processes of the job share them."""

    def __init__(self, path: Path) -> None:
        """Open the file that `create` has written."""
        self._file = os.open(path, os.O_RDWR)
        self._times = mmap.mmap(self._file, 0)
        self.rate, self._hosts, self._first_server = _HEADER.unpack_from(self._times)
        self._lock = threading.Lock()  # a record lock does not keep the threads of one process apart

    @classmethod
    def create(cls, path: Path, rate: float, workers: int, servers: int) -> None:
        """Write the file of a job. rate: bytes per second. servers: 0 if each shard shares the host of its worker."""
        header = _HEADER.pack(rate, workers + servers, workers if servers else 0)
        path.write_bytes(header + bytes(2 * _TIME.size * (workers + servers)))

    def shard_host(self, shard: int) -> int:
        """Return the host of a shard. The host of a worker has the worker's number."""
        return int(self._first_server) + shard

    def path(self, sender: int, receiver: int) -> LinkPath | None:
        """Return the path between two hosts, or None if they are the same host."""
        return LinkPath(self, sender, receiver) if sender != receiver else None

    def reserve(self, host: int, direction: int, seconds: float, ready: float) -> float:
        """Reserve one direction of a host's link for `seconds`, not before `ready`. Return when the time begins."""
        if not 0 <= host < self._hosts:
            raise ValueError(f"The emulated network has {self._hosts} hosts, and no number {host}.")
        place = _HEADER.size + _TIME.size * (2 * host + direction)
        with self._lock:
            fcntl.lockf(self._file, fcntl.LOCK_EX, _TIME.size, place)
            try:
                begin: float = max(_TIME.unpack_from(self._times, place)[0], ready)
                _TIME.pack_into(self._times, place, begin + seconds)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN, _TIME.size, place)
        return begin

    def close(self) -> None:
        """Close the file."""
        self._times.close()
        os.close(self._file)


class LinkPath:
    """The way of the messages that one channel sends: over the sender's link, then over the receiver's."""

    def __init__(
        self,
        links: EmulatedLinks,
        sender: int,
        receiver: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._links, self._sender, self._receiver = links, sender, receiver
        self._clock, self._sleep = clock, sleep
        self._sent = self._arrived = -1.0  # when the last piece had left the sender's link, and the receiver's
        self._rate = links.rate * (PAYLOAD_SHARE if links.rate < FAST else FAST_PAYLOAD_SHARE)
        self._piece = int(min(max(PIECE_SECONDS * self._rate, MIN_PIECE), MAX_PIECE))  # bytes

    def begin(self, size: int) -> None:
        """Begin a message. Wait until both links have carried its first `size` bytes, which is its head."""
        now = self._clock()
        if now - self._arrived > BACK_TO_BACK:
            self._sent = now
        self.carry(size)

    def carry(self, left: int) -> int:
        """Wait until both links have carried the next piece of a message with `left` more bytes. Return its size."""
        size = min(left, self._piece)
        seconds = size / self._rate
        ready = max(self._sent, self._clock() - LATE_SECONDS)  # a switch keeps pieces that wait for the receiver's link
        begin = self._links.reserve(self._sender, SENDING, seconds, ready)
        self._sent = begin + seconds
        self._wait_until(begin)  # other senders may use the receiver's link until then
        self._arrived = self._links.reserve(self._receiver, RECEIVING, seconds, begin) + seconds
        self._wait_until(self._arrived)
        return size

    def _wait_until(self, moment: float) -> None:
        left = moment - self._clock()
        if left > NO_SLEEP:
            self._sleep(left)


def worker_to_shard(worker: int, shard: int) -> LinkPath | None:
    """Return the path from a worker to a shard, or None if no link between them is emulated."""
    links = _links_of(os.environ.get(LINK, ""))
    return links.path(worker, links.shard_host(shard)) if links else None


def shard_to_worker(shard: int, worker: int) -> LinkPath | None:
    """Return the path from a shard to a worker, or None if no link between them is emulated."""
    links = _links_of(os.environ.get(LINK, ""))
    return links.path(links.shard_host(shard), worker) if links else None


@lru_cache(maxsize=1)
def _links_of(path: str) -> EmulatedLinks | None:
    """Return the links in this file. A process opens it once: closing a second copy would drop the process's locks."""
    return EmulatedLinks(Path(path)) if path else None


@contextlib.contextmanager
def emulated(rate: float | None, workers: int, servers: int) -> Iterator[dict[str, str]]:
    """Yield the environment variables of a job with emulated links; none if there is no rate.

    rate: bytes per second. servers: 0 if each shard shares the host of its worker.
    """
    if rate is None:
        yield {}
        return
    check_rate(rate)
    handle, name = tempfile.mkstemp(prefix="paceline-link-")
    os.close(handle)
    try:
        EmulatedLinks.create(Path(name), rate, workers, servers)
        yield {LINK: name}
    finally:
        Path(name).unlink(missing_ok=True)
