"""A fixture that limits torch to one thread. Two threads on a busy machine are up to ten times as slow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def one_thread() -> Iterator[None]:
    """Limit torch to one thread. Use it as `one_thread = pytest.fixture(autouse=True)(threads.one_thread)`."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
