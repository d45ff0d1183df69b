"""TLS, where it is asked for: the server shows a certificate, and if the server was given a CA, so does every peer.

Who may take part is decided by the job's own CA and token, so a certificate need not name the host it is used on.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PIECE = 1 << 18  # bytes encrypted at a time; in between the other direction gets its chance
CERT, KEY, CA = "PACELINE_TLS_CERT", "PACELINE_TLS_KEY", "PACELINE_TLS_CA"


@dataclass(frozen=True)
class Tls:
    """Files in PEM format. A server needs `cert` and `key`; a peer needs `ca`, and where the server asks, its own."""

    cert: str | None = None
    key: str | None = None
    ca: str | None = None

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Tls | None:
        """What the variables PACELINE_TLS_CERT, _KEY and _CA say; None if they say nothing."""
        known = os.environ if variables is None else variables
        tls = cls(known.get(CERT), known.get(KEY), known.get(CA))
        return tls if tls != cls() else None

    def as_environment(self) -> dict[str, str]:
        """The same, for a process that is started."""
        named = {CERT: self.cert, KEY: self.key, CA: self.ca}
        return {name: os.path.abspath(path) for name, path in named.items() if path}

    def listening(self) -> ssl.SSLContext:
        """For whoever listens."""
        if not self.cert or not self.key:
            raise ValueError("TLS needs a certificate and its key: give --tls-cert and --tls-key.")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._load(context)
        if self.ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def calling(self) -> ssl.SSLContext:
        """For whoever calls."""
        if not self.ca:
            raise ValueError("TLS needs the CA that signed the server's certificate: give --tls-ca.")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the CA is the job's own
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
            if self.ca:
                context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(path for path in (self.cert, self.key, self.ca) if path)
            raise ValueError(f"The TLS files {files} cannot be used: {error}.") from None


class TlsSocket:
    """As a blocking socket, but one thread may send while another receives, which OpenSSL itself does not bear."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, listening: bool) -> None:
        """Shakes hands, within the socket's timeout."""
        self._ssl = context.wrap_socket(sock, server_side=listening)
        self._timeout = self._ssl.gettimeout()
        self._ssl.setblocking(False)
        self._lock = threading.Lock()

    def recv_into(self, place: memoryview, count: int = 0) -> int:
        return int(self._patiently(lambda: self._ssl.recv_into(place, count or len(place))))

    def send(self, data: memoryview) -> int:
        """Send some of it, without waiting: BlockingIOError if none can be sent now."""
        with self._lock:
            try:
                return self._ssl.send(data[:PIECE])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def sendall(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while len(rest):
            piece = rest[:PIECE]  # the same one again after a wait: OpenSSL insists on it
            rest = rest[self._patiently(lambda piece=piece: self._ssl.send(piece)) :]

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setblocking(self, blocking: bool) -> None:
        """It blocks in `recv_into` and `sendall`, and never in `send`."""

    def setsockopt(self, *option: Any) -> None:
        self._ssl.setsockopt(*option)

    def getsockopt(self, *option: Any) -> Any:
        return self._ssl.getsockopt(*option)

    def fileno(self) -> int:
        return self._ssl.fileno()

    def shutdown(self, how: int) -> None:
        # Not SSLSocket's own, which forgets its TLS state and would go on in the clear.
        socket.socket.shutdown(self._ssl, how)

    def close(self) -> None:
        self._ssl.close()

    def _patiently(self, do: Any) -> Any:
        while True:
            with self._lock:
                try:
                    return do()
                except ssl.SSLWantReadError:
                    wanted = select.POLLIN
                except ssl.SSLWantWriteError:
                    wanted = select.POLLOUT
                except ssl.SSLEOFError:
                    return 0
            poll = select.poll()
            with contextlib.suppress(ValueError):  # closed by another thread: the next try says so
                poll.register(self._ssl, wanted)
                if not poll.poll(None if self._timeout is None else self._timeout * 1000):
                    raise TimeoutError("timed out")
