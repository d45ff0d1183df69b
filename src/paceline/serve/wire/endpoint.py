"""Open connections as the caller: the socket, TLS if the job uses it, and the handshake, within a time limit."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.serve.wire import handshake
from paceline.serve.wire.frames import Channel, ConnectionClosed, MessageDecoder
from paceline.serve.wire.tls import Tls, TlsRefused, TlsSocket, describe, is_lasting

T = TypeVar("T")
SECONDS = 10.0  # for the TCP connection, and again for the handshake


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach an address."""
    return host in ("localhost", "::1") or host.startswith("127.")


@dataclass(frozen=True)
class Endpoint:
    """The address of a coordinator or a shard, and the secrets that a caller needs there."""

    host: str
    port: int
    token: bytes = b""
    tls: Tls | None = None

    def at(self, host: str, port: int, certificate: bytes = b"") -> Endpoint:
        """Return another endpoint of the same job. An empty host means this endpoint's host.

        certificate: the digest of the certificate there, if the coordinator has told it.
        """
        tls = self.tls.pinning(certificate) if self.tls else None
        return replace(self, host=host or self.host, port=port, tls=tls)

    def open(self, decoder: MessageDecoder) -> tuple[Channel, str]:
        """Connect and shake hands. Return the channel and the server's generation.

        Raise TlsRefused if one side does not accept the certificate of the other.
        """
        sock = socket.create_connection((self.host, self.port), SECONDS)
        try:
            channel, certificate = _channel(sock, decoder, self.tls)
            # With TLS 1.3, a server's alert about the caller's certificate comes after the caller's own handshake.
            return channel, _within_limit(channel, lambda: handshake.call(channel, self.token, certificate))
        except ssl.SSLError as error:
            raise self.tls_error(error) from None
        except ConnectionClosed as error:
            hint = "if it has a CA, give --tls-cert and --tls-key" if self.tls else "if it uses TLS, give --tls"
            raise ConnectionClosed(f"{error} The server did so during the handshake; {hint}.") from None

    def tls_error(self, error: ssl.SSLError) -> ConnectionError:
        """Return the error to raise for a TLS connection that has failed."""
        if is_lasting(error):
            return TlsRefused(f"The TLS handshake with {self.host}:{self.port} failed: {describe(error)}.")
        return ConnectionError(f"The TLS connection to {self.host}:{self.port} was lost.")


def _channel(sock: socket.socket, decoder: MessageDecoder, tls: Tls | None) -> tuple[Channel, bytes]:
    """Wrap a socket in a channel. Return the channel, and over TLS the digest of the server's certificate."""
    if tls is None:
        return Channel(sock, decoder), b""
    try:
        over_tls = TlsSocket(tls.calling().wrap_socket(sock))
    except BaseException:
        sock.close()
        raise
    try:
        return Channel(over_tls, decoder), tls.checked(over_tls.peer_certificate())
    except BaseException:
        over_tls.close()
        raise


def _within_limit(channel: Channel, shake_hands: Callable[[], T]) -> T:
    """Run the handshake within the time limit. Close the channel if it fails."""
    try:
        with channel.within(SECONDS):
            return shake_hands()
    except BaseException:
        channel.close()
        raise
