"""The token and the TLS files of a job, from options or from the environment."""

from __future__ import annotations

import atexit
import shutil
import stat
import tempfile
from pathlib import Path

from paceline.cli.shared import errors, refuse
from paceline.serve.environment import address, job_token, token_in
from paceline.serve.server import Address, ServerError
from paceline.serve.wire import certificates
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.tls import Tls
from paceline.serve.wire.tokens import Role, token_for

AUTO = "auto"


def tls_of(fingerprint: str | None, cert: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    """How to reach a server over TLS, as the options say, or else as the environment says."""
    tls = _files(cert, key, ca, fingerprint)
    try:
        if tls:
            tls.check()
            tls.calling()
    except ValueError as error:
        refuse(str(error))
    return tls


def server_tls(
    mode: str | None, cert: Path | None, key: Path | None, ca: Path | None, host: str | None = None
) -> Tls | None:
    """The TLS files of a server, as the options say, or else as the environment says.

    mode: auto, for a new certificate, or a .pem file that keeps one from job to job.
    host: refuse the command if a server with a token may not listen on this address.
    """
    if mode is not None and (cert or key or ca):
        refuse("--tls makes a certificate of its own: leave out --tls-cert, --tls-key and --tls-ca.")
    try:
        tls = _files(cert, key, ca, None) if mode is None else own_certificate(mode)
        if tls:
            tls.check_serving()
        if host is not None:
            Address(host).check(b"made for each run", tls)
    except (ValueError, ServerError) as error:
        refuse(str(error))
    return tls


def token_of(file: Path | None, role: Role | None = None) -> bytes:
    """The job's token, from this file or from the environment. If a role is given, the token for that role."""
    try:
        token = job_token() if file is None else _read_token(file)
        return token if role is None else token_for(role, token)
    except ValueError as error:
        refuse(str(error))


def endpoint_of(connect: str, token_file: Path | None, tls: Tls | None, role: Role) -> Endpoint:
    """The server at an address host:port, for a peer in this role."""
    try:
        return Endpoint(*address(connect), token_of(token_file, role), tls)
    except ValueError as error:
        refuse(str(error))


def _files(cert: Path | None, key: Path | None, ca: Path | None, fingerprint: str | None) -> Tls | None:
    """The TLS files that the options name, or else those that the environment names."""
    tls = Tls(*(str(each) if each else None for each in (cert, key, ca, fingerprint)))
    if key:
        _note_readers(key)
    return Tls.from_environment() if tls == Tls() else tls


def own_certificate(mode: str) -> Tls:
    """A certificate that the job makes: in a private folder until this process ends, or in a file that is kept."""
    if mode == AUTO:
        folder = tempfile.mkdtemp(prefix="paceline-")  # for its owner alone
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        file = Path(folder) / "certificate.pem"
    else:
        file = Path(mode)
        if file.suffix != ".pem":
            raise ValueError(
                f"--tls must be auto, or the name of a .pem file that keeps the certificate, not {mode!r}."
            )
    try:
        if file.exists():
            _note_readers(file)
        else:
            certificates.make(file)
    except OSError as error:
        raise ValueError(f"The certificate {file} cannot be written: {error.strerror}.") from None
    return Tls(str(file), str(file)).serving()


def _read_token(file: Path) -> bytes:
    token = token_in(file)
    _note_readers(file)
    return token


def _note_readers(file: Path) -> None:
    """Print a note if a secret can be read by other users of this machine.

    This is not an error, because some file systems and the secrets of containers have no other modes.
    """
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError:
        return  # the code that reads the file reports the error
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        errors.print(f"Note: other users of this machine can read {file}; run: chmod 600 {file}", highlight=False)
