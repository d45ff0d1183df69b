"""The handshake with a caller over a non-blocking socket, with TLS if the job uses it.

A shard serves each worker in a thread of its own. A stranger gets no thread: its handshake runs in the event loop that
accepts connections, and the socket changes hands afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from paceline.serve.wire import handshake
from paceline.serve.wire.doorstep import readable, writable
from paceline.serve.wire.frames import (
    PREFIX,
    Channel,
    ConnectionClosed,
    MessageDecoder,
    WireError,
    decode_prefix,
    encode,
)
from paceline.serve.wire.messages import Proof, Refused
from paceline.serve.wire.strangers import ANSWER_SECONDS
from paceline.serve.wire.tls import TlsSocket

T = TypeVar("T")
PROOF = MessageDecoder(Proof)
MAX_PROOF = 256  # bytes; a Proof is two short byte strings


class Caller:
    """A caller in its handshake."""

    def __init__(self, sock: socket.socket) -> None:
        """sock: a non-blocking socket."""
        self._socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def start_tls(self, context: ssl.SSLContext) -> None:
        """Run the TLS handshake, which the caller begins."""
        async with asyncio.timeout(ANSWER_SECONDS):
            await readable(self._socket)
        wrapped = context.wrap_socket(self._socket, server_side=True, do_handshake_on_connect=False)
        self._socket = wrapped
        await self._retry(wrapped.do_handshake)

    async def send(self, message: msgspec.Struct) -> None:
        """Send a message without a body."""
        rest = memoryview(encode(message))
        while len(rest):
            rest = rest[await self._retry(partial(self._socket.send, rest), writable) :]

    async def receive(self) -> Any:
        """Return the caller's Proof. Raise WireError if it sends anything else."""
        head_size, body_size = decode_prefix(await self._read(PREFIX.size))
        if head_size > MAX_PROOF or body_size:
            raise WireError("The peer did not answer the challenge with a valid Proof.")
        return PROOF.head(await self._read(head_size))

    async def shake_hands(self, token: bytes, generation: str, certificate: bytes = b"") -> None:
        """Shake hands as the listener. Raise WireError if the caller does not know the token.

        certificate: the digest of the certificate that the listener has shown, over TLS.
        """
        challenge = handshake.new_challenge(generation)
        await self.send(challenge)
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await self.receive()
        verdict = handshake.check_proof(token, challenge, answer, certificate)
        await self.send(verdict)
        if isinstance(verdict, Refused):
            raise WireError(verdict.reason)

    def channel(self, decoder: MessageDecoder) -> Channel:
        """Return a blocking channel over the same connection. The caller must not be used afterwards."""
        sock = self._socket
        return Channel(TlsSocket(sock) if isinstance(sock, ssl.SSLSocket) else sock, decoder)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    async def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = await self._retry(partial(self._socket.recv, size - len(data)))
            if not part:
                raise ConnectionClosed("The caller has closed the connection.")
            data += part
        return data

    async def _retry(self, do: Callable[[], T], ready: Callable[[socket.socket], Awaitable[None]] = readable) -> T:
        """Return do(), as soon as the socket is ready for it."""
        while True:
            try:
                return do()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wanted:
                await (readable if isinstance(wanted, ssl.SSLWantReadError) else writable)(self._socket)
            except BlockingIOError:
                await ready(self._socket)
