"""Curves and distributions in bounded memory: the loss and the metrics over time, and histograms of many clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.observe.live_state import INTERNAL_METRICS
from paceline.observe.observer import Observer

MAX_POINTS = 400  # of a curve; when there are more, two neighbours become their mean
MAX_CURVES = 6  # metrics that are remembered; the least recent one is forgotten
MAX_NAME = 60  # characters of a metric's name
BINS = 24  # of a histogram


class ThinnedCurve:
    """A curve over the whole job. Each point is the mean of as many values as are needed to bound the memory."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self.last: float | None = None
        self._stride = 1
        self._count, self._times, self._values = 0, 0.0, 0.0

    def add(self, time: float, value: float) -> None:
        self.last = value
        if not math.isfinite(value):
            return
        self._count += 1
        self._times += time
        self._values += value
        if self._count < self._stride:
            return
        self.points.append((round(self._times / self._count, 4), self._values / self._count))
        self._count, self._times, self._values = 0, 0.0, 0.0
        if len(self.points) >= MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [((a + b) / 2, (v + w) / 2) for (a, v), (b, w) in pairs]
            self._stride *= 2


class JobCurves(Observer):
    """An observer that keeps the loss and the metrics over time, whichever worker has reported them."""

    def __init__(self) -> None:
        self.loss = ThinnedCurve()
        self.metrics: dict[str, ThinnedCurve] = {}

    def arrived(
        self,
        time: float,
        worker: Any,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None:
        if loss is not None:
            self.loss.add(time, loss)

    def measured(self, time: float, worker: Any, kind: str, value: float) -> None:
        if kind in INTERNAL_METRICS:
            return
        name = str(kind)[:MAX_NAME]
        curve = self.metrics.pop(name, None) or ThinnedCurve()
        self.metrics[name] = curve
        if len(self.metrics) > MAX_CURVES:
            del self.metrics[next(iter(self.metrics))]
        curve.add(time, value)

    def as_rows(self) -> list[dict[str, Any]]:
        """Return the curves as the page receives them, the loss first, the metrics by their names."""
        named = [("loss", self.loss), *sorted(self.metrics.items())]
        return [
            {"name": name, "points": curve.points, "last": shown(curve.last)}
            for name, curve in named
            if curve.last is not None
        ]


def shown(value: float | None) -> float | str | None:
    """Return a number for the page. A number that is not finite becomes a text."""
    return value if value is None or math.isfinite(value) else "not a number"


def histogram(values: Sequence[float], bins: int = BINS) -> dict[str, Any] | None:
    """Return the counts of values in equal bins from `from` to `to`, their median and their 95th percentile.

    Whole numbers have bins of whole numbers. Return None if there are no values.
    """
    if not values:
        return None
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    whole = all(value == int(value) for value in (low, high)) and all(isinstance(value, int) for value in ordered)
    if whole:
        width = float(max(1, math.ceil((high - low + 1) / bins)))
        low, count = low - 0.5, math.ceil((high - low + 1) / width)
    else:
        width, count = (high - low) / bins, bins
        if width <= 0:
            width, count = max(abs(high), 1.0) / 10, 1
            low -= width / 2
    counts = [0] * count
    for value in ordered:
        counts[min(count - 1, int((value - low) / width))] += 1
    return {
        "from": low,
        "to": low + width * count,
        "counts": counts,
        "whole": whole,
        "mean": sum(ordered) / len(ordered),
        "median": ordered[(len(ordered) - 1) // 2],
        "p95": ordered[round(0.95 * (len(ordered) - 1))],
        "least": ordered[0],
        "most": ordered[-1],
        "values": len(ordered),
    }
