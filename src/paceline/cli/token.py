"""`paceline token` and `paceline certificate`: the secrets of a job, made before it starts."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import TokenFile
from paceline.cli.shared import refuse

TOKEN_BYTES = 32


def token(
    role: Annotated[
        str | None, typer.Option(help="Print the token for this role: worker, watch or shard. It allows nothing else.")
    ] = None,
    token_file: TokenFile = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the token to this new file, which only you can read.")
    ] = None,
) -> None:
    """Make a token for a new job, or one for a role in a job."""
    from paceline.cli.connection import token_of
    from paceline.serve.wire.tokens import ROLES

    if role is None:
        if token_file:
            refuse("Give the role that the token is for: --role worker, watch or shard.")
        made = secrets.token_urlsafe(TOKEN_BYTES)
    else:
        known = next((each for each in ROLES if each and each == role), None)
        if known is None:
            refuse(f"--role must be worker, watch or shard, not {role!r}.")
        if not token_file and not token_of(None):
            refuse("Give the job's own token with --token-file.")
        made = token_of(token_file, known).decode()
    if out is None:
        typer.echo(made)
        return
    try:
        with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{made}\n")
    except OSError as error:
        refuse(f"The token cannot be written to {out}: {error.strerror}.")


def certificate(
    out: Annotated[
        Path, typer.Option("--out", help="The .pem file for `paceline serve --tls`; made if it is missing.")
    ],
) -> None:
    """Make the certificate of a server, and print its fingerprint.

    The file also holds the private key, and only you can read it. If it exists, its fingerprint is printed.
    """
    from paceline.cli.connection import server_tls
    from paceline.serve.wire import certificates

    server_tls(str(out), None, None, None)
    typer.echo(certificates.fingerprint(certificates.digest_of_file(str(out))))
