"""The metrics of a job, computed from its trace events."""

from __future__ import annotations

import math
import tracemalloc

import pytest

from paceline.metrics.histogram import Histogram
from paceline.metrics.job_metrics import MAX_REPORTED, JobMetrics
from paceline.observe.observer import Recorder, Tee, replay
from paceline.observe.summary import Summary
from paceline.observe.trace import (
    Applied,
    Arrived,
    Began,
    Cancelled,
    Clipped,
    Computed,
    Described,
    Discarded,
    Event,
    Granted,
    Joined,
    Kept,
    Left,
    Measured,
    Progressed,
    Pulled,
    Saved,
    Turned,
)
from paceline.policies import make
from paceline.simulate import Cluster, load_cluster


def values(metrics: JobMetrics) -> dict[str, float]:
    """Return each value by its name and labels. Of a histogram: the number of its values, and their sum."""
    found: dict[str, float] = {}
    for family in metrics.families():
        for labels, value in family.values.items():
            name = family.name + "".join(f" {each}" for each in labels)
            if isinstance(value, Histogram):
                found[f"{name} count"], found[f"{name} sum"] = value.cumulative()[-1][1], value.sum
            else:
                found[name] = value
    return found


EVENTS: list[Event] = [
    Began(0, "", "r2sp", "whole", 0),
    Described(0, 250, "SGD(lr=0.1)"),
    Joined(1, 0),
    Joined(1, 1),
    Granted(1, 0, None, 0),
    Granted(1, 1, None, 0),
    Pulled(5, 0, 0),
    Computed(5, 0, 3.0),
    Turned(6, 0),
    Arrived(8, 0, 1, 32, 0.5),
    Clipped(8, 0, 1, 0.5),
    Applied(8, 1, (0,), (1,), (3,), (1,)),
    Progressed(8, 0, 32, 640),
    Saved(9, 1, 0.25),
    Measured(9, 0, "accuracy", 0.75),
    Measured(9, 0, "cosine", 0.1),
    Pulled(10, 1, 0),
    Computed(10, 1, 8.0),
    Arrived(10, 1, 1, 16),
    Discarded(10, 1, 1),
    Granted(11, 0, None, 0),
    Cancelled(12, 0),
    Left(13, 1, True),
]


def test_the_metrics_of_a_small_job() -> None:
    now = 1000.0
    metrics = JobMetrics(is_stalled=lambda: True, now=lambda: now)
    replay(EVENTS, metrics)
    now = 1010.0
    assert values(metrics) == {
        "paceline_job r2sp whole": 1,
        "paceline_starts_total": 1,
        "paceline_members": 1,
        "paceline_workers_joined_total": 2,
        "paceline_workers_left_total": 1,
        "paceline_leases_lost_total": 1,
        "paceline_iterations_total": 2,
        "paceline_samples_total": 32,
        "paceline_updates_total applied": 1,
        "paceline_updates_total kept": 0,
        "paceline_updates_total discarded": 1,
        "paceline_updates_clipped_total": 1,
        "paceline_iterations_cancelled_total": 1,
        "paceline_transferred_bytes_total in": 2000,
        "paceline_transferred_bytes_total out": 2000,
        "paceline_member_seconds_total": 24,
        "paceline_waiting_seconds_total turn": 1,
        "paceline_waiting_seconds_total grant": 3 + 1 + 3,
        "paceline_waiting_workers turn": 0,
        "paceline_waiting_workers grant": 1,
        "paceline_queued_updates": 0,
        "paceline_iteration_seconds count": 2,
        "paceline_iteration_seconds sum": 16,
        "paceline_phase_seconds compute count": 2,
        "paceline_phase_seconds compute sum": 11,
        "paceline_phase_seconds turn count": 2,
        "paceline_phase_seconds turn sum": 1,
        "paceline_phase_seconds push count": 1,
        "paceline_phase_seconds push sum": 2,
        "paceline_phase_seconds grant count": 2,
        "paceline_phase_seconds grant sum": 6,
        "paceline_staleness_versions count": 1,
        "paceline_staleness_versions sum": 3,
        "paceline_batch_samples count": 2,
        "paceline_batch_samples sum": 48,
        "paceline_model_version": 1,
        "paceline_model_bytes": 1000,
        "paceline_loss": 0.5,
        "paceline_reported accuracy": 0.75,
        "paceline_epoch": 0,
        "paceline_progress_samples": 32,
        "paceline_planned_samples": 640,
        "paceline_checkpoints_total": 1,
        "paceline_last_checkpoint_timestamp_seconds": 1000,
        "paceline_checkpoint_age_seconds": 10,
        "paceline_checkpoint_version": 1,
        "paceline_checkpoint_write_seconds count": 1,
        "paceline_checkpoint_write_seconds sum": 0.25,
        "paceline_stalled": 1,
    }


def test_a_histogram_counts_a_value_in_the_first_range_that_holds_it() -> None:
    histogram = Histogram((1, 2))
    for value in (0, 1, 1.5, 2, 3, math.inf):
        histogram.observe(value)
    assert histogram.cumulative() == [(1, 2), (2, 4), (math.inf, 6)]


def test_a_restarted_server_has_no_members_and_keeps_its_counts() -> None:
    metrics = JobMetrics()
    replay([*EVENTS, Began(20, "", "r2sp", "whole", 0), Joined(21, 0, 2), Kept(22, 0, 1, 0)], metrics)
    found = values(metrics)
    assert (found["paceline_starts_total"], found["paceline_members"]) == (2, 1)
    assert found["paceline_waiting_workers grant"] == 0
    assert (found["paceline_iterations_total"], found["paceline_workers_joined_total"]) == (2, 3)


def test_workers_cannot_add_names_without_end() -> None:
    metrics = JobMetrics()
    for number in range(1000):
        metrics.measured(0.0, 0, f"{'x' * 200}{number}", 1.0)
    names = [name for name in values(metrics) if name.startswith("paceline_reported")]
    assert 0 < len(names) <= MAX_REPORTED
    assert max(map(len, names)) < 120


@pytest.mark.parametrize("policy", ["bsp", "r2sp", "ksync:k=2", "safa", "asp"])
def test_the_counts_are_those_of_the_report(policy: str) -> None:
    metrics, summary = JobMetrics(), Summary()
    Cluster(load_cluster("r2sp-b").with_jitter(0.2), make(policy), 20, observer=Tee(metrics, summary)).run()
    found, report = values(metrics), summary.report()
    assert found["paceline_iterations_total"] == summary.arrivals > 0
    assert found["paceline_updates_total discarded"] == report.discarded
    assert found["paceline_samples_total"] == pytest.approx(report.samples_per_second * report.seconds)
    assert found["paceline_members"] == len(report.batch_sizes)
    iterations = found["paceline_iterations_total"]
    waited = found["paceline_waiting_seconds_total turn"] + found["paceline_waiting_seconds_total grant"]
    assert waited / iterations == pytest.approx(report.blocking_seconds, rel=0.02)


def test_memory_is_bounded_over_100_000_events() -> None:
    metrics, events = JobMetrics(), list[Event]()
    Cluster(load_cluster("r2sp-b"), make("r2sp"), 30, observer=Recorder(events.append)).run()
    after_join = [event for event in events if not isinstance(event, Joined | Began)]
    replay(events, metrics)
    tracemalloc.start()
    before, told = tracemalloc.get_traced_memory()[0], 0
    while told < 100_000:
        replay(after_join, metrics, later=told)
        told += len(after_join)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 10_000
