"""How a connection is opened: the socket, TLS where it is asked for, and the greeting, within a time."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.serve.wire import handshake
from paceline.serve.wire.frames import Channel, MessageDecoder
from paceline.serve.wire.tls import Tls, TlsSocket

T = TypeVar("T")
SECONDS = 10.0  # to connect and to greet
CALLERS = 4096  # that may wait to be let in, if the system allows so many: who finds no place there waits for seconds


@dataclass(frozen=True)
class Endpoint:
    """Where to call, and how to prove oneself there."""

    host: str
    port: int
    token: bytes = b""
    tls: Tls | None = None

    def at(self, host: str, port: int) -> Endpoint:
        """Another door of the same job; an empty host is this one's."""
        return replace(self, host=host or self.host, port=port)

    def open(self, reader: MessageDecoder) -> tuple[Channel, str]:
        """A channel that has been greeted, and the server's generation."""
        sock = socket.create_connection((self.host, self.port), SECONDS)
        try:
            channel = _channel(sock, reader, self.tls.calling() if self.tls else None, listening=False)
        except ssl.SSLError as error:
            raise ConnectionError(f"{self.host}:{self.port} was not met over TLS: {error.reason}.") from None
        return channel, _greeted(channel, lambda: handshake.call(channel, self.token))


def answer(
    sock: socket.socket, reader: MessageDecoder, token: bytes, generation: str, context: ssl.SSLContext | None
) -> Channel:
    """The listener's side of `Door.open`."""
    sock.settimeout(SECONDS)
    channel = _channel(sock, reader, context, listening=True)
    _greeted(channel, lambda: handshake.listen(channel, token, generation))
    return channel


def _channel(
    sock: socket.socket, reader: MessageDecoder, context: ssl.SSLContext | None, *, listening: bool
) -> Channel:
    try:
        return Channel(TlsSocket(sock, context, listening=listening) if context else sock, reader)
    except BaseException:
        sock.close()
        raise


def _greeted(channel: Channel, greet: Callable[[], T]) -> T:
    try:
        with channel.within(SECONDS):
            return greet()
    except BaseException:
        channel.close()
        raise
