"""A crowd at a bare TCP server, which does nothing with the bytes that it gets. A real server is measured beside it.

`python -m benchmarks.crowd.bare_server BYTES` is that server.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import sys
import time

from benchmarks.crowd.load import CrowdResult, Load, Watched, allow, started
from paceline.serve.coordinator import event_loop
from paceline.serve.wire.endpoint import CALLERS
from paceline.serve.wire.frames import CHUNK


def exchange(load: Load) -> CrowdResult:
    """Let a crowd send its bytes to such a server, and as many back, in rounds."""
    allow(load.clients)
    with started(["-m", "benchmarks.crowd.bare_server", str(load.bytes)]) as (process, port):
        return event_loop.run(_exchange(load, port, process.pid))


async def connected(host: str, port: int) -> socket.socket:
    """A socket for an event loop."""
    sock = socket.socket()
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def fill(on: asyncio.AbstractEventLoop, sock: socket.socket, place: memoryview) -> None:
    """Receive as many bytes as there is room for."""
    while len(place):
        count = await on.sock_recv_into(sock, place[:CHUNK])
        if count == 0:
            raise ConnectionError("the server has hung up")
        place = place[count:]


async def _exchange(load: Load, port: int, process: int) -> CrowdResult:
    on, server = asyncio.get_running_loop(), Watched(process)
    began = time.monotonic()
    sent, spare = memoryview(bytes(range(250)) * (load.bytes // 250 + 1))[: load.bytes], list[bytearray]()
    sockets = await asyncio.gather(*(connected("127.0.0.1", port) for _ in range(load.clients)))

    async def rounds(sock: socket.socket) -> None:
        for _ in range(load.rounds):
            await on.sock_sendall(sock, sent)
            place = spare.pop() if spare else bytearray(load.bytes)
            await fill(on, sock, memoryview(place))
            spare.append(place)

    try:
        connecting = time.monotonic() - began
        server.look()
        cpu, began = server.cpu_seconds(), time.monotonic()
        await asyncio.gather(*map(rounds, sockets))
        seconds, cpu = time.monotonic() - began, server.cpu_seconds() - cpu
        server.look()
        exchanges = load.clients * load.rounds
        return CrowdResult(seconds, exchanges, load.rounds, cpu, server.memory(), connecting)
    finally:
        for sock in sockets:
            sock.close()


class _Connection:
    """A connection of the server: so many bytes in, and then so many out."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.there = 0  # bytes of this direction that are through


def serve(size: int) -> None:
    """Receive so many bytes from a connection and send as many, for as many connections as there are."""
    place = memoryview(bytearray(size))  # one for all: nobody asks what was in it
    with socket.create_server(("127.0.0.1", 0), backlog=CALLERS) as listener, selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        while True:
            for key, events in selector.select():
                if key.data is None:
                    sock, _ = listener.accept()
                    sock.setblocking(False)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    selector.register(sock, selectors.EVENT_READ, _Connection(sock))
                    continue
                one: _Connection = key.data
                if events & selectors.EVENT_READ:
                    count = one.socket.recv_into(place[one.there :][:CHUNK])
                    if not count:
                        selector.unregister(one.socket)
                        one.socket.close()
                        continue
                else:
                    count = one.socket.send(place[one.there :])
                one.there += count
                if one.there == size:
                    one.there = 0
                    onward = selectors.EVENT_WRITE if events & selectors.EVENT_READ else selectors.EVENT_READ
                    selector.modify(one.socket, onward, one)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(int(sys.argv[1]))
