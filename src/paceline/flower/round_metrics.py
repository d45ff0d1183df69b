"""The metrics of a round, gathered from the trace and from the strategy's own averages."""

from __future__ import annotations

from typing import Any

from flwr.app import MetricRecord

from paceline.observe.observer import Observer


class RoundMetrics(Observer):
    """Counts what happens in a round."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._updates = self._discarded = 0
        self._staleness = 0
        self._sums: dict[str, float] = {}
        self._examples = 0.0

    def applied(
        self, time: float, version: int, workers: tuple[int, ...], iterations: tuple[int, ...], staleness: Any, *_: Any
    ) -> None:
        self._updates += len(workers)
        self._staleness += sum(staleness)

    def discarded(self, *_: Any) -> None:
        self._discarded += 1

    def aggregated(self, metrics: MetricRecord | None, examples: float) -> None:
        """Add the averages of the replies that were applied together. examples: their total."""
        for name, value in (metrics or {}).items():
            if isinstance(value, int | float):
                self._sums[name] = self._sums.get(name, 0.0) + examples * value
        self._examples += examples

    def take(self, nodes: int, excluded: int, seconds: float) -> MetricRecord:
        """Return the metrics of the round that ends now, and begin the next one."""
        means = {name: total / self._examples for name, total in self._sums.items() if self._examples}
        own = {
            "updates": self._updates,
            "discarded-updates": self._discarded,
            "mean-staleness": self._staleness / max(1, self._updates),
            "nodes": nodes,
            "excluded-nodes": excluded,
            "seconds": seconds,
        }
        self._clear()
        return MetricRecord(means | own)
