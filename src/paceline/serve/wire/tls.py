"""Optional TLS: the server shows a certificate. If the server was given a CA, every peer must show one too.

The job's own CA and token decide who may take part. So a certificate need not name the host that uses it.
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

ENCRYPT_CHUNK = 1 << 18  # bytes encrypted at a time; between two chunks the other direction gets the lock
CERT, KEY, CA = "PACELINE_TLS_CERT", "PACELINE_TLS_KEY", "PACELINE_TLS_CA"


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files. A server needs `cert` and `key`. A peer needs `ca`, and all three for mutual TLS."""

    cert: str | None = None
    key: str | None = None
    ca: str | None = None

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Tls | None:
        """Return the files that PACELINE_TLS_CERT, _KEY and _CA name, or None if none of them is set."""
        known = os.environ if variables is None else variables
        tls = cls(known.get(CERT), known.get(KEY), known.get(CA))
        return tls if tls != cls() else None

    def as_environment(self) -> dict[str, str]:
        """Return the environment variables that give a child process the same files."""
        named = {CERT: self.cert, KEY: self.key, CA: self.ca}
        return {name: os.path.abspath(path) for name, path in named.items() if path}

    def listening(self) -> ssl.SSLContext:
        """Return an SSL context for the listening side."""
        if not self.cert or not self.key:
            raise ValueError("TLS needs a certificate and its key: give --tls-cert and --tls-key.")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._load(context)
        if self.ca:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def calling(self) -> ssl.SSLContext:
        """Return an SSL context for the calling side."""
        if not self.ca:
            raise ValueError("TLS needs the CA that signed the server's certificate: give --tls-ca.")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the job's own CA decides, not the name
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
    """A blocking TLS socket that one thread may send on while another receives. OpenSSL alone does not allow that."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, listening: bool) -> None:
        """Run the TLS handshake, within the socket's timeout."""
        self._ssl = context.wrap_socket(sock, server_side=listening)
        self._timeout = self._ssl.gettimeout()
        self._ssl.setblocking(False)
        self._lock = threading.Lock()

    def recv_into(self, buffer: memoryview, count: int = 0) -> int:
        return int(self._retry_when_ready(lambda: self._ssl.recv_into(buffer, count or len(buffer))))

    def send(self, data: memoryview) -> int:
        """Send a part of the data without waiting. Raise BlockingIOError if nothing can be sent now."""
        with self._lock:
            try:
                return self._ssl.send(data[:ENCRYPT_CHUNK])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def sendall(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while len(rest):
            chunk = rest[:ENCRYPT_CHUNK]  # OpenSSL requires the same chunk again after a wait
            rest = rest[self._retry_when_ready(lambda chunk=chunk: self._ssl.send(chunk)) :]

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setblocking(self, blocking: bool) -> None:
        """Do nothing: `recv_into` and `sendall` always block, and `send` never does."""

    def setsockopt(self, *option: Any) -> None:
        self._ssl.setsockopt(*option)

    def getsockopt(self, *option: Any) -> Any:
        return self._ssl.getsockopt(*option)

    def fileno(self) -> int:
        return self._ssl.fileno()

    def shutdown(self, how: int) -> None:
        # SSLSocket.shutdown discards the TLS state, and would continue in the clear.
        socket.socket.shutdown(self._ssl, how)

    def close(self) -> None:
        self._ssl.close()

    def _retry_when_ready(self, do: Any) -> Any:
        """Return do(). Where it needs the socket to be readable or writable, wait without the lock and retry."""
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
            with contextlib.suppress(ValueError):  # closed by another thread: the next attempt raises
                poll.register(self._ssl, wanted)
                if not poll.poll(None if self._timeout is None else self._timeout * 1000):
                    raise TimeoutError("timed out")
