"""Measure the cost of the metrics: microseconds of CPU for an event of a simulated run.

make bench            or            python benchmarks/metrics.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from paceline.metrics.background import BackgroundTracker
from paceline.metrics.job_metrics import JobMetrics
from paceline.metrics.job_scalars import ScalarRow
from paceline.observe.live_state import Live
from paceline.observe.observer import Observer, Recorder, replay
from paceline.observe.stall import StallDetector
from paceline.observe.trace import Began, Event, Joined
from paceline.policies import make
from paceline.simulate import Cluster, load_cluster

ROUNDS = 15
EVENTS = 50_000  # in a round


class NoTracker:
    """A tracker that keeps nothing."""

    name = "nothing"

    def begin(self, run: str, parameters: dict[str, object]) -> None: ...
    def describe(self, parameters: dict[str, object]) -> None: ...
    def write(self, row: ScalarRow) -> None: ...
    def end(self, failed: bool) -> None: ...


def events_of_a_run() -> tuple[list[Event], list[Event]]:
    """Return how a run of eight workers begins, and all that follows."""
    events: list[Event] = []
    Cluster(load_cluster("r2sp-b").with_jitter(0.1), make("r2sp"), 60, observer=Recorder(events.append)).run()
    begins: list[Event] = [event for event in events if isinstance(event, Began | Joined)]
    return begins, [event for event in events if not isinstance(event, Began | Joined)]


def microseconds(observer: Observer, begins: list[Event], events: list[Event]) -> float:
    """Return the median CPU time to tell an observer of one event."""
    replay(begins, observer)
    times, later = [], 0.0
    for _ in range(ROUNDS):
        began, told = time.thread_time(), 0
        while told < EVENTS:
            replay(events, observer, later)
            later += events[-1].time
            told += len(events)
        times.append((time.thread_time() - began) / told * 1e6)
    return statistics.median(times)


def main() -> None:
    begins, events = events_of_a_run()
    observers: dict[str, Callable[[], Observer]] = {
        "nothing (the loop of this benchmark)": Observer,
        "the live table": Live,
        "metrics for Prometheus": JobMetrics,
        "curves for a tracker": lambda: BackgroundTracker(NoTracker(), "run", {}, print),
        "the stall detector": lambda: StallDetector(print),
    }
    base = 0.0
    for name, make_observer in observers.items():
        spent = microseconds(make_observer(), begins, events)
        base = base or spent
        print(f"{name:<40}{spent - base if name[0] != 'n' else spent:6.2f} µs an event")


if __name__ == "__main__":
    main()
