"""Certificates: make one for a job, and read the dates and the fingerprint of one.

Certificates are named by the SHA-256 digest of their DER form. A fingerprint is that digest as text: `sha256:` and 64
hexadecimal digits, as `openssl x509 -fingerprint -sha256` computes them.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import ssl
import tempfile
from pathlib import Path

YEARS = 10  # that a job's own certificate is valid; peers that know its fingerprint do not look at its dates
DIGEST_BYTES = 32
_FINGERPRINT = re.compile(r"(?:sha256:)?([0-9a-f]{2}(?::?[0-9a-f]{2}){31})", re.IGNORECASE)


def fingerprint(digest: bytes) -> str:
    """Return the fingerprint for a digest."""
    return f"sha256:{digest.hex()}"


def parse_fingerprint(text: str) -> bytes:
    """Return the digest for a fingerprint, with or without colons between its bytes. Raise ValueError for others."""
    found = _FINGERPRINT.fullmatch(text.strip())
    if not found:
        raise ValueError(
            f"A fingerprint is sha256: and 64 hexadecimal digits, as `paceline serve` prints it, not {text!r}."
        )
    return bytes.fromhex(found[1].replace(":", ""))


def digest_of(der: bytes) -> bytes:
    """Return the digest of a certificate in DER form."""
    return hashlib.sha256(der).digest()


def digest_of_file(path: str) -> bytes:
    """Return the digest of the first certificate in a PEM file: the one that its owner shows. Raise ValueError."""
    try:
        text = Path(path).read_text()
        start, end = text.index(ssl.PEM_HEADER), text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        return digest_of(ssl.PEM_cert_to_DER_cert(text[start:end]))
    except OSError as error:
        raise ValueError(f"The certificate {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise ValueError(f"{path} has no certificate in PEM format.") from None


def check_dates(path: str) -> None:
    """Raise ValueError if the certificate in a PEM file has expired or is not valid yet.

    Of several certificates, some may not be needed. TLS itself then decides.
    """
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"The certificate {path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise ValueError(f"{path} has no certificate in PEM format.") from None
    now = datetime.datetime.now(datetime.UTC)
    for each in found if len(found) == 1 else ():
        if now > each.not_valid_after_utc:
            raise ValueError(f"The certificate {path} expired on {each.not_valid_after_utc:%Y-%m-%d}; make a new one.")
        if now < each.not_valid_before_utc:
            raise ValueError(
                f"The certificate {path} is valid from {each.not_valid_before_utc:%Y-%m-%d} on; "
                "check the clock of this machine, or make a new one."
            )


def make(path: Path) -> None:
    """Write a new key and a certificate that it has signed itself to a PEM file that only its owner may read."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "paceline job")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # the clocks of two machines differ
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret + certificate.public_bytes(pem))


def load_new(context: ssl.SSLContext) -> bytes:
    """Let a context show a new certificate, whose key is in the memory of this process alone. Return its digest."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:  # for its owner alone
        path = Path(folder) / "certificate.pem"
        make(path)
        context.load_cert_chain(path)
        return digest_of_file(str(path))
