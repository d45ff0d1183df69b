"""TLS: the server shows a certificate. A peer knows its fingerprint, or the CA that has signed it.

The job's own CA and token decide who may take part. So a certificate need not name the host that uses it. If the server
was given a CA, every peer must show a certificate too.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.serve.wire import certificates
from paceline.serve.wire.frames import WireError

ENCRYPT_CHUNK = 1 << 18  # bytes encrypted at a time; between two chunks the other direction gets the lock
CERT, KEY, CA = "PACELINE_TLS_CERT", "PACELINE_TLS_KEY", "PACELINE_TLS_CA"
FINGERPRINT = "PACELINE_TLS_FINGERPRINT"
NEEDS_CERTIFICATE = "TLS needs a certificate and its key: give --tls-cert and --tls-key, or --tls auto."


class TlsRefused(WireError):
    """One side does not accept the certificate of the other. Trying again would not help."""


class ListeningContext(ssl.SSLContext):
    """An SSL context for the listening side, and the digest of the certificate that it shows."""

    certificate = b""


def shown_certificate(context: ssl.SSLContext | None) -> bytes:
    """Return the digest of the certificate that a listening context shows; an empty one without TLS."""
    return context.certificate if isinstance(context, ListeningContext) else b""


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files, and the fingerprint of the server's certificate.

    A server needs `cert` and `key`. A peer needs `fingerprint` or `ca`, and `ca`, `cert` and `key` for mutual TLS.
    """

    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    fingerprint: str | None = None

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Tls | None:
        """Return what PACELINE_TLS_CERT, _KEY, _CA and _FINGERPRINT say, or None if none of them is set."""
        known = os.environ if variables is None else variables
        tls = cls(known.get(CERT), known.get(KEY), known.get(CA), known.get(FINGERPRINT))
        return tls if tls != cls() else None

    def as_environment(self) -> dict[str, str]:
        """Return the environment variables that give a child process the same files and the same fingerprint."""
        named = {CERT: self.cert, KEY: self.key, CA: self.ca}
        paths = {name: os.path.abspath(path) for name, path in named.items() if path}
        return paths | ({FINGERPRINT: self.fingerprint} if self.fingerprint else {})

    def serving(self) -> Tls:
        """Return these files for a server and its own shards. Without a CA, they know its certificate's fingerprint."""
        if self.ca or self.fingerprint or not self.cert:
            return self
        return replace(self, fingerprint=certificates.fingerprint(certificates.digest_of_file(self.cert)))

    def for_peers(self) -> Tls:
        """Return what the peers of this server need: its fingerprint, or the files that they share with it."""
        return self if self.ca else Tls(fingerprint=self.serving().fingerprint)

    def pinning(self, digest: bytes) -> Tls:
        """Return these files with another fingerprint, if a fingerprint is known."""
        return replace(self, fingerprint=certificates.fingerprint(digest)) if self.fingerprint and digest else self

    def check(self) -> None:
        """Raise ValueError if the fingerprint cannot be one, or if a certificate has expired that a CA vouches for."""
        if self.fingerprint:
            certificates.parse_fingerprint(self.fingerprint)
        if self.ca:  # otherwise a certificate is known by its fingerprint, whatever its dates
            for path in (self.cert, self.ca):
                if path:
                    certificates.check_dates(path)

    def check_serving(self) -> None:
        """Raise ValueError if a server with these files would not be accepted by its own shards."""
        if not self.cert or not self.key:
            raise ValueError(NEEDS_CERTIFICATE)
        self.check()
        context = self.listening()
        if self.ca:
            _shake_hands_alone(self, context)

    def listening(self) -> ListeningContext:
        """Return an SSL context for the listening side.

        A peer that knows only the server's fingerprint, such as a shard beside a worker, makes its own certificate.
        """
        if bool(self.cert) != bool(self.key) or not (self.cert or self.fingerprint):
            raise ValueError(NEEDS_CERTIFICATE)
        context = ListeningContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._load(context)
        if self.ca:
            context.verify_mode = ssl.CERT_REQUIRED
        context.certificate = certificates.digest_of_file(self.cert) if self.cert else certificates.load_new(context)
        return context

    def calling(self) -> ssl.SSLContext:
        """Return an SSL context for the calling side. `checked` must be called after its handshake."""
        if not self.ca and not self.fingerprint:
            raise ValueError(
                "TLS needs the CA that has signed the server's certificate, or its fingerprint: "
                "give --tls-ca, or --tls sha256:…."
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the job's own CA or the fingerprint decides, not the name
        if self.ca:
            self._load(context)
        else:
            context.verify_mode = ssl.CERT_NONE
        return context

    def checked(self, shown: bytes | None) -> bytes:
        """Return the digest of the certificate that a server has shown, in DER form.

        Raise TlsRefused if it has not the fingerprint. Nothing may be sent before.
        """
        digest = certificates.digest_of(shown or b"")
        if self.fingerprint and not hmac.compare_digest(digest, certificates.parse_fingerprint(self.fingerprint)):
            raise TlsRefused(
                f"The server shows a certificate with the fingerprint {certificates.fingerprint(digest)}, and not "
                f"{self.fingerprint}: give the fingerprint that the server has printed, if this is the right server."
            )
        return digest

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
            if self.ca:
                context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(path for path in (self.cert, self.key, self.ca) if path)
            raise ValueError(f"The TLS files {files} cannot be used: {error}.") from None


#: Parts of OpenSSL's reasons for errors that a new attempt would meet again.
_ABOUT_CERTIFICATES, _NO_TLS = ("CERTIFICATE", "UNKNOWN_CA"), ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")


def is_lasting(error: ssl.SSLError) -> bool:
    """Return whether a TLS handshake would fail again: a certificate was refused, or the peer does not speak TLS.

    A connection that was merely lost or damaged during the handshake may work the next time.
    """
    return any(part in (error.reason or "") for part in (*_ABOUT_CERTIFICATES, *_NO_TLS))


def describe(error: ssl.SSLError) -> str:
    """Return why a TLS handshake failed, as the end of a sentence without its full stop."""
    code = error.reason or "the connection was lost"
    reason = code.replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate there is not accepted here ({error.verify_message})"
    if any(part in code for part in _ABOUT_CERTIFICATES):
        return f"the certificate of this process is not accepted there ({reason}); check --tls-cert and --tls-ca"
    if any(part in code for part in _NO_TLS):
        return f"there is no TLS there ({reason}); start the server with TLS, or leave TLS out here"
    return reason


def _shake_hands_alone(tls: Tls, context: ssl.SSLContext) -> None:
    """Shake hands with oneself in memory. Raise ValueError if the certificate is not one that the CA has signed."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = tls.calling().wrap_bio(to_client, to_server)
    try:
        for side in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason
        raise ValueError(
            f"The certificate {tls.cert} cannot be used with the CA {tls.ca} ({why}): give the CA that has signed it."
        ) from None


class TlsSocket:
    """A blocking TLS socket that one thread may send on while another receives. OpenSSL alone does not allow that."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        """sock: has done the TLS handshake."""
        self._ssl = sock
        self._timeout = self._ssl.gettimeout()
        self._ssl.setblocking(False)
        self._lock = threading.Lock()

    def peer_certificate(self) -> bytes | None:
        """Return the certificate that the peer has shown, in DER form, or None if it has shown none."""
        return self._ssl.getpeercert(True)

    def recv_into(self, buffer: memoryview, count: int = 0) -> int:
        try:
            return int(self._retry_when_ready(lambda: self._ssl.recv_into(buffer, count or len(buffer))))
        except ssl.SSLEOFError:  # the peer has closed the connection without the farewell of TLS
            return 0

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
            poll = select.poll()
            with contextlib.suppress(ValueError):  # closed by another thread: the next attempt raises
                poll.register(self._ssl, wanted)
                if not poll.poll(None if self._timeout is None else self._timeout * 1000):
                    raise TimeoutError("timed out")
