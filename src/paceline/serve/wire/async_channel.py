"""A connection to the coordinator: frames over an asyncio stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

from paceline.serve.wire.frames import PREFIX, MessageDecoder, WireError, decode_prefix, encode
from paceline.serve.wire.messages import Join

log = logging.getLogger(__name__)

MAX_UNSENT = 1 << 20  # bytes that may wait for a peer to read them; a peer that leaves more is cut off


class AsyncChannel:
    """A connection to one peer. `send` never waits; a peer that does not read is cut off."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: MessageDecoder) -> None:
        self._reader, self._writer, self._decoder = reader, writer, decoder
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host = str((writer.get_extra_info("peername") or ["?"])[0])
        self.body = b""  # of the last message that had one
        self._largest_body = 0  # the largest body that was sent; it may still be in the write buffer
        self.max_body = 0  # bytes that a body may have; none before the handshake

    async def receive(self) -> Any:
        """Return the next message. If it has a body, `body` holds it."""
        head_size, body_size = decode_prefix(await self._reader.readexactly(PREFIX.size))
        message = self._decoder.head(await self._reader.readexactly(head_size))
        if body_size:
            if not isinstance(message, Join) or body_size > self.max_body:
                raise WireError(f"A {type(message).__name__} with a body of {body_size} bytes is not accepted here.")
            self.body = await self._reader.readexactly(body_size)
        return message

    def send(self, message: Any, body: bytes = b"") -> None:
        """Send a message without waiting. Cut off a peer that does not read."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT + self._largest_body:
            log.warning("the peer at %s does not read; its connection is cut", self.host)
            self._writer.transport.abort()
            return
        self._largest_body = max(self._largest_body, len(body))
        self._writer.write(encode(message, len(body)) + body)

    def close(self) -> None:
        """Close the connection after everything that was sent is out."""
        self._writer.close()

    async def closed(self) -> None:
        """Wait until `close` has taken effect."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def abort(self) -> None:
        """Close the connection at once, and discard what is not out yet."""
        self._writer.transport.abort()
