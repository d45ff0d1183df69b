"""How a connection is opened: the socket, TLS where it is asked for, and the greeting, within a time."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, replace

from paceline.serve import greeting
from paceline.serve.tls import Tls, TlsSocket
from paceline.serve.wire import Channel, Reader

SECONDS = 10.0  # to connect and to greet


@dataclass(frozen=True)
class Door:
    """Where to call, and how to prove oneself there."""

    host: str
    port: int
    token: bytes = b""
    tls: Tls | None = None

    def at(self, host: str, port: int) -> Door:
        """Another door of the same job; an empty host is this one's."""
        return replace(self, host=host or self.host, port=port)

    def open(self, reader: Reader) -> tuple[Channel, str]:
        """A channel that has been greeted, and the server's generation."""
        sock = socket.create_connection((self.host, self.port), SECONDS)
        try:
            try:
                channel = Channel(TlsSocket(sock, self.tls.calling(), listening=False) if self.tls else sock, reader)
            except ssl.SSLError as error:
                raise ConnectionError(f"{self.host}:{self.port} was not met over TLS: {error.reason}.") from None
            with channel.within(SECONDS):
                return channel, greeting.call(channel, self.token)
        except BaseException:
            sock.close()
            raise


def answer(
    sock: socket.socket, reader: Reader, token: bytes, generation: str, context: ssl.SSLContext | None
) -> Channel:
    """The listener's side of `Door.open`."""
    sock.settimeout(SECONDS)
    channel = Channel(TlsSocket(sock, context, listening=True) if context else sock, reader)
    with channel.within(SECONDS):
        greeting.listen(channel, token, generation)
    return channel
