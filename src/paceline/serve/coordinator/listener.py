"""The coordinator's listening socket. It shakes hands with callers, and passes on those that know the job's token."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from paceline.model.description import Description
from paceline.serve.wire import handshake
from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.endpoint import BACKLOG
from paceline.serve.wire.frames import MessageDecoder, WireError
from paceline.serve.wire.messages import (
    Accepted,
    CheckpointLoaded,
    FinishTraining,
    GradientReady,
    GradientStarted,
    Heartbeat,
    InitialWeightsReceived,
    InspectExclusions,
    Join,
    Leave,
    PartSaved,
    PeerRejected,
    Proof,
    Refused,
    Register,
    ReportMetric,
    RequestSamples,
    Resume,
    ShardFailed,
    Subscribe,
    UpdateProducts,
    UpdateReceived,
)

log = logging.getLogger(__name__)

FROM_WORKER = (
    Proof
    | Join
    | Resume
    | RequestSamples
    | GradientStarted
    | GradientReady
    | ReportMetric
    | FinishTraining
    | Heartbeat
    | Leave
)
FROM_SHARD = (
    Register
    | CheckpointLoaded
    | InitialWeightsReceived
    | UpdateReceived
    | UpdateProducts
    | PartSaved
    | ShardFailed
    | PeerRejected
)
FROM_ANY_PEER = MessageDecoder(FROM_WORKER | FROM_SHARD | Subscribe | InspectExclusions)
HANDSHAKE_SECONDS = 10.0
CLOSE_SECONDS = 2.0  # for the last messages of a connection to get out


class CoordinatorListener:
    """Accepts connections, and serves each in a task of its own."""

    def __init__(
        self,
        generation: str,
        token: bytes,
        shard_token: bytes,
        tls: ssl.SSLContext | None,
        serve: Callable[[AsyncChannel, Any, bool], Awaitable[None]],
    ) -> None:
        """serve(peer, first, is_shard): called with a peer and its first message; serves it. It may raise WireError.

        shard_token: the token of the server's own shards. If it is empty, a shard uses the job's token.
        """
        self._generation, self._token, self._shard_token, self._tls = generation, token, shard_token, tls
        self._serve = serve
        self.faults = 0  # peers that were refused
        self._connections: dict[asyncio.Task[None], AsyncChannel] = {}  # every open connection, by its task
        self._server: asyncio.Server | None = None
        self._closing = False

    async def listen(self, host: str, port: int) -> int:
        """Begin to listen. Return the port."""
        timeout = HANDSHAKE_SECONDS if self._tls else None
        self._server = await asyncio.start_server(
            self._handle_connection, host, port, backlog=BACKLOG, ssl=self._tls, ssl_handshake_timeout=timeout
        )
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Accept no more connections."""
        self._closing = True
        if self._server:
            self._server.close()

    async def hang_up(self) -> None:
        """Close every connection after its last messages are out. Cut those that take too long."""
        for peer in self._connections.values():
            peer.close()
        if self._connections:
            _, slow = await asyncio.wait(self._connections, timeout=CLOSE_SECONDS)
            for task in slow:
                self._connections[task].abort()
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        peer = AsyncChannel(reader, writer, FROM_ANY_PEER)
        task = asyncio.current_task()
        assert task is not None
        if self._closing:
            peer.abort()
            return
        self._connections[task] = peer
        try:
            first, is_shard = await asyncio.wait_for(self._shake_hands(peer), HANDSHAKE_SECONDS)
            await self._serve(peer, first, is_shard)
        except asyncio.CancelledError:
            pass  # the server is closing
        except (asyncio.IncompleteReadError, TimeoutError, OSError) as error:
            log.info("a connection ended: %s", error)
            if isinstance(error, WireError):
                self.faults += 1
                peer.send(Refused(str(error)))
        except Exception as error:  # a bug here must not let one caller end the generation
            log.error("serving a connection failed with an unexpected error", exc_info=error)
        finally:
            peer.close()
            await peer.closed()
            del self._connections[task]

    async def _shake_hands(self, peer: AsyncChannel) -> tuple[Any, bool]:
        """Return a caller's first message after the handshake, and whether the caller is a shard.

        Raise WireError if the caller knows neither the job's token nor the shards' token.
        """
        challenge = handshake.new_challenge(self._generation)
        peer.send(challenge)
        answer = await peer.receive()
        verdict = handshake.check_proof(self._token, challenge, answer)
        is_shard = not self._shard_token
        if isinstance(verdict, Refused) and self._shard_token:
            by_shard_token = handshake.check_proof(self._shard_token, challenge, answer)
            if isinstance(by_shard_token, Accepted):
                verdict, is_shard = by_shard_token, True
        if isinstance(verdict, Refused):
            raise WireError(verdict.reason)
        peer.send(verdict)
        peer.max_body = Description.MAX_BYTES
        return await peer.receive(), is_shard
