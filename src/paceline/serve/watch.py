"""Watching a job from outside: the coordinator streams its trace events to whoever subscribes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from paceline.observe.events import Event, from_line
from paceline.serve import greeting
from paceline.serve.door import Door
from paceline.serve.messages import Accepted, Challenge, Happened, Refused, Subscribe
from paceline.serve.peer import Peer
from paceline.serve.wire import Reader, WireError

HEARD = Reader(Challenge | Accepted | Refused | Happened)


async def watch(door: Door) -> AsyncIterator[Event]:
    """Everything that happens from now on, first a Began. It ends when the server does."""
    context = door.tls.calling() if door.tls else None
    reader, writer = await asyncio.open_connection(door.host, door.port, ssl=context)
    peer = Peer(reader, writer, HEARD)
    try:
        asked = await peer.receive()
        if not isinstance(asked, Challenge):
            raise WireError("The server did not greet as paceline does.")
        answer = greeting.proof(door.token, asked)
        peer.send(answer)
        greeting.verify(door.token, asked, answer, await peer.receive())
        peer.send(Subscribe())
        while True:
            message = await peer.receive()
            if isinstance(message, Refused):
                raise WireError(message.reason)
            yield from_line(message.line)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return
    finally:
        peer.close()
        await peer.closed()
