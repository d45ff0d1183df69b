"""Errors that a person can correct: one sentence that says what to do."""

from __future__ import annotations

import importlib.util


class MetricsError(ValueError):
    """Metrics cannot be served or logged as asked for."""


def require(module: str, option: str, extra: str) -> None:
    """Raise MetricsError if a library is not installed, and name the extra that installs it."""
    if importlib.util.find_spec(module) is None:
        raise MetricsError(f'{option} needs {module}: pip install "paceline[{extra}]".')
