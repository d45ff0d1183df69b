"""Certificates for tests, as files: CAs, the certificates that they sign, and expired ones."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from paceline.serve.wire.tls import Tls

trustme = pytest.importorskip("trustme")

YESTERDAY = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


def authority(folder: Path, name: str, **options: Any) -> Tls:
    """Return the files of a new CA, and of a certificate that it has signed. options: those of the certificate."""
    return issue(trustme.CA(), folder, name, **options)


def issue(ca: Any, folder: Path, name: str, **options: Any) -> Tls:
    """Return the files of a CA, and of a new certificate that it signs."""
    paths = [folder / f"{name}-{kind}.pem" for kind in ("cert", "key", "ca")]
    mine = ca.issue_cert("paceline.test", **options)
    mine.cert_chain_pems[0].write_to_path(str(paths[0]))
    mine.private_key_pem.write_to_path(str(paths[1]))
    ca.cert_pem.write_to_path(str(paths[2]))
    paths[1].chmod(0o600)
    return Tls(*map(str, paths))


def expired(folder: Path, name: str) -> Tls:
    """Return the files of a new CA, and of a certificate that expired yesterday."""
    return authority(folder, name, not_before=YESTERDAY - datetime.timedelta(days=9), not_after=YESTERDAY)
