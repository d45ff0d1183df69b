"""Jobs run over TLS and mutual TLS, and a peer without the right certificate is refused."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
trustme = pytest.importorskip("trustme")

from paceline.policies import make
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.environment import address
from paceline.serve.server import Server
from paceline.serve.watch import inspect
from paceline.serve.wire import certificates, frames
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.tls import Tls, TlsRefused, TlsSocket
from paceline.serve.worker.transfers import FROM_SHARD
from serve.tls_files import authority, expired, issue
from serve.workers import work
from train.jobs import job


def test_a_job_over_mutual_tls(tmp_path: Path) -> None:
    tls = authority(tmp_path, "ours")
    with job("r2sp", shards=2, workers=3, token=b"secret", tls=tls) as running:
        running.work(*[lambda where: work(where, 60, token=b"secret", tls=tls)] * 3)
        running.finish()
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done


@pytest.mark.parametrize(
    ("policy", "visits"), [("r2sp:patience=10000", False), ("bsp:pipeline=true", False), ("r2sp:patience=10000", True)]
)
def test_a_streamed_job_over_mutual_tls(
    policy: str, visits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One connection carries both directions at once, and `drain` works over it, with which a visit ends."""
    drained: list[Any] = []

    def unacknowledged(sock: Any) -> tuple[int, float]:
        drained.append(sock)
        return original(sock)

    original = frames._unacknowledged
    monkeypatch.setattr(frames, "_unacknowledged", unacknowledged)
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 1)
    tls = authority(tmp_path, "ours")
    with job(policy, shards=2, workers=3, token=b"secret", tls=tls, streamed=True, visits=visits) as running:
        running.work(*[lambda where: work(where, 60, token=b"secret", tls=tls)] * 3)
        running.finish()
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done
        assert running.work(lambda where: work(where, 60, updates=0, token=b"secret", tls=tls)) == [60.0]
    assert bool(drained) == visits
    assert all(isinstance(sock, TlsSocket) for sock in drained)


