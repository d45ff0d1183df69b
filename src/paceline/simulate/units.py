"""Sizes, rates and times as people write them: "552MB", "10Gbit", "488MB/s", "50us"."""

from __future__ import annotations

import math
import re

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}


def size(value: object) -> float:
    """Return a size in bytes, from a number or a text such as "552MB"."""
    if isinstance(value, str):
        amount, unit = _split(value)
        match = re.fullmatch(r"(k|K|M|G|T|Ki|Mi|Gi|)B", unit)
        if match:
            return amount * _PREFIX[match[1]]
        raise ValueError(value)
    return plain(value)


def rate(value: object) -> float:
    """Return a rate in bytes per second, from a number or a text such as "10Gbit" or "488MB/s"."""
    if isinstance(value, str):
        amount, unit = _split(value)
        match = re.fullmatch(r"(k|K|M|G|T|)(bit|bps|B)(/s)?", unit)
        if match:
            return amount * _PREFIX[match[1]] / (1 if match[2] == "B" else 8)
        raise ValueError(value)
    return plain(value)


def rates(text: str) -> list[float]:
    """Return rates in bytes per second from a text such as "600Gbit/100Gbit" or "75GB/s/12.5GB/s"."""
    return [rate(part) for part in re.split(r"/(?!s(?:/|$))", text)]


def seconds(value: object) -> float:
    """Return a time in seconds, from a number or a text such as "50us"."""
    if isinstance(value, str):
        amount, unit = _split(value)
        if unit in _TIME:
            return amount * _TIME[unit]
        raise ValueError(value)
    return plain(value)


def _split(text: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([a-zA-Zµ/]+)\s*", text)
    if not match:
        raise ValueError(text)
    return float(match[1]), match[2]


def plain(value: object) -> float:
    """Return a finite number as a float. Raise ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(value)
    return float(value)
