"""A link, measured with bare TCP streams: `python -m paceline.launch.link_probe serve` on one host, `call` on another.

The one that serves prints its port. The one that calls measures, both ways, to one or to several at the same time, and
prints what it found as JSON. Whoever calls shows the token that both were given.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TypeAlias

from paceline.serve.environment import TOKEN

BLOCK = 1 << 14
PINGS = 20
SKIPPED = 0.4  # of the time, in which a stream gets up to speed and what was saved up for a burst is used up
PATIENCE = 30.0  # seconds for anything to happen
TOKEN_BYTES = 16
Address: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class LinkMeasurement:
    """What was measured between two hosts."""

    up: float  # bytes per second, from the one that calls
    down: float
    latency: float  # seconds, one way


def serve(listener: socket.socket, token: bytes) -> None:
    """Answer those who have the token, one after the other, until one says that it was the last."""
    listener.settimeout(PATIENCE)
    rate = 0.0
    while True:
        caller, _ = listener.accept()
        with caller, contextlib.suppress(OSError, EOFError):
            _prepare(caller)
            if not secrets.compare_digest(_read(caller, TOKEN_BYTES), token):
                continue
            asked, seconds = struct.unpack("<cd", _read(caller, 9))
            caller.sendall(b"!")
            if asked == b"p":
                while True:
                    caller.sendall(_read(caller, 1))
            elif asked == b"u":
                rate = _receive(caller, seconds)
            elif asked == b"r":
                caller.sendall(struct.pack("<d", rate))
            elif asked == b"d":
                _send(caller)
            elif asked == b"q":
                return


def call(addresses: Sequence[Address], token: bytes, seconds: float) -> list[LinkMeasurement]:
    """Measure the stretches to those who serve: streams there and streams back, to all of them at the same time."""
    latencies = [_latency(address, token) for address in addresses]
    together = threading.Barrier(len(addresses))  # it can be used again and again

    def up(address: Address) -> float:
        return _up(address, token, seconds, together.wait)

    def down(address: Address) -> float:
        return _down(address, token, seconds, together.wait)

    with ThreadPoolExecutor(len(addresses)) as threads:
        ups, downs = list(threads.map(up, addresses)), list(threads.map(down, addresses))
    for address in addresses:
        with _asking(address, token, b"q"):
            pass
    return [LinkMeasurement(*each) for each in zip(ups, downs, latencies, strict=True)]


def _latency(address: Address, token: bytes) -> float:
    with _asking(address, token, b"p") as server:
        trips = []
        for _ in range(PINGS):
            began = time.perf_counter()
            server.sendall(b"p")
            _read(server, 1)
            trips.append(time.perf_counter() - began)
    return statistics.median(trips) / 2


def _up(address: Address, token: bytes, seconds: float, wait: Callable[[], object]) -> float:
    wait()
    with _asking(address, token, b"u", seconds) as server:
        _send(server)
    with _asking(address, token, b"r") as server:
        (rate,) = struct.unpack("<d", _read(server, 8))
    return float(rate)


def _down(address: Address, token: bytes, seconds: float, wait: Callable[[], object]) -> float:
    wait()
    with _asking(address, token, b"d") as server:
        return _receive(server, seconds)


def _send(peer: socket.socket) -> None:
    """Until the other end has had enough."""
    block = bytes(BLOCK)
    with contextlib.suppress(ConnectionError):
        while True:
            peer.sendall(block)


def _receive(peer: socket.socket, seconds: float) -> float:
    """The rate of what comes, in bytes per second, once it is up to speed. What is still under way is thrown away."""
    buffer = bytearray(4 * BLOCK)
    began = time.perf_counter()
    since, count = 0.0, 0
    while True:
        got = peer.recv_into(buffer)
        now = time.perf_counter()
        if not got:
            raise EOFError("the other end has hung up")
        if since:
            count += got
        elif now - began >= SKIPPED * seconds:
            since = now
        if since and count and now - began >= seconds:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return count / (now - since)


@contextlib.contextmanager
def _asking(address: Address, token: bytes, what: bytes, seconds: float = 0.0) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=PATIENCE) as server:
        _prepare(server)
        server.sendall(token + struct.pack("<cd", what, seconds))
        _read(server, 1)
        yield server


def _prepare(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.settimeout(PATIENCE)


def _read(peer: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count:
        got = peer.recv(count - len(read))
        if not got:
            raise EOFError("the other end has hung up")
        read += got
    return read


def main(arguments: list[str]) -> None:
    """Serve, or call HOST:PORT[,HOST:PORT…] SECONDS."""
    token = bytes.fromhex(os.environ[TOKEN])
    if arguments[0] == "serve":
        with socket.create_server(("", 0)) as listener:
            print(listener.getsockname()[1], flush=True)  # noqa: T201
            serve(listener, token)
    else:
        pairs = [each.rpartition(":") for each in arguments[1].split(",")]
        found = call([(host, int(port)) for host, _, port in pairs], token, float(arguments[2]))
        print(json.dumps([asdict(each) for each in found]), flush=True)  # noqa: T201


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, EOFError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
