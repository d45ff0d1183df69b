"""The requests that a page answers: those with the job's token, from the page itself.

A browser sends requests to this machine on behalf of any web page that is open in it. So a request must name this
machine, or the host that the user has named, as its host (another name may be a trick: DNS rebinding), and must not
come from another origin.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import ipaddress
import socket
from collections.abc import Mapping

from paceline.serve.wire.tokens import token_for

NO_TOKEN = "This page needs the job's token, or one that `paceline token --role watch` makes: give it as the password."
FOREIGN_HOST = "This page answers only to the name or the address of its own machine."
FOREIGN_ORIGIN = "This page answers only to itself, and not to other web sites."


class RefusedRequest(Exception):
    """A request is refused. The message says why, in one sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class PageGuard:
    """Decides which requests are answered."""

    def __init__(self, token: bytes, is_loopback: bool, host: str = "") -> None:
        """token: the job's token or its watch token; if it is empty, none is asked for.

        is_loopback: does the page listen only on this machine's own address? host: the host that the user has named.
        """
        self._token = token_for("watch", token) if token else b""
        self._is_loopback = is_loopback
        self._names = {"localhost", _plain(host)} | (set() if is_loopback else _own_names())  # asks the DNS

    def check(self, headers: Mapping[str, str], is_data: bool) -> None:
        """Raise RefusedRequest for a request that may not be answered. is_data: it asks for data, not for the page."""
        host = headers.get("host", "")
        if not self._is_own(host):
            raise RefusedRequest(421, FOREIGN_HOST)
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise RefusedRequest(403, FOREIGN_ORIGIN)
        # A person may follow a link to the page, but no other site may load it or its data as a part of itself.
        follows_link = not is_data and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not follows_link:
            raise RefusedRequest(403, FOREIGN_ORIGIN)
        if self._token and not self._knows_token(headers.get("authorization", "")):
            raise RefusedRequest(401, NO_TOKEN)

    def _is_own(self, host: str) -> bool:
        """Return whether a Host header names this machine. An address is never a trick; a name can be one."""
        name = host.rpartition("]")[0].lstrip("[") or host.partition(":")[0]
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return bool(name) and _plain(name) in self._names
        return address.is_loopback or not self._is_loopback

    def _knows_token(self, authorization: str) -> bool:
        """Return whether an Authorization header holds the job's token, or a token to watch it."""
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() == "bearer":
            given = value.strip().encode()
        elif scheme.lower() == "basic":
            try:
                given = base64.b64decode(value, validate=True).partition(b":")[2]
            except ValueError:
                return False
        else:
            return False
        return any(hmac.compare_digest(each, self._token) for each in _readings(given))


def _readings(given: bytes) -> list[bytes]:
    """Return the watch tokens that a password may stand for: a token as a file holds it, or in hexadecimal."""
    readings = [given]
    with contextlib.suppress(ValueError):
        readings.append(bytes.fromhex(given.decode()))
    tokens = []
    for token in readings:
        try:
            tokens.append(token_for("watch", token))
        except ValueError:  # a token for workers
            continue
    return tokens


def _own_names() -> set[str]:
    name = _plain(socket.gethostname())
    return {name, name.partition(".")[0], _plain(socket.getfqdn())}


def _plain(name: str) -> str:
    """Return a host's name in the one spelling in which names are compared."""
    return name.lower().rstrip(".")
