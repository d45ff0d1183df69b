"""Fast tests first: those marked slow run when all the others have passed their turn."""

from __future__ import annotations

import signal

import pytest

# A shell that starts tests in the background has them, and all that they start, ignore Ctrl-C; and some test just that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
