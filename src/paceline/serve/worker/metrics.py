"""Checks of the metrics that a script reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_METRIC_NAME = 80  # characters; the server cuts off the rest


def checked(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as floats. Raise ValueError if a name is not a plain word, or a value not a finite number."""
    return {_name(name): _value(name, value) for name, value in metrics.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier() or len(name) > MAX_METRIC_NAME:
        raise ValueError(
            f"A metric's name has letters, digits and underscores, at most {MAX_METRIC_NAME} of them; "
            f"got {name!r:.100}."
        )
    return name


def _value(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError("float() would parse it")
        number = float(value.detach() if hasattr(value, "detach") else value)  # torch's tensors have gradients
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"The metric {name} must be a number; got a value of type {type(value).__name__}.") from None
    if not math.isfinite(number):
        raise ValueError(f"The metric {name} must be a finite number; got {number}.")
    return number
