from __future__ import annotations

import pytest

import threads

one_thread = pytest.fixture(autouse=True, scope="package")(threads.one_thread)
