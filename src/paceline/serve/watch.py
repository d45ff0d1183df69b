"""A job from outside: what happens, for whoever subscribes, and whom its policy leaves out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from paceline.observe.trace import Event, from_line
from paceline.serve.wire import handshake
from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import MessageDecoder, WireError
from paceline.serve.wire.messages import (
    Accepted,
    Challenge,
    Exclusions,
    InspectExclusions,
    Refused,
    Subscribe,
    TraceLine,
)

HEARD = MessageDecoder(Challenge | Accepted | Refused | TraceLine | Exclusions)


async def watch(endpoint: Endpoint) -> AsyncIterator[Event]:
    """Everything that happens from now on, first a Began. It ends when the server does."""
    async with _called(endpoint) as peer:
        peer.send(Subscribe())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            while True:
                yield from_line(_heeded(await peer.receive()).line)


async def inspect(endpoint: Endpoint, pardon: Sequence[int] = (), everyone: bool = False) -> Exclusions:
    """Whom the policy leaves out, once it has taken these back, or everyone."""
    async with _called(endpoint) as peer:
        peer.send(InspectExclusions(tuple(pardon), everyone))
        answer = _heeded(await peer.receive())
        if not isinstance(answer, Exclusions):
            raise WireError(f"The server answered with {type(answer).__name__} instead of Exclusions.")
        return answer


@contextlib.asynccontextmanager
async def _called(endpoint: Endpoint) -> AsyncIterator[AsyncChannel]:
    """A connection on which both have shown that they know the token."""
    context = endpoint.tls.calling() if endpoint.tls else None
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    peer = AsyncChannel(reader, writer, HEARD)
    try:
        asked = await peer.receive()
        if not isinstance(asked, Challenge):
            raise WireError("The server did not greet as paceline does.")
        answer = handshake.proof(endpoint.token, asked)
        peer.send(answer)
        handshake.verify(endpoint.token, asked, answer, await peer.receive())
        yield peer
    except asyncio.IncompleteReadError:
        raise WireError("The server hung up.") from None
    finally:
        peer.close()
        await peer.closed()


def _heeded(message: Any) -> Any:
    if isinstance(message, Refused):
        raise WireError(message.reason)
    return message
