"""The metrics that workers report with `session.log`, over time, and when one of them reached a target."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.observe.observer import Observer

MAX_POINTS = 1 << 15  # of one metric; when there are more, every second one is dropped
SAME, BLINK = 1.05, 0.01  # a ratio of two times that counts as no difference, and the shortest time, in seconds

#: The values of a metric, each with the seconds since the first worker joined.
Curve: TypeAlias = Sequence[tuple[float, float]]


class MetricHistory(Observer):
    """An observer that keeps the values of every metric, whichever worker has reported them."""

    def __init__(self) -> None:
        self._began: float | None = None
        self.curves: dict[str, list[tuple[float, float]]] = {}

    def joined(self, time: float, worker: int, incarnation: int = 1) -> None:
        self._began = time if self._began is None else self._began

    def measured(self, time: float, worker: int, kind: str, value: float) -> None:
        curve = self.curves.setdefault(kind, [])
        curve.append((time - (self._began or 0.0), value))
        if len(curve) > MAX_POINTS:
            del curve[1::2]

    def last(self, metric: str) -> float | None:
        """Return the last value of a metric, or None if there is none."""
        curve = self.curves.get(metric)
        return curve[-1][1] if curve else None


@dataclass(frozen=True)
class Target:
    """A value that a metric should reach: from below, or (falls) from above."""

    metric: str
    value: float
    falls: bool = False

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target in a text such as "accuracy=0.97", or "val_loss<0.1". Raise ValueError for other texts."""
        match = re.fullmatch(r"([A-Za-z_]\w*)([=<])([^=<]+)", text)
        if not match or not math.isfinite(value := float(match[3])):
            raise ValueError(text)
        return cls(match[1], value, match[2] == "<")

    def __str__(self) -> str:
        """Return the target in words: "97%" for an accuracy, "val_loss 0.1" for another metric."""
        if self.metric == "accuracy" and 0 < self.value <= 1:
            return f"{100 * self.value:.4g}%"
        return f"{self.metric} {self.value:.4g}"

    def seconds(self, curves: Mapping[str, Curve]) -> float | None:
        """Return when the metric first reached the target, or None if it never did."""
        for seconds, value in curves.get(self.metric, ()):
            if value <= self.value if self.falls else value >= self.value:
                return seconds
        return None


def verdicts(times: Sequence[tuple[str, float | None]], target: Target) -> list[str]:
    """Compare in sentences when policies reached a target. times: each policy and its seconds, the baseline first."""
    (first, base), *others = times
    sentences = [] if base is not None else [f"{first} never reached {target}."]
    for policy, seconds in others:
        if seconds is None:
            sentences.append(f"{policy} never reached {target}.")
        elif base is None:
            sentences.append(f"{policy} reached {target} after {seconds:.1f} s.")
        else:
            ratio = max(base, BLINK) / max(seconds, BLINK)
            if 1 / SAME < ratio < SAME:
                sentences.append(f"{policy} reached {target} as soon as {first}.")
            elif ratio > 1:
                sentences.append(f"{policy} reached {target} {ratio:.1f} × sooner than {first}.")
            else:
                sentences.append(f"{policy} reached {target} {1 / ratio:.1f} × later than {first}.")
    return sentences
