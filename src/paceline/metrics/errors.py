"""Errors that a person can correct: one sentence that says what to do."""

from __future__ import annotations


class MetricsError(ValueError):
    """Metrics cannot be served or logged as asked for."""
