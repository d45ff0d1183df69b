"""A job from outside: what happens, for whoever subscribes, and whom its policy leaves out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from paceline.observe.trace import Event, from_line
from paceline.serve.wire import handshake
from paceline.serve.wire.async_channel import Peer
from paceline.serve.wire.endpoint import Door
from paceline.serve.wire.frames import Reader, WireError
from paceline.serve.wire.messages import Accepted, Challenge, Happened, Inspect, Inspected, Refused, Subscribe

HEARD = Reader(Challenge | Accepted | Refused | Happened | Inspected)


async def watch(door: Door) -> AsyncIterator[Event]:
    """Everything that happens from now on, first a Began. It ends when the server does."""
    async with _called(door) as peer:
        peer.send(Subscribe())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            while True:
                yield from_line(_heeded(await peer.receive()).line)


async def inspect(door: Door, pardon: Sequence[int] = (), everyone: bool = False) -> Inspected:
    """Whom the policy leaves out, once it has taken these back, or everyone."""
    async with _called(door) as peer:
        peer.send(Inspect(tuple(pardon), everyone))
        answer = _heeded(await peer.receive())
        if not isinstance(answer, Inspected):
            raise WireError(f"The server answered with {type(answer).__name__} instead of Inspected.")
        return answer


@contextlib.asynccontextmanager
async def _called(door: Door) -> AsyncIterator[Peer]:
    """A connection on which both have shown that they know the token."""
    context = door.tls.calling() if door.tls else None
    reader, writer = await asyncio.open_connection(door.host, door.port, ssl=context)
    peer = Peer(reader, writer, HEARD)
    try:
        asked = await peer.receive()
        if not isinstance(asked, Challenge):
            raise WireError("The server did not greet as paceline does.")
        answer = handshake.proof(door.token, asked)
        peer.send(answer)
        handshake.verify(door.token, asked, answer, await peer.receive())
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
