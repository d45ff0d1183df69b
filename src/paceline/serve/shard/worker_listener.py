"""A shard's listening socket. Each worker passes the handshake, shows its ticket, and is served by its own thread.

Strangers may connect too. So one event loop shakes hands with all callers (`doorstep.py`), and only a peer that knows
the job's token gets a thread. The shard identifies a worker by the ticket that the coordinator gave it, not by the
number that it sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.serve.shard.store import Fenced
from paceline.serve.shard.worker_connection import FROM_WORKER, WorkerConnection
from paceline.serve.wire import handshake
from paceline.serve.wire.caller import Caller
from paceline.serve.wire.doorstep import BACKLOG, Doorstep
from paceline.serve.wire.frames import Channel, ConnectionClosed, WireError
from paceline.serve.wire.link import shard_to_worker
from paceline.serve.wire.messages import Expelled, Hello, PeerRejected, Refused
from paceline.serve.wire.tls import shown_certificate

if TYPE_CHECKING:
    from paceline.serve.shard.shard import Shard

log = logging.getLogger(__name__)

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
        self._closing = False
        self._accepting: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._workers: dict[int, dict[Channel, Hello]] = {}  # worker → its connections
        self._numbers = itertools.count(1)  # of the callers, in the order in which they came

    @property
    def port(self) -> int:
        """The port that the shard listens on."""
        port: int = self._socket.getsockname()[1]
        return port

    def run(self) -> None:
        """Accept connections until `close`."""
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._accept())

    async def _accept(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self._state:
            self._accepting = (asyncio.get_running_loop(), task)
            if self._closing:
                return
        await Doorstep([self._socket], self._meet).run()

    def close(self) -> None:
        """Accept no more connections. Open ones stay open."""
        with self._state:
            self._closing = True
            if self._accepting is None:  # `run` has not begun
                self._socket.close()
                return
        loop, task = self._accepting
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(task.cancel)

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

    async def _meet(self, sock: socket.socket, trust: Callable[[], None]) -> None:
        """Shake hands with a caller. If it knows the token, serve it in a thread of its own."""
        caller, number = Caller(sock), next(self._numbers)
        try:
            if self._tls:
                await caller.start_tls(self._tls)
            await caller.shake_hands(self._token, self._generation, shown_certificate(self._tls))
            trust()
            threading.Thread(target=self._serve, args=(caller.channel(FROM_WORKER), number), daemon=True).start()
        except RuntimeError:
            log.warning("a worker was turned away: the system allows no more threads; raise `ulimit -u`")
            caller.close()
        except (OSError, ValueError) as error:
            log.info("a caller did not pass the handshake: %s", error)
            caller.close()
            if isinstance(error, WireError):
                self._shard.tell(PeerRejected(str(error)))
        except BaseException:
            caller.close()
            raise

    def _serve(self, channel: Channel, number: int) -> None:
        """Serve one connection, from the end of its handshake until it ends. number: of the caller."""
        hello: Any = None
        try:
            with channel.within(DEAD_LINK_SECONDS):
                hello = channel.receive()
            if not isinstance(hello, Hello):
                raise WireError("A worker must send Hello first.")
            channel.set_keepalive(DEAD_LINK_SECONDS)
            self._admit(channel, hello)
            channel.emulate(shard_to_worker(self._shard.number, hello.worker))
            WorkerConnection(self._shard, channel, hello, number).run()
        except ConnectionClosed:
            pass
        except (OSError, ValueError) as error:
            log.info("a worker's connection ended: %s", error)
            self._turn_away(channel, error)
        finally:
            if isinstance(hello, Hello):
                self._forget(channel, hello)
            channel.close()

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

    def _turn_away(self, channel: Channel, error: Exception) -> None:
        """Send the reason why a connection ends, and report it to the coordinator if the peer broke the protocol."""
        with contextlib.suppress(OSError):
            channel.send(Expelled(str(error)) if isinstance(error, Fenced) else Refused(str(error)))
        if isinstance(error, WireError):
            self._shard.tell(PeerRejected(str(error)))
