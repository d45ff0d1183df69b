"""A shard's listening socket: whoever calls is greeted, shows its ticket, and is served by a thread of its own.

Strangers may call too. So only a few may be in the midst of their greeting, each for a limited time; and a worker is
known by the ticket that the coordinator gave it, not by the number that it says.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any

from paceline.serve.shard.store import Fenced
from paceline.serve.shard.worker_connection import FROM_WORKER, WorkerConnection
from paceline.serve.wire import handshake
from paceline.serve.wire.endpoint import CALLERS, answer
from paceline.serve.wire.frames import Channel, ConnectionClosed, WireError
from paceline.serve.wire.messages import Expelled, Hello, PeerRejected, Refused

if TYPE_CHECKING:
    from paceline.serve.shard.shard import Shard

log = logging.getLogger(__name__)

STRANGERS = 64  # connections that may be in the midst of their greeting
QUEUEING = 0.5  # seconds that the next one is made to wait for a place among them, before it is turned away
CUT_SECONDS = 30.0  # a worker's connection over which nothing gets through for so long is ended


class WorkerListener:
    """Lets workers in, and knows the connections of each."""

    def __init__(
        self,
        shard: Shard,
        state: threading.Condition,
        host: str,
        token: bytes,
        generation: str,
        tls: ssl.SSLContext | None,
    ) -> None:
        """state: the shard's, which guards what is known of workers too. token: that workers know."""
        self._shard, self._state = shard, state
        self._token, self._generation, self._tls = token, generation, tls
        self.key = b""  # by which workers' tickets are known, as soon as the shard has a store
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=CALLERS)
        self._closed = threading.Event()
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._workers: dict[int, dict[Channel, Hello]] = {}  # worker → its connections

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def run(self) -> None:
        """Let callers in until `close`."""
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # the shard is closing, or there are too many open files for the moment
                if self._closed.wait(0.05):
                    return
                continue
            if not self._strangers.acquire(timeout=QUEUEING):  # a crowd that greets is through by then
                sock.close()  # too many who do not say who they are
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
            except RuntimeError:  # the system allows no more threads: who is here is served on
                log.warning("a worker was turned away: the system allows no more threads; raise `ulimit -u`")
                self._strangers.release()
                sock.close()

    def close(self) -> None:
        """Let nobody in any more. Those who are in stay."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # to close it would not wake the thread that waits for a caller
        self._socket.close()

    def hang_up(self) -> None:
        """End all connections."""
        with self._state:
            for channels in self._workers.values():
                for channel in channels:
                    channel.close()

    def hang_up_on(self, worker: int, incarnation: int) -> None:
        """End a worker's connections of before this incarnation. The state is held.

        A worker that was given up perhaps neither reads nor writes any more; so it holds nothing here any longer.
        """
        for channel, hello in self._workers.get(worker, {}).items():
            if hello.incarnation < incarnation:
                channel.cut()

    def _serve(self, sock: socket.socket) -> None:
        """One caller, from its greeting until it is gone."""
        channel: Channel | None = None
        hello: Any = None
        try:
            try:
                channel = answer(sock, FROM_WORKER, self._token, self._generation, self._tls)
                with channel.within(CUT_SECONDS):
                    hello = channel.receive()
            finally:
                self._strangers.release()
            if not isinstance(hello, Hello):
                raise WireError("The first message of a worker must be Hello.")
            channel.limit_cut(CUT_SECONDS)
            self._admit(channel, hello)
            WorkerConnection(self._shard, channel, hello).run()
        except ConnectionClosed:
            pass
        except (OSError, ValueError) as error:
            log.info("a worker's connection ended: %s", error)
            self._turn_away(channel, error)
        finally:
            if channel:
                if isinstance(hello, Hello):
                    self._visited(channel, hello)
                channel.close()
            sock.close()

    def _admit(self, channel: Channel, hello: Hello) -> None:
        """Take note of a worker's connection, if it is who it says and was not given up."""
        with self._state:
            store = self._shard.opened()
            if not handshake.is_ticket(self.key, hello.worker, hello.incarnation, hello.ticket):
                raise WireError(f"This is not worker {hello.worker}: it does not have its ticket.")
            if not store.accepts(hello.worker, hello.incarnation):
                raise Fenced("This worker has been given up; it must join again.")
            self._workers.setdefault(hello.worker, {})[channel] = hello

    def _visited(self, channel: Channel, hello: Hello) -> None:
        """A worker's connection is over."""
        with self._state:
            channels = self._workers.get(hello.worker, {})
            if channels.pop(channel, None) and self._shard.flow:
                self._shard.flow.left(hello, channel)
            if not channels:
                self._workers.pop(hello.worker, None)

    def _turn_away(self, channel: Channel | None, error: Exception) -> None:
        """Tell a caller why its connection ends, and the coordinator if something wrong was said."""
        if channel:
            with contextlib.suppress(OSError):
                channel.send(Expelled(str(error)) if isinstance(error, Fenced) else Refused(str(error)))
        if isinstance(error, WireError):
            self._shard.tell(PeerRejected(str(error)))
