"""Watch a job from outside: subscribe to its trace events, and inspect which workers its policy leaves out."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from paceline.observe.trace import Event
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
    TraceEvents,
)
from paceline.serve.wire.packed_events import unpack
from paceline.serve.wire.tokens import token_for

FROM_COORDINATOR = MessageDecoder(Challenge | Accepted | Refused | TraceEvents | Exclusions)


async def watch(endpoint: Endpoint) -> AsyncIterator[Event]:
    """Yield every trace event from now on, a Began first. End when the server does."""
    async with _connect(replace(endpoint, token=token_for("watch", endpoint.token))) as peer:
        peer.send(Subscribe())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            while True:
                for packed in _raise_if_refused(await peer.receive()).events:
                    yield unpack(packed)


async def inspect(endpoint: Endpoint, pardon: Sequence[int] = (), everyone: bool = False) -> Exclusions:
    """Readmit the workers in `pardon`, or everyone. Return the workers that the policy still leaves out.

    Raise ValueError if workers are to be readmitted, and the endpoint's token is not the job's own.
    """
    token = token_for("" if pardon or everyone else "watch", endpoint.token)
    async with _connect(replace(endpoint, token=token)) as peer:
        peer.send(InspectExclusions(tuple(pardon), everyone))
        answer = _raise_if_refused(await peer.receive())
        if not isinstance(answer, Exclusions):
            raise WireError(f"The server answered with {type(answer).__name__} instead of Exclusions.")
        return answer


@contextlib.asynccontextmanager
async def _connect(endpoint: Endpoint) -> AsyncIterator[AsyncChannel]:
    """Connect and shake hands. Yield the channel, and close it at the end."""
    context = endpoint.tls.calling() if endpoint.tls else None
    try:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    except ssl.SSLError as error:
        raise endpoint.tls_error(error) from None
    peer = AsyncChannel(reader, writer, FROM_COORDINATOR)
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(True) if context else None
        certificate = endpoint.tls.checked(shown) if endpoint.tls else b""
        challenge = await peer.receive()
        if not isinstance(challenge, Challenge):
            raise WireError("The server did not begin with a Challenge.")
        answer = handshake.proof(endpoint.token, challenge, certificate)
        peer.send(answer)
        handshake.verify(endpoint.token, challenge, answer, await peer.receive(), certificate)
        yield peer
    except asyncio.IncompleteReadError:
        raise WireError("The server closed the connection.") from None
    except ssl.SSLError as error:
        raise endpoint.tls_error(error) from None
    finally:
        peer.close()
        await peer.closed()


def _raise_if_refused(message: Any) -> Any:
    """Return a message. Raise WireError if it is a Refused."""
    if isinstance(message, Refused):
        raise WireError(message.reason)
    return message
