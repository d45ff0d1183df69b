"""The token and the TLS files of a job, from options or from the environment."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.cli.shared import refuse
from paceline.serve.environment import TOKEN, address
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.tls import Tls

MIN_TOKEN = 16  # characters


def tls_of(cert: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
    """The TLS files that the options name, or else those that the environment names."""
    tls = Tls(*(str(path) if path else None for path in (cert, key, ca)))
    return Tls.from_environment() if tls == Tls() else tls


def token_of(file: Path | None) -> bytes:
    """The job's token, from this file or from the environment."""
    if file is None:
        try:
            return bytes.fromhex(os.environ.get(TOKEN, ""))
        except ValueError:
            refuse(f"{TOKEN} must be hexadecimal.")
    try:
        token = file.read_bytes().strip()
    except OSError as error:
        refuse(f"The token file {file} cannot be read: {error.strerror}.")
    if len(token) < MIN_TOKEN:
        refuse(f"The token in {file} is too short to be safe; use at least {MIN_TOKEN} characters.")
    return token


def endpoint_of(connect: str, token_file: Path | None, tls: Tls | None) -> Endpoint:
    """The server at an address host:port."""
    try:
        return Endpoint(*address(connect), token_of(token_file), tls)
    except ValueError as error:
        refuse(str(error))
