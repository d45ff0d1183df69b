"""One connection to the coordinator: frames over an asyncio stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import Any

from paceline.serve.wire.frames import PREFIX, MessageDecoder, WireError, decode_prefix, encode
from paceline.serve.wire.messages import Join

log = logging.getLogger(__name__)

MAX_WAITING = 1 << 20  # bytes that a peer may leave unread before it is given up


class AsyncChannel:
    """Somebody at the other end. Nobody waits for a peer to read: what it leaves unread is bounded."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, taken: MessageDecoder) -> None:
        self._reader, self._writer, self._taken = reader, writer, taken
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host = str((writer.get_extra_info("peername") or ["?"])[0])
        self.body = b""  # of the last message that had one
        self._large = 0  # the largest body that was sent, which may still be on its way
        self.most_body = 0  # bytes that one may have; a stranger's may have none

    async def receive(self) -> Any:
        """The next message."""
        head_size, body_size = decode_prefix(await self._reader.readexactly(PREFIX.size))
        message = self._taken.head(await self._reader.readexactly(head_size))
        if body_size:
            if not isinstance(message, Join) or body_size > self.most_body:
                raise WireError(f"A {type(message).__name__} with {body_size} bytes is not taken here.")
            self.body = await self._reader.readexactly(body_size)
        return message

    def send(self, message: Any, body: bytes = b"") -> None:
        """Send without waiting; a peer that does not read is cut off."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_WAITING + self._large:
            log.warning("a peer at %s does not read; its connection is cut", self.host)
            self._writer.transport.abort()
            return
        self._large = max(self._large, len(body))
        self._writer.write(encode(message, len(body)) + body)

    @property
    def is_open(self) -> bool:
        return not self._writer.is_closing()

    def close(self) -> None:
        """Hang up, when what was sent is out."""
        self._writer.close()

    async def closed(self) -> None:
        """Until that is done."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def abort(self) -> None:
        """Hang up at once."""
        self._writer.transport.abort()
