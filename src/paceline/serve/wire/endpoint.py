"""Open connections: the socket, TLS if the job uses it, and the handshake, within a time limit."""

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
SECONDS = 10.0  # for the TCP connection, and again for the handshake
#: How many callers may wait in the listen queue, if the system allows as many. A caller that finds the queue full waits
#: for seconds until TCP tries again.
BACKLOG = 4096


@dataclass(frozen=True)
class Endpoint:
    """The address of a coordinator or a shard, and the secrets that a caller needs there."""

    host: str
    port: int
    token: bytes = b""
    tls: Tls | None = None

    def at(self, host: str, port: int) -> Endpoint:
        """Return another endpoint of the same job. An empty host means this endpoint's host."""
        return replace(self, host=host or self.host, port=port)

    def open(self, decoder: MessageDecoder) -> tuple[Channel, str]:
        """Connect and shake hands. Return the channel and the server's generation."""
        sock = socket.create_connection((self.host, self.port), SECONDS)
        try:
            channel = _channel(sock, decoder, self.tls.calling() if self.tls else None, listening=False)
        except ssl.SSLError as error:
            raise ConnectionError(f"The TLS handshake with {self.host}:{self.port} failed: {error.reason}.") from None
        return channel, _within_limit(channel, lambda: handshake.call(channel, self.token))


def answer(
    sock: socket.socket, decoder: MessageDecoder, token: bytes, generation: str, context: ssl.SSLContext | None
) -> Channel:
    """Shake hands with a caller: the listener's side of `Endpoint.open`."""
    sock.settimeout(SECONDS)
    channel = _channel(sock, decoder, context, listening=True)
    _within_limit(channel, lambda: handshake.listen(channel, token, generation))
    return channel


def _channel(
    sock: socket.socket, decoder: MessageDecoder, context: ssl.SSLContext | None, *, listening: bool
) -> Channel:
    """Wrap a socket in a channel, over TLS if there is a context. Close the socket if that fails."""
    try:
        return Channel(TlsSocket(sock, context, listening=listening) if context else sock, decoder)
    except BaseException:
        sock.close()
        raise


def _within_limit(channel: Channel, shake_hands: Callable[[], T]) -> T:
    """Run the handshake within the time limit. Close the channel if it fails."""
    try:
        with channel.within(SECONDS):
            return shake_hands()
    except BaseException:
        channel.close()
        raise
