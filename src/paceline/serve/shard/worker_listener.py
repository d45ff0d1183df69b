"""A shard's listening socket. Each worker passes the handshake, shows its ticket, and is served by its own thread.

Strangers may connect too. So only a few connections may be in their handshake at a time, each for a limited time. The
shard identifies a worker by the ticket that the coordinator gave it, not by the number that it sends.
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
from paceline.serve.wire.endpoint import BACKLOG, answer
from paceline.serve.wire.frames import Channel, ConnectionClosed, WireError
from paceline.serve.wire.messages import Expelled, Hello, PeerRejected, Refused

if TYPE_CHECKING:
    from paceline.serve.shard.shard import Shard

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 64  # connections that may be in their handshake at a time
QUEUE_SECONDS = 0.5  # that one more connection waits for its handshake, before it is closed
DEAD_LINK_SECONDS = 30.0  # until a dead connection of a worker is ended


class WorkerListener:
    """Accepts the connections of workers, and keeps track of them."""

    def __init__(
        self,
        shard: Shard,
        state: threading.Condition,
        host: str,
        token: bytes,
        generation: str,
        tls: ssl.SSLContext | None,
    ) -> None:
        """state: the shard's lock, which guards the connections too. token: the job's, which workers prove to know."""
        self._shard, self._state = shard, state
        self._token, self._generation, self._tls = token, generation, tls
        self.key = b""  # with which the coordinator signs workers' tickets; known after Setup
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._closed = threading.Event()
        self._strangers = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._workers: dict[int, dict[Channel, Hello]] = {}  # worker → its connections

    @property
    def port(self) -> int:
        """The port that the shard listens on."""
        port: int = self._socket.getsockname()[1]
        return port

    def run(self) -> None:
        """Accept connections until `close`."""
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:  # the shard is closing, or too many files are open at the moment
                if self._closed.wait(0.05):
                    return
                continue
            if not self._strangers.acquire(timeout=QUEUE_SECONDS):  # honest workers end their handshakes by then
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
            except RuntimeError:
                log.warning("a worker was turned away: the system allows no more threads; raise `ulimit -u`")
                self._strangers.release()
                sock.close()

    def close(self) -> None:
        """Accept no more connections. Open ones stay open."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`, which `close` would not
        self._socket.close()

    def hang_up(self) -> None:
        """Close all connections."""
        with self._state:
            for channels in self._workers.values():
                for channel in channels:
                    channel.close()

    def hang_up_on(self, worker: int, incarnation: int) -> None:
        """Cut the connections of a worker's older incarnations. The state is held.

        A worker that was given up may neither read nor write any more, so nothing here may wait for it.
        """
        for channel, hello in self._workers.get(worker, {}).items():
            if hello.incarnation < incarnation:
                channel.cut()

    def _serve(self, sock: socket.socket) -> None:
        """Serve one connection, from its handshake until it ends."""
        channel: Channel | None = None
        hello: Any = None
        try:
            try:
                channel = answer(sock, FROM_WORKER, self._token, self._generation, self._tls)
                with channel.within(DEAD_LINK_SECONDS):
                    hello = channel.receive()
            finally:
                self._strangers.release()
            if not isinstance(hello, Hello):
                raise WireError("A worker must send Hello first.")
            channel.set_keepalive(DEAD_LINK_SECONDS)
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
                    self._forget(channel, hello)
                channel.close()
            sock.close()

    def _admit(self, channel: Channel, hello: Hello) -> None:
        """Take note of a worker's connection. Raise an error if its ticket is wrong or its incarnation is over."""
        with self._state:
            store = self._shard.await_setup().store
            if not handshake.is_ticket(self.key, hello.worker, hello.incarnation, hello.ticket):
                raise WireError(f"This is not worker {hello.worker}: it does not have its ticket.")
            if not store.accepts(hello.worker, hello.incarnation):
                raise Fenced
            self._workers.setdefault(hello.worker, {})[channel] = hello

    def _forget(self, channel: Channel, hello: Hello) -> None:
        """Forget a worker's connection that has ended."""
        with self._state:
            channels = self._workers.get(hello.worker, {})
            if channels.pop(channel, None):
                self._shard.await_setup().disconnected(channel, hello)
            if not channels:
                self._workers.pop(hello.worker, None)

    def _turn_away(self, channel: Channel | None, error: Exception) -> None:
        """Send the reason why a connection ends, and report it to the coordinator if the peer broke the protocol."""
        if channel:
            with contextlib.suppress(OSError):
                channel.send(Expelled(str(error)) if isinstance(error, Fenced) else Refused(str(error)))
        if isinstance(error, WireError):
            self._shard.tell(PeerRejected(str(error)))
