"""The report of a run, calculated by hand for a small trace."""

from __future__ import annotations

import json

import pytest

from paceline.observe.observer import Recorder, replay
from paceline.observe.summary import Gaps, Report, Summary, _Series
from paceline.observe.trace import (
    Applied,
    Arrived,
    Began,
    Computed,
    Discarded,
    Event,
    Granted,
    Joined,
    Kept,
    Left,
    Pulled,
    Turned,
    as_line,
    from_line,
)
from paceline.policies import make, names
from paceline.simulate import Cluster, load_cluster
from paceline.simulate.random_faults import with_random_faults

#: Two workers. The first arrival of each is warm-up, so means cover the 13 seconds from 6 to 19.
TRACE: list[Event] = [
    Joined(0, 0),
    Joined(0, 1),
    Granted(0, 0, None, 0),
    Granted(0, 1, None, 0),
    Pulled(1, 0, 0),
    Pulled(1, 1, 0),
    Computed(3, 0),
    Turned(3, 0),
    Arrived(4, 0, 1, 10),
    Applied(4, 1, (0,), (1,), (0,)),
    Computed(5, 1),
    Turned(5, 1),
    Arrived(6, 1, 1, 20),  # the warm-up ends here
    Applied(6, 2, (1,), (1,), (1,)),
    Granted(7, 0, None, 0),  # worker 0 has waited since 4; 1 second of this is after the warm-up
    Granted(7, 1, None, 0),  # worker 1 has waited for 1 second
    Pulled(8, 0, 2),  # 1 second of pulling
    Pulled(9, 1, 2),  # 2
    Computed(10, 0),
    Turned(11, 0),  # 1 second of waiting for the Turn
    Arrived(13, 0, 2, 10),  # 2 of pushing
    Applied(13, 3, (0,), (2,), (0,)),
    Granted(13, 0, 16, 1),
    Pulled(14, 0, 3),  # 1 of pulling
    Computed(15, 1),
    Turned(15, 1),
    Arrived(17, 1, 2, 20),  # 2 of pushing
    Kept(17, 1, 2, 1),
    Applied(17, 4, (1,), (2,), (1,)),
    Computed(18, 0),
    Turned(18, 0),
    Arrived(19, 0, 3, 16),  # 1 of pushing; worker 1 has waited since 17, 2 seconds
    Discarded(19, 0, 3),
]


def report_of(events: list[Event], warm_up: int = 0) -> Report:
    summary = Summary(warm_up)
    replay(events, summary)
    return summary.report()


def test_every_figure() -> None:
    report = report_of(TRACE, warm_up=2)
    assert report.mean_iteration_seconds == pytest.approx(2 * 13 / 3)
    assert report.samples_per_second == pytest.approx((10 + 20) / 13)
    assert report.blocking_by_worker == {0: pytest.approx((1 + 1) / 2), 1: pytest.approx((1 + 2) / 1)}
    assert report.blocking_seconds == pytest.approx((1 + 1 + 1 + 2) / 3)
    assert report.communication_seconds == pytest.approx((1 + 2 + 2 + 1 + 2 + 1) / 3)
    assert report.max_staleness == 1
    assert report.mean_staleness == pytest.approx((0 + 1) / 2)
    assert report.max_progress_gap == 1
    assert report.update_gaps == Gaps(zero_fraction=0.0, p5=2.0, p50=4.0, p95=7.0)
    assert report.batch_sizes == {0: 16, 1: 20}
    assert report.updates == 4, "an update that is kept and applied counts once"
    assert report.discarded == 1
    assert report.warm_up_iterations == 2


def test_without_a_warm_up_everything_counts() -> None:
    report = report_of(TRACE)
    assert report.mean_iteration_seconds == pytest.approx(2 * 19 / 5)
    assert report.samples_per_second == pytest.approx((10 + 20 + 10 + 20) / 19)
    assert report.blocking_by_worker == {0: pytest.approx((3 + 1) / 3), 1: pytest.approx((1 + 2) / 2)}
    assert report.communication_seconds == pytest.approx((1 + 1 + 1 + 1 + 1 + 2 + 2 + 1 + 2 + 1) / 5)
    assert report.mean_staleness == pytest.approx((0 + 1 + 0 + 1) / 4)
    assert report.update_gaps == Gaps(zero_fraction=0.0, p5=2.0, p50=4.0, p95=7.0)  # of 2, 7, 4 and 2


