"""Errors of data sets and networks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """A data set that cannot be loaded. The message says what to do."""


class NetworkError(ValueError):
    """A network that does not exist, or does not fit the data set. The message says what to do."""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the closest known name and all known names."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"There is no {what} {name!r:.80}.{hint} Choose from {', '.join(known)}."
