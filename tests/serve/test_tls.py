"""Jobs run over TLS and mutual TLS, and a peer without the right certificate is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
trustme = pytest.importorskip("trustme")

from paceline.serve.wire import frames
from paceline.serve.wire.tls import Tls, TlsSocket
from serve.workers import work
from train.jobs import job


def authority(folder: Path, name: str) -> Tls:
    """Return the files of a new CA, and of a certificate that it has signed."""
    ca = trustme.CA()
    paths = [folder / f"{name}-{kind}.pem" for kind in ("cert", "key", "ca")]
    mine = ca.issue_cert("paceline.test")
    mine.cert_chain_pems[0].write_to_path(str(paths[0]))
    mine.private_key_pem.write_to_path(str(paths[1]))
    ca.cert_pem.write_to_path(str(paths[2]))
    return Tls(*map(str, paths))


def test_a_job_over_mutual_tls(tmp_path: Path) -> None:
    tls = authority(tmp_path, "ours")
    with job("r2sp", shards=2, workers=3, token=b"secret", tls=tls) as running:
        running.work(*[lambda where: work(where, 60, token=b"secret", tls=tls)] * 3)
        running.finish()
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done


@pytest.mark.parametrize("policy", ["r2sp:patience=10000", "bsp:pipeline=true"])
def test_a_streamed_job_over_mutual_tls(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection carries both directions at once, and `drain` works over it."""
    drained: list[Any] = []

    def unacknowledged(sock: Any) -> tuple[int, float]:
        drained.append(sock)
        return original(sock)

    original = frames._unacknowledged
    monkeypatch.setattr(frames, "_unacknowledged", unacknowledged)
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 1)
    tls = authority(tmp_path, "ours")
    with job(policy, shards=2, workers=3, token=b"secret", tls=tls, streamed=True) as running:
        running.work(*[lambda where: work(where, 60, token=b"secret", tls=tls)] * 3)
        running.finish()
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done
        assert running.work(lambda where: work(where, 60, updates=0, token=b"secret", tls=tls)) == [60.0]
    assert drained
    assert all(isinstance(sock, TlsSocket) for sock in drained)


def test_a_peer_without_a_certificate_is_refused_before_the_handshake(tmp_path: Path) -> None:
    tls = authority(tmp_path, "ours")
    stranger = Tls(ca=tls.ca)
    with job("asp", tls=tls) as running, pytest.raises(ConnectionError):
        running.work(lambda where: work(where, 4, tls=stranger, patience=1.0))


def test_a_server_with_a_certificate_of_another_ca_is_not_trusted(tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    with job("asp", tls=theirs) as running, pytest.raises(ConnectionError, match="TLS"):
        running.work(lambda where: work(where, 4, tls=ours, patience=1.0))


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