@pytest.mark.parametrize("warm_up", [4, 5, 100])
def test_a_run_that_ends_within_a_round_of_its_warm_up_has_the_iteration_time_of_the_whole_run(warm_up: int) -> None:
    """The run has five arrivals."""
    assert report_of(TRACE, warm_up).mean_iteration_seconds == pytest.approx(2 * 19 / 5)


def test_a_run_without_events() -> None:
    report = report_of([])
    assert report.mean_iteration_seconds == 0.0
    assert report.samples_per_second == 0.0
    assert report.update_gaps == Gaps(0.0, 0.0, 0.0, 0.0)
    assert report.batch_sizes == {}
    assert report_of([Joined(0, 0), Granted(0, 0, None, 0)], warm_up=5).blocking_by_worker == {0: 0.0}


def test_the_iteration_time_counts_the_time_of_members_only() -> None:
    # One member for 10 seconds, another for 4 of them, and three iterations in total.
    events: list[Event] = [Joined(0, 0), Granted(0, 0, None, 0), Joined(2, 1), Granted(2, 1, None, 0)]
    events += [Computed(3, 0), Turned(3, 0), Arrived(3, 0, 1, 8), Granted(3, 0, None, 0)]
    events += [Computed(5, 1), Turned(5, 1), Arrived(5, 1, 1, 8), Left(6, 1)]
    events += [Computed(10, 0), Turned(10, 0), Arrived(10, 0, 2, 8)]
    report = report_of(events)
    assert report.mean_iteration_seconds == pytest.approx((10 + 4) / 3)
    assert report.blocking_by_worker[1] == 0.0, "a worker that has left does not wait"


def test_updates_that_arrive_together_have_no_gap() -> None:
    events: list[Event] = [event for worker in range(4) for event in (Joined(0, worker), Granted(0, worker, None, 0))]
    for iteration in (1, 2, 3):
        for worker in range(4):
            when = iteration * 5 + worker * 1e-8
            events += [Turned(when, worker), Arrived(when, worker, iteration, 1)]
    gaps = report_of(events).update_gaps
    assert gaps.zero_fraction == pytest.approx(9 / 11)
    assert gaps.p95 == pytest.approx(5.0)
    assert report_of(events, warm_up=4).update_gaps.zero_fraction == pytest.approx(6 / 8)


def test_two_incarnations_can_have_updates_with_the_same_iteration() -> None:
    events: list[Event] = [Joined(0, 0), Granted(0, 0, None, 0), Turned(1, 0), Arrived(1, 0, 1, 10), Left(1, 0)]
    events += [Joined(1, 0, 2), Granted(1, 0, None, 0), Turned(2, 0), Arrived(2, 0, 1, 30, None, 2)]
    both = report_of([*events, Applied(2, 1, (0, 0), (1, 1), (0, 0), (1, 2))])
    assert (both.updates, both.samples_per_second) == pytest.approx((2, (10 + 30) / 2))
    old = report_of([*events, Discarded(2, 0, 1, 2), Applied(2, 1, (0,), (1,), (0,), (1,))])
    assert (old.updates, old.discarded, old.samples_per_second) == pytest.approx((1, 1, 10 / 2))
    new = report_of([*events, Discarded(2, 0, 1, 1), Kept(2, 0, 1, 7, 2), Applied(2, 1, (0,), (1,), (0,), (2,))])
    assert (new.updates, new.discarded, new.samples_per_second) == pytest.approx((1, 1, 30 / 2))


def test_an_update_that_is_applied_several_times_counts_once() -> None:
    events: list[Event] = [Joined(0, 0), Granted(0, 0, None, 0), Turned(1, 0), Arrived(1, 0, 1, 10), Kept(1, 0, 1, 0)]
    events += [Applied(1 + version, version, (0,), (1,), (version - 1,)) for version in (1, 2, 3)]
    report = report_of(events)
    assert (report.updates, report.max_staleness, report.mean_staleness) == (1, 2, 1.0)


def test_lost_and_returned_workers_are_counted() -> None:
    events: list[Event] = [Joined(0, 0), Joined(0, 1), Left(1, 1, lost=True), Joined(2, 1, 2), Left(3, 1, lost=True)]
    events += [Granted(3, 0, None, 0), Turned(4, 0), Arrived(4, 0, 1, 8), Applied(4, 1, (0,), (1,), (0,)), Left(5, 0)]
    report = report_of(events)
    assert (report.lost, report.returned) == (2, 1), "a worker that leaves with a message is not lost"
    assert report.updates_by_worker == {0: 1, 1: 0}


