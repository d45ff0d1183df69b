"""The baseline for a real server: a bare TCP server that ignores the bytes it receives, and clients for it.

`python -m benchmarks.crowd.bare_server BYTES` runs the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import sys
import time

from benchmarks.crowd.load import CrowdResult, Load, ServerUsage, allow, started
from paceline.serve.coordinator import event_loop
from paceline.serve.wire.doorstep import BACKLOG
from paceline.serve.wire.frames import CHUNK


def exchange(load: Load) -> CrowdResult:
    """Let all clients exchange bytes with a bare TCP server, in rounds, and measure the server."""
    allow(load.clients)
    with started(["-m", "benchmarks.crowd.bare_server", str(load.bytes)]) as (process, port):
        return event_loop.run(_exchange(load, port, process.pid))


async def connected(host: str, port: int) -> socket.socket:
    """Return a connected non-blocking socket."""
    sock = socket.socket()
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def fill(loop: asyncio.AbstractEventLoop, sock: socket.socket, buffer: memoryview) -> None:
    """Receive bytes until the buffer is full."""
    while len(buffer):
        count = await loop.sock_recv_into(sock, buffer[:CHUNK])
        if count == 0:
            raise ConnectionError("The server closed the connection.")
        buffer = buffer[count:]


async def _exchange(load: Load, port: int, process: int) -> CrowdResult:
    loop, server = asyncio.get_running_loop(), ServerUsage(process)
    began = time.monotonic()
    sent, spare = memoryview(bytes(range(250)) * (load.bytes // 250 + 1))[: load.bytes], list[bytearray]()
    sockets = await asyncio.gather(*(connected("127.0.0.1", port) for _ in range(load.clients)))

    async def rounds(sock: socket.socket) -> None:
        for _ in range(load.rounds):
            await loop.sock_sendall(sock, sent)
            buffer = spare.pop() if spare else bytearray(load.bytes)
            await fill(loop, sock, memoryview(buffer))
            spare.append(buffer)

    try:
        connecting = time.monotonic() - began
        server.sample_memory()
        cpu, began = server.cpu_seconds(), time.monotonic()
        await asyncio.gather(*map(rounds, sockets))
        seconds, cpu = time.monotonic() - began, server.cpu_seconds() - cpu
        server.sample_memory()
        exchanges = load.clients * load.rounds
        return CrowdResult(seconds, exchanges, load.rounds, cpu, server.memory(), connecting)
    finally:
        for sock in sockets:
            sock.close()


class _Connection:
    """A connection of the server, which alternates between receiving and sending."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.done = 0  # bytes of the current direction that are transferred


def serve(size: int) -> None:
    """Serve connections forever: receive `size` bytes from each, send as many back, and start over."""
    buffer = memoryview(bytearray(size))  # shared by all connections, because its content does not matter
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener, selectors.DefaultSelector() as selector:
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
                    count = one.socket.recv_into(buffer[one.done :][:CHUNK])
                    if not count:
                        selector.unregister(one.socket)
                        one.socket.close()
                        continue
                else:
                    count = one.socket.send(buffer[one.done :])
                one.done += count
                if one.done == size:
                    one.done = 0
                    next_event = selectors.EVENT_WRITE if events & selectors.EVENT_READ else selectors.EVENT_READ
                    selector.modify(one.socket, next_event, one)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve(int(sys.argv[1]))
