"""How many examples a search for a counterexample tries: a few in `make test`, and many in `make test-all`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import settings

#: PACELINE_SEARCH=1 searches as long as `make test-all`, and a larger number that many times as long.
SEARCH = int(os.environ.get("PACELINE_SEARCH", "0"))

Case = TypeVar("Case")


def tries(few: int, many: int, **more: Any) -> settings:
    """Try a few examples in `make test`, the same ones in each run, and many other ones in `make test-all`."""
    chosen: dict[str, Any] = {"derandomize": not SEARCH, "database": None} | more
    return settings(max_examples=many * SEARCH or few, deadline=None, **chosen)


def every(step: int, cases: Sequence[Case]) -> Sequence[Case]:
    """Return every second, third, … of these cases in `make test`, and all of them in `make test-all`."""
    return cases if SEARCH else cases[::step]
