"""A histogram: how often a value lay in each of some ranges."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

#: The upper bounds of seconds: a millisecond to an hour, in steps of about 2.2.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 300, 900, 3600)
#: The upper bounds of a count, such as staleness.
COUNTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Histogram:
    """The values that were observed, counted by range."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Return each upper bound with the number of values up to it. The last bound is infinite."""
        return list(zip((*self.bounds, float("inf")), accumulate(self.counts), strict=True))
