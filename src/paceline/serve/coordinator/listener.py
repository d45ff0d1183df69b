"""The coordinator's listening socket. It shakes hands with callers, and passes on those that know the job's token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from paceline.model.description import Description
from paceline.serve.wire import handshake
from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.doorstep import Doorstep, listen, readable
from paceline.serve.wire.frames import MessageDecoder, WireError
from paceline.serve.wire.messages import (
    BackupUnreachable,
    CheckpointLoaded,
    EndVisit,
    FinishTraining,
    GradientReady,
    GradientStarted,
    Heartbeat,
    InitialWeightsReceived,
    InspectExclusions,
    Join,
    Leave,
    OfferWeights,
    PartSaved,
    PeerRejected,
    Proof,
    Refused,
    Register,
    ReportMetric,
    RequestSamples,
    Resume,
    ShardFailed,
    ShardHeartbeat,
    Subscribe,
    UpdateHeld,
    UpdateProducts,
    UpdateReceived,
)
from paceline.serve.wire.strangers import ANSWER_SECONDS, HANDSHAKE_SECONDS
from paceline.serve.wire.tls import shown_certificate
from paceline.serve.wire.tokens import Role

log = logging.getLogger(__name__)

FROM_WORKER = (
    Proof
    | Join
    | Resume
    | OfferWeights
    | RequestSamples
    | GradientStarted
    | GradientReady
    | EndVisit
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
    | UpdateHeld
    | UpdateProducts
    | PartSaved
    | ShardFailed
    | PeerRejected
    | BackupUnreachable
    | ShardHeartbeat
)
FROM_ANY_PEER = MessageDecoder(FROM_WORKER | FROM_SHARD | Subscribe | InspectExclusions)
FIRST_MESSAGE_SECONDS = 10.0  # for the first message of a peer that knows a token; a Join has a long body
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

        shard_token: the token of the server's own shards. If it is empty, a shard's token comes from the job's.
        """
        self._generation, self._token, self._shard_token, self._tls = generation, token, shard_token, tls
        self._serve = serve
        self.faults = 0  # peers that were refused
        self._connections: dict[asyncio.Task[None], AsyncChannel] = {}  # every open connection, by its task
        self._sockets: list[socket.socket] = []
        self._accepting: asyncio.Task[None] | None = None
        self._closing = False

    async def listen(self, host: str, port: int) -> int:
        """Begin to listen. Return the port."""
        self._sockets = await asyncio.to_thread(listen, host, port)
        self._accepting = asyncio.create_task(Doorstep(self._sockets, self._handle_connection).run())
        return int(self._sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Accept no more connections."""
        self._closing = True
        if self._accepting:
            self._accepting.cancel()

    async def hang_up(self) -> None:
        """Close every connection after its last messages are out. Cut those that take too long."""
        if self._accepting:
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
        for sock in self._sockets:  # if the task was cancelled before it began, it has not closed them
            sock.close()
        for peer in self._connections.values():
            peer.close()
        if self._connections:
            _, slow = await asyncio.wait(self._connections, timeout=CLOSE_SECONDS)
            for task in slow:
                self._connections[task].abort()
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

    async def _open(self, sock: socket.socket) -> AsyncChannel:
        """Return a channel over an accepted socket, over TLS if the job uses it."""
        if self._tls:  # the caller speaks first; until then, TLS would only take memory
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await readable(sock)
            except BaseException:
                sock.close()
                raise
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(  # from here on, the transport closes the socket
            lambda: protocol, sock, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_SECONDS if self._tls else None
        )
        return AsyncChannel(reader, asyncio.StreamWriter(transport, protocol, reader, loop), FROM_ANY_PEER)

    async def _handle_connection(self, sock: socket.socket, trust: Callable[[], None]) -> None:
        """Serve one connection until it ends. `trust` is called when the peer has proved that it knows a token."""
        try:
            peer = await self._open(sock)
        except OSError as error:
            log.info("a caller did not pass the TLS handshake: %s", error)
            return
        task = asyncio.current_task()
        assert task is not None
        if self._closing:
            peer.abort()
            return
        self._connections[task] = peer
        try:
            role = await self._shake_hands(peer)
            trust()
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                first = await peer.receive()
            if not _allows(role, first):
                kind = type(first).__name__
                raise WireError(f"A token for the role {role} does not allow {kind}; use another token.")
            await self._serve(peer, first, role == "shard" or not (role or self._shard_token))
        except asyncio.CancelledError:
            peer.abort()  # the server is closing, or another stranger takes the place of this one
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

    async def _shake_hands(self, peer: AsyncChannel) -> Role:
        """Return the role of a caller's token. Raise WireError if the caller knows no token of the job."""
        certificate = shown_certificate(self._tls)
        challenge = handshake.new_challenge(self._generation)
        peer.send(challenge)
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await peer.receive()
        role: Role = answer.role if isinstance(answer, Proof) else ""
        secret = self._shard_token if role == "shard" and self._shard_token else self._token
        verdict = handshake.check_proof(secret, challenge, answer, certificate)
        if isinstance(verdict, Refused):
            known = secret != self._token and handshake.check_proof(self._token, challenge, answer, certificate)
            if known and not isinstance(known, Refused):
                raise WireError("This server starts its own shards; give it --shards-join if they are to join it.")
            raise WireError(verdict.reason)
        peer.send(verdict)
        peer.max_body = Description.MAX_BYTES
        return role


def _allows(role: Role, first: Any) -> bool:
    """Return whether a token of this role allows a connection that begins with this message."""
    match role:
        case "worker":
            return isinstance(first, Join | Resume)
        case "shard":
            return isinstance(first, Register)
        case "watch":
            return isinstance(first, Subscribe) or first == InspectExclusions()
        case "":
            return True
