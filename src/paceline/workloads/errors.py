"""What is refused here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """One sentence that says what to do."""


class NetworkError(ValueError):
    """One sentence that says what to do."""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that nothing has: the nearest one that something has, and all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"there is no {what} {name!r:.80}: {hint}take one of {', '.join(known)}"