def test_a_connection_that_is_reset_ends_a_send(tmp_path: Path) -> None:
    """Both threads of a worker use one socket. A send that OpenSSL calls an end of file was repeated for ever."""
    tls = made(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[ssl.SSLSocket] = []

        def accept() -> None:
            accepted.append(tls.listening().wrap_socket(listener.accept()[0], server_side=True))

        answering = threading.Thread(target=accept)
        answering.start()
        ours = TlsSocket(tls.calling().wrap_socket(socket.create_connection(listener.getsockname())))
        answering.join()
    ours.settimeout(5.0)
    (theirs,) = accepted
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    socket.socket.close(theirs)  # a reset, without the farewell of TLS
    reached = threading.Event()

    def send() -> None:
        for _ in range(3):  # the first may end up in a buffer; the last finds nothing but a closed connection
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                ours.sendall(bytes(100_000))
        reached.set()

    threading.Thread(target=send, daemon=True).start()
    assert reached.wait(10.0), "the send never ends"
    with contextlib.closing(ours), pytest.raises(OSError, match=r".+"):
        ours.sendall(bytes(100_000))


def test_a_peer_without_a_certificate_is_refused_before_the_handshake(tmp_path: Path) -> None:
    tls = authority(tmp_path, "ours")
    stranger = Tls(ca=tls.ca)
    with job("asp", tls=tls) as running:
        with pytest.raises(ConnectionError, match="give --tls-cert and --tls-key"):
            running.work(lambda where: work(where, 4, tls=stranger, patience=1.0))
        _, port = running.coordinator.shards.addresses[0]
        with pytest.raises(TlsRefused, match="not accepted there"):
            Endpoint("127.0.0.1", port, tls=stranger).open(FROM_SHARD)


def test_a_server_with_a_certificate_of_another_ca_is_not_trusted(tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    with job("asp", tls=theirs) as running, pytest.raises(TlsRefused, match="not accepted here"):
        running.work(lambda where: work(where, 4, tls=ours, patience=3600.0))


def test_unusable_files_are_named_in_the_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    with pytest.raises(ValueError, match="cannot be used"):
        Tls(str(broken), str(broken)).listening()
    with pytest.raises(ValueError, match="needs a certificate and its key"):
        Tls(ca=str(broken)).listening()
    with pytest.raises(ValueError, match="give --tls-ca"):
        Tls(str(broken), str(broken)).calling()


def test_the_files_survive_a_round_trip_through_the_environment(tmp_path: Path) -> None:
    tls = authority(tmp_path, "ours")
    assert Tls.from_environment(tls.as_environment()) == tls
    assert Tls.from_environment({}) is None


# A certificate that is refused will not become good. No test below waits for the patience of its worker.


def made(folder: Path, name: str = "own") -> Tls:
    """Return a certificate that a job has made, as its server uses it."""
    path = folder / f"{name}.pem"
    certificates.make(path)
    return Tls(str(path), str(path)).serving()


def test_a_worker_gives_up_at_once_if_the_servers_certificate_has_expired(tmp_path: Path) -> None:
    """The server was started when the certificate was good, so it does not notice."""
    ca = trustme.CA()
    ours = issue(ca, tmp_path, "worker")
    context = Tls(ca=ours.ca, **vars_of(expired(tmp_path, "server"))).listening()
    with listening(context) as port, pytest.raises(TlsRefused, match="not accepted here"):
        work(f"127.0.0.1:{port}", 4, tls=Tls(ca=ours.ca), patience=3600.0)


def vars_of(tls: Tls) -> dict[str, Any]:
    return {"cert": tls.cert, "key": tls.key}


@contextlib.contextmanager
def listening(context: ssl.SSLContext | None) -> Iterator[int]:
    """Accept connections and shake hands over TLS, if there is a context. Yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with contextlib.suppress(OSError), sock:
                        if context:
                            context.wrap_socket(sock, server_side=True).close()
                        else:
                            sock.sendall(b"this is no TLS\n" * 9)
                            sock.recv(1 << 16)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(20.0)


def test_a_worker_gives_up_at_once_if_the_server_does_not_use_tls(tmp_path: Path) -> None:
    with listening(None) as port, pytest.raises(TlsRefused, match="there is no TLS there"):
        work(f"127.0.0.1:{port}", 4, tls=made(tmp_path), patience=3600.0)


def test_an_expired_certificate_is_refused_before_the_server_starts(tmp_path: Path) -> None:
    tls = expired(tmp_path, "ours")

    async def serve() -> None:
        async with Server(lambda: make("asp"), ServerConfig(shards=1), tls=tls):
            pass

    with pytest.raises(ValueError, match=r"ours-cert.pem expired on \d{4}-\d\d-\d\d; make a new one"):
        asyncio.run(serve())


def test_a_certificate_of_another_ca_is_refused_before_the_server_starts(tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    with pytest.raises(ValueError, match="give the CA that has signed it"):
        Tls(ours.cert, ours.key, theirs.ca).check_serving()
    ours.check_serving()


# Fingerprints


def test_a_job_whose_peers_know_the_fingerprint(tmp_path: Path) -> None:
    tls = made(tmp_path)
    peer = tls.for_peers()
    assert peer == Tls(fingerprint=tls.fingerprint), "a peer gets neither the certificate nor its key"
    with job("r2sp", shards=2, workers=2, token=b"secret", tls=tls) as running:
        assert asyncio.run(inspect(Endpoint(*address(running.address), b"secret", peer))).blacklist == ()
        running.work(*[lambda where: work(where, 40, token=b"secret", tls=peer)] * 2)
        running.finish()
        assert running.coordinator.samples is not None and running.coordinator.samples.all_done


def test_a_server_with_another_fingerprint_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    ours, theirs = made(tmp_path, "ours"), made(tmp_path, "theirs")
    with job("asp", token=b"secret", tls=theirs) as running:
        with pytest.raises(TlsRefused, match=f"and not {ours.fingerprint}"):
            running.work(lambda where: work(where, 4, token=b"secret", tls=ours.for_peers(), patience=3600.0))
        with pytest.raises(TlsRefused, match=f"and not {ours.fingerprint}"):
            asyncio.run(inspect(Endpoint(*address(running.address), b"secret", ours.for_peers())))


def test_a_shard_elsewhere_makes_its_own_certificate_and_workers_learn_its_fingerprint(tmp_path: Path) -> None:
    """A shard beside a worker does not have the server's key. The coordinator tells workers its fingerprint."""
    tls = made(tmp_path)
    with job("asp", shards=2, workers=1, token=b"secret", tls=tls, shard_tls=tls.for_peers()) as running:
        shown = running.coordinator.shards.certificates
        assert len({*shown, certificates.parse_fingerprint(str(tls.fingerprint))}) == 3
        running.work(lambda where: work(where, 20, token=b"secret", tls=tls.for_peers()))
        running.finish()


def test_a_shard_that_shows_another_certificate_than_it_registered_is_refused(tmp_path: Path) -> None:
    tls = made(tmp_path)
    with job("asp", shards=1, workers=1, token=b"secret", tls=tls) as running:
        running.coordinator.shards._shards[0]._certificates[0] = bytes(32)
        with pytest.raises(TlsRefused, match="and not sha256:0000"):
            running.work(lambda where: work(where, 4, token=b"secret", tls=tls.for_peers(), patience=3600.0))


def test_fingerprints_are_read_with_and_without_colons(tmp_path: Path) -> None:
    digest = certificates.digest_of_file(str(made(tmp_path).cert))
    colons = ":".join(f"{byte:02X}" for byte in digest)
    for text in (certificates.fingerprint(digest), digest.hex(), colons, f"sha256:{colons}"):
        assert certificates.parse_fingerprint(text) == digest
    for wrong in ("", "auto", "sha256:", digest.hex()[1:], "sha1:" + digest.hex()):
        with pytest.raises(ValueError, match="64 hexadecimal digits"):
            certificates.parse_fingerprint(wrong)


def test_only_its_owner_can_read_a_new_key(tmp_path: Path) -> None:
    tls = made(tmp_path)
    assert Path(str(tls.key)).stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        certificates.make(Path(str(tls.key)))


# A relay that opens the TLS connections of both sides


class Relay:
    """A man in the middle. It has a certificate that both sides accept, opens TLS on both sides, and copies bytes."""

    def __init__(self, server: tuple[str, int], tls: Tls, callers: ssl.SSLContext | None) -> None:
        """tls: with which it calls the server. callers: with which it answers callers; None: without TLS."""
        self._server, self._tls, self._callers = server, tls, callers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.copied = 0  # bytes that it has seen in the clear
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(20.0)

    def _start(self, target: Any, *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._start(self._relay, sock)

    def _relay(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
            caller = TlsSocket(self._callers.wrap_socket(sock, server_side=True)) if self._callers else sock
            closing.callback(caller.close)
            server = TlsSocket(self._tls.calling().wrap_socket(socket.create_connection(self._server)))
            closing.callback(server.close)
            back = threading.Thread(target=self._copy, args=(server, caller), daemon=True)
            back.start()
            self._copy(caller, server)
            back.join(20.0)

    def _copy(self, source: Any, target: Any) -> None:
        buffer = memoryview(bytearray(1 << 16))
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer):
                self.copied += count
                target.sendall(bytes(buffer[:count]))
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("over_tls", [True, False], ids=["tls", "plain"])
def test_a_relay_that_opens_tls_cannot_pass_on_a_handshake(over_tls: bool, tmp_path: Path) -> None:
    """The relay has a certificate of the job's CA, as every worker has, but it does not have a token."""
    ca = trustme.CA()
    server, worker, relay = (issue(ca, tmp_path, name) for name in ("server", "worker", "relay"))
    with job("asp", workers=1, token=b"secret", tls=server) as running:
        between = Relay(address(running.address), relay, relay.listening() if over_tls else None)
        try:
            with pytest.raises(ConnectionError, match="token is wrong, or the connection was intercepted"):
                tls = worker if over_tls else None
                work(f"127.0.0.1:{between.port}", 4, token=b"secret", tls=tls, patience=3600.0)
        finally:
            between.close()
        assert between.copied, "it was between them"
        running.work(lambda where: work(where, 4, token=b"secret", tls=worker))  # without the relay
        running.finish()
