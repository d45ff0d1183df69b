"""The address at which a command shows a job over HTTP: the text [HOST:]PORT, and the URL that is announced."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from rich.text import Text

from paceline.cli.shared import errors, refuse

if TYPE_CHECKING:
    from paceline.serve.wire.tls import Tls


def host_and_port(text: str, option: str, example: int) -> tuple[str, int]:
    """Return the host and the port that an option gives. The host is loopback if it is left out.

    Refuse any other text. example: a port for the error.
    """
    host, colon, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 1 << 16
    if not is_port or (colon and not host) or host.isdigit():
        refuse(f"{option} must be a port or HOST:PORT, such as {example} or 0.0.0.0:{example}; got {text!r}.")
    return host.strip("[]") or "127.0.0.1", int(port)


def url_of(host: str, port: int, tls: Tls | None, path: str = "/") -> str:
    """Return the URL at which others reach a server that listens on a host."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    shown = f"[{name}]" if ":" in name else name
    return f"{'https' if tls else 'http'}://{shown}:{port}{path}"


def announce(what: str, url: str, tls: Tls | None) -> None:
    """Print the URL of a server, and the fingerprint of its certificate."""
    known_by = f", fingerprint {tls.serving().fingerprint}" if tls else ""
    errors.print(Text(f"{what}: {url}{known_by}"))
