"""One thread: two that wait for each other on a busy machine make small networks, and all else, ten times as slow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def one_thread() -> Iterator[None]:
    """To be made a fixture of: `one_thread = pytest.fixture(autouse=True)(threads.one_thread)`."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