def test_a_job_that_begins_again_before_its_first_update_has_no_faults() -> None:
    events: list[Event] = [
        Joined(0, 0),
        Joined(0, 1),
        Began(1, "", "bsp", "whole", 0),
        Joined(1, 0, 2),
        Joined(1, 1, 2),
    ]
    report = report_of(events)
    assert (report.lost, report.returned) == (0, 0)


def test_a_run_is_measured_from_its_first_member() -> None:
    late: list[Event] = [event._replace(time=event.time + 100.0) for event in TRACE]
    assert report_of(late).samples_per_second == pytest.approx(report_of(TRACE).samples_per_second)
    assert report_of(late).samples_per_second == pytest.approx((10 + 20 + 10 + 20) / 19)


def test_the_rate_is_that_of_the_reported_seconds() -> None:
    for warm_up, samples in ((0, 10 + 20 + 10 + 20), (2, 10 + 20)):
        report = report_of(TRACE, warm_up)
        assert report.samples_per_second * report.seconds == pytest.approx(samples)
    late: list[Event] = [event._replace(time=event.time + 100.0) for event in [*TRACE, Left(30, 0), Left(30, 1)]]
    assert report_of(late).seconds == pytest.approx(19), "from the first member to the last arrival"
    assert report_of([]).seconds == 0.0


def test_if_every_update_counts_as_one_sample_the_rate_is_one_of_updates() -> None:
    def unit(*batches: int) -> str:
        arrivals = [Arrived(number + 1, 0, number + 1, batch) for number, batch in enumerate(batches)]
        return report_of([Joined(0, 0), *arrivals]).rate_unit

    assert unit(1, 1, 1) == "updates/s"
    assert unit(8, 1) == unit(1, 8) == unit() == "samples/s", "a small last batch changes nothing"


def test_computing_does_not_count_as_communication_if_the_pull_is_reported_late() -> None:
    events: list[Event] = [Joined(0, 0), Granted(0, 0, None, 0), Pulled(5, 0, 0), Computed(5, 0, 3.5), Turned(5, 0)]
    events += [Arrived(7, 0, 1, 8)]
    assert report_of(events).communication_seconds == pytest.approx(1.5 + 2)


# Replaying


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("policy", names())
def test_a_recorded_trace_gives_the_same_report(policy: str, streamed: bool) -> None:
    lines: list[str] = []
    calm = load_cluster("r2sp-b").with_jitter(0.1)
    observer = Recorder(lambda event: lines.append(as_line(event)))
    for spec in (calm, with_random_faults(calm, count=5, iterations=12, seed=1)):
        lines.clear()
        result = Cluster(spec, make(policy), 12, streamed=streamed, observer=observer).run()
        warm_up = result.report.warm_up_iterations
        assert warm_up == (0 if spec.faults else 3 * 8), "the cost of faults is never left out"
        assert report_of([from_line(line) for line in lines], warm_up) == result.report


@pytest.mark.parametrize("policy", names())
def test_an_old_trace_without_incarnations_gives_the_same_report(policy: str) -> None:
    lines: list[str] = []
    observer = Recorder(lambda event: lines.append(as_line(event)))
    result = Cluster(load_cluster("r2sp-b").with_jitter(0.1), make(policy), 12, observer=observer).run()
    old = [without_incarnations(line) for line in lines]
    assert old != lines
    assert report_of([from_line(line) for line in old], result.report.warm_up_iterations) == result.report


def without_incarnations(line: str) -> str:
    """Return a line of a trace in the format that predates incarnations."""
    fields = json.loads(line)
    if fields["event"] != "joined":
        fields.pop("incarnation", None)
        fields.pop("incarnations", None)
    return json.dumps(fields)


# Memory


def test_a_series_keeps_a_bounded_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Series, "MAX_VALUES", 64)
    series = _Series()
    for i in range(10_000):
        series.add(float(i))
        assert len(series.values) < 64
    p5, p50, p95 = series.percentiles(5, 50, 95)
    assert len(series.values) >= 16
    assert p5 == pytest.approx(500, abs=400)
    assert p50 == pytest.approx(5000, abs=400)
    assert p95 == pytest.approx(9500, abs=400)


def test_a_short_series_keeps_all_values() -> None:
    series = _Series()
    for value in (5.0, 1.0, 3.0):
        series.add(value)
    assert series.percentiles(0, 50, 100) == [1.0, 3.0, 5.0]
    assert _Series().percentiles(5, 50) == [0.0, 0.0]
