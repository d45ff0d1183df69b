"""Measure a link with plain TCP streams: `python -m paceline.launch.link_probe serve` on one host, `call` on another.

The serving host prints its port. The calling host measures both directions, to one or several serving hosts at the
same time, and prints the result as JSON. It authenticates with the token that both hosts have.
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
SKIPPED = 0.4  # share of the time that is not measured: TCP slow start, and bursts that a rate limiter allows
TIMEOUT = 30.0  # seconds
TOKEN_BYTES = 16
#: The requests of a caller: answer pings, receive a stream, return the rate of the last stream, send a stream, end.
PING, UPLOAD, RATE, DOWNLOAD, QUIT = b"p", b"u", b"r", b"d", b"q"
Address: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class LinkMeasurement:
    """The measured rates and latency between two hosts."""

    up: float  # bytes per second from the calling host
    down: float  # bytes per second to the calling host
    latency: float  # seconds, one way


def serve(listener: socket.socket, token: bytes) -> None:
    """Answer calls with the right token, one after another, until a call ends the server."""
    listener.settimeout(TIMEOUT)
    rate = 0.0
    while True:
        caller, _ = listener.accept()
        with caller, contextlib.suppress(OSError, EOFError):
            _prepare(caller)
            if not secrets.compare_digest(_read(caller, TOKEN_BYTES), token):
                continue
            request, seconds = struct.unpack("<cd", _read(caller, 9))
            caller.sendall(b"!")
            if request == PING:
                while True:
                    caller.sendall(_read(caller, 1))
            elif request == UPLOAD:
                rate = _receive(caller, seconds)
            elif request == RATE:
                caller.sendall(struct.pack("<d", rate))
            elif request == DOWNLOAD:
                _send(caller)
            elif request == QUIT:
                return


def call(addresses: Sequence[Address], token: bytes, seconds: float) -> list[LinkMeasurement]:
    """Measure the links to these servers: first up, then down, with streams to all of them at the same time."""
    latencies = [_latency(address, token) for address in addresses]
    together = threading.Barrier(len(addresses))

    def up(address: Address) -> float:
        return _up(address, token, seconds, together.wait)

    def down(address: Address) -> float:
        return _down(address, token, seconds, together.wait)

    with ThreadPoolExecutor(len(addresses)) as threads:
        ups, downs = list(threads.map(up, addresses)), list(threads.map(down, addresses))
    for address in addresses:
        with _request(address, token, QUIT):
            pass
    return [LinkMeasurement(*each) for each in zip(ups, downs, latencies, strict=True)]


def _latency(address: Address, token: bytes) -> float:
    with _request(address, token, PING) as server:
        trips = []
        for _ in range(PINGS):
            began = time.perf_counter()
            server.sendall(b"p")
            _read(server, 1)
            trips.append(time.perf_counter() - began)
    return statistics.median(trips) / 2


def _up(address: Address, token: bytes, seconds: float, wait: Callable[[], object]) -> float:
    wait()
    with _request(address, token, UPLOAD, seconds) as server:
        _send(server)
    with _request(address, token, RATE) as server:
        (rate,) = struct.unpack("<d", _read(server, 8))
    return float(rate)


def _down(address: Address, token: bytes, seconds: float, wait: Callable[[], object]) -> float:
    wait()
    with _request(address, token, DOWNLOAD) as server:
        return _receive(server, seconds)


def _send(peer: socket.socket) -> None:
    """Send bytes until the other end closes the connection."""
    block = bytes(BLOCK)
    with contextlib.suppress(ConnectionError):
        while True:
            peer.sendall(block)


def _receive(peer: socket.socket, seconds: float) -> float:
    """Receive a stream for this time, and return its rate in bytes per second after the skipped part.

    The connection is then reset, so that bytes that are still under way are dropped.
    """
    buffer = bytearray(4 * BLOCK)
    began = time.perf_counter()
    since, count = 0.0, 0
    while True:
        got = peer.recv_into(buffer)
        now = time.perf_counter()
        if not got:
            raise EOFError("the peer closed the connection")
        if since:
            count += got
        elif now - began >= SKIPPED * seconds:
            since = now
        if since and count and now - began >= seconds:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return count / (now - since)


@contextlib.contextmanager
def _request(address: Address, token: bytes, request: bytes, seconds: float = 0.0) -> Iterator[socket.socket]:
    """Connect to a server and send it a request."""
    with socket.create_connection(address, timeout=TIMEOUT) as server:
        _prepare(server)
        server.sendall(token + struct.pack("<cd", request, seconds))
        _read(server, 1)
        yield server


def _prepare(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.settimeout(TIMEOUT)


def _read(peer: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count:
        got = peer.recv(count - len(read))
        if not got:
            raise EOFError("the peer closed the connection")
        read += got
    return read


def main(arguments: list[str]) -> None:
    """Run `serve`, or `call HOST:PORT[,HOST:PORT…] SECONDS`."""
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
