"""The coordinator's listening socket: it greets callers, and hands those on that know the job's token."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from paceline.model.description import Description
from paceline.serve.wire import handshake
from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.endpoint import CALLERS
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
HEARD_HERE = MessageDecoder(FROM_WORKER | FROM_SHARD | Subscribe | InspectExclusions)
GREETING_SECONDS = 10.0
HANGING_UP = 2.0  # seconds for the last words to get out


class CoordinatorListener:
    """Meets every caller in a task of its own."""

    def __init__(
        self,
        generation: str,
        token: bytes,
        shard_token: bytes,
        tls: ssl.SSLContext | None,
        serve: Callable[[AsyncChannel, Any, bool], Awaitable[None]],
    ) -> None:
        """serve(peer, first, is_shard): talks to a caller, from its first message on. It may raise WireError.

        shard_token: known to the server's own shards alone; empty: whoever knows the job's token may be one.
        """
        self._generation, self._token, self._shard_token, self._tls = generation, token, shard_token, tls
        self._serve = serve
        self.faults = 0  # peers that were turned away
        self._meetings: dict[asyncio.Task[None], AsyncChannel] = {}  # every connection there is
        self._server: asyncio.Server | None = None
        self._closing = False

    async def listen(self, host: str, port: int) -> int:
        """Begin to listen; the port."""
        within = GREETING_SECONDS if self._tls else None
        self._server = await asyncio.start_server(
            self._meet, host, port, backlog=CALLERS, ssl=self._tls, ssl_handshake_timeout=within
        )
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Meet nobody any more."""
        self._closing = True
        if self._server:
            self._server.close()

    async def hang_up(self) -> None:
        """Close every connection, once the last words are out."""
        for peer in self._meetings.values():
            peer.close()
        if self._meetings:
            _, slow = await asyncio.wait(self._meetings, timeout=HANGING_UP)
            for meeting in slow:
                self._meetings[meeting].abort()
                meeting.cancel()
            await asyncio.gather(*slow, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = AsyncChannel(reader, writer, HEARD_HERE)
        meeting = asyncio.current_task()
        assert meeting is not None
        if self._closing:
            peer.abort()
            return
        self._meetings[meeting] = peer
        try:
            first, is_shard = await asyncio.wait_for(self._greet(peer), GREETING_SECONDS)
            await self._serve(peer, first, is_shard)
        except asyncio.CancelledError:
            pass  # the server is closing
        except (asyncio.IncompleteReadError, TimeoutError, OSError) as error:
            log.info("a connection ended: %s", error)
            if isinstance(error, WireError):
                self.faults += 1
                peer.send(Refused(str(error)))
        except Exception as error:  # a caller must not be able to end a generation, whatever was overlooked
            log.error("a caller made the coordinator stumble", exc_info=error)
        finally:
            peer.close()
            await peer.closed()
            del self._meetings[meeting]

    async def _greet(self, peer: AsyncChannel) -> tuple[Any, bool]:
        """A caller's first message, and whether it is one of our shards. Strangers do not get past this."""
        asked = handshake.challenge(self._generation)
        peer.send(asked)
        answer = await peer.receive()
        own, verdict = self._shard_token, handshake.judge(self._token, asked, answer)
        is_shard = not own
        if own and isinstance(verdict, Refused) and isinstance(by_own := handshake.judge(own, asked, answer), Accepted):
            verdict, is_shard = by_own, True
        if isinstance(verdict, Refused):
            raise WireError(verdict.reason)
        peer.send(verdict)
        peer.most_body = Description.MAX_BYTES
        return await peer.receive(), is_shard
