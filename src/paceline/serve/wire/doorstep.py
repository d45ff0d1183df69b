"""Accept connections, and bound what strangers cost: coordinator and shards use the same code.

Everything here runs in one event loop and waits for no peer, so strangers cannot hold up the accepting.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from paceline.serve.wire.strangers import HANDSHAKE_SECONDS, Strangers

log = logging.getLogger(__name__)

#: How many callers may wait in the listen queue, if the system allows as many. A caller that finds the queue full waits
#: for seconds until TCP tries again.
BACKLOG = 4096
AT_ONCE, BREATH_SECONDS = 32, 0.005  # connections that are accepted in a row, and the pause that follows
#: Errors of `accept` that pass when another connection is closed.
OUT_OF_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
#: Serves a connection until it ends, and closes the socket. It calls the function when the caller has proved that it
#: knows a token; until then it may be cancelled at any time.
Meet: TypeAlias = Callable[[socket.socket, Callable[[], None]], Coroutine[Any, Any, None]]


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets for all addresses of a host, at one port. Raise OSError if there is none."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    for family, address in dict.fromkeys((each[0], each[4][0]) for each in found):
        try:
            sockets.append(socket.create_server((str(address), port), family=family, backlog=BACKLOG))
        except OSError:
            if not sockets:  # a name may have an IPv6 address, though the system has no IPv6
                raise
        port = sockets[0].getsockname()[1]
    return sockets


class Doorstep:
    """Accepts connections at some sockets, each served in a task of its own."""

    def __init__(self, sockets: Sequence[socket.socket], meet: Meet) -> None:
        self._sockets, self._meet = sockets, meet
        self._strangers = Strangers[asyncio.Task[None]]()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unmet: set[socket.socket] = set()  # sockets whose tasks have not begun

    async def run(self) -> None:
        """Accept connections until this is cancelled. Then close the sockets and the connections of strangers."""
        for sock in self._sockets:
            sock.setblocking(False)
        try:
            await asyncio.gather(*(self._accept_at(sock) for sock in self._sockets))
        finally:
            for sock in self._sockets:
                sock.close()
            while (stranger := self._strangers.displace()) is not None:
                stranger.cancel()

    async def _accept_at(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in itertools.count(1):
            while pause := self._strangers.pause(loop.time()):
                await asyncio.sleep(pause)
            await readable(sock)  # not `sock_accept`: if that is cancelled, an accepted socket may be lost
            try:
                accepted, address = sock.accept()
            except BlockingIOError:
                continue  # the caller has gone away
            except OSError as error:
                oldest = self._strangers.displace() if error.errno in OUT_OF_ROOM else None
                if oldest:
                    oldest.cancel()
                await asyncio.sleep(0.01 if oldest else 0.05)
                continue
            accepted.setblocking(False)
            self._enter(accepted, str(address[0]) if address else "")
            # Callers that have answered go before those that have just connected. Peers that train go before both: a
            # burst of strangers must not take the interpreter's lock from the threads of a shard.
            await asyncio.sleep(0 if number % AT_ONCE else BREATH_SECONDS)

    def _enter(self, sock: socket.socket, address: str) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._serve(sock))
        self._unmet.add(sock)
        self._tasks.add(task)  # the event loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._close_unmet(sock))
        for displaced in self._strangers.enter(task, address, loop.time()):
            displaced.cancel()

    def _close_unmet(self, sock: socket.socket) -> None:
        """Close the socket of a task that was cancelled before its first step."""
        if sock in self._unmet:
            self._unmet.discard(sock)
            sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        self._unmet.discard(sock)
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        deadline = loop.call_later(HANDSHAKE_SECONDS, task.cancel)

        def trust() -> None:
            deadline.cancel()
            self._strangers.leave(task)

        try:
            with contextlib.suppress(asyncio.CancelledError):  # displaced, or too slow
                await self._meet(sock, trust)
        except Exception as error:  # a bug in one connection must not end the others
            log.error("serving a connection failed with an unexpected error", exc_info=error)
        finally:
            trust()


async def readable(sock: socket.socket) -> None:
    """Wait until a socket has something to receive."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


async def writable(sock: socket.socket) -> None:
    """Wait until a socket can send."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock, _resolve, ready)
    try:
        await ready
    finally:
        loop.remove_writer(sock)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
