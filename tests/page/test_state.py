"""The state of the page: its figures and sentences, and the bound of its memory."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.observe.trace import (
    Applied,
    Arrived,
    Awaited,
    Began,
    Clipped,
    Computed,
    Event,
    Granted,
    Joined,
    Left,
    Measured,
    Pulled,
    Turned,
    Used,
)
from paceline.page.advice import advice
from paceline.page.curves import MAX_POINTS, ThinnedCurve, histogram
from paceline.page.happenings import MAX_HAPPENINGS
from paceline.page.recent import MAX_ITERATIONS, MAX_LINK_POINTS, MAX_STEPS
from paceline.page.state import LEAST_TYPICAL, MAX_CHANGES, MAX_ROWS, MAX_SNAPSHOT, PageState
from page.viewing import recorded, report_of, state_of


def one_iteration(
    worker: int, iteration: int, at: float, staleness: int = 0, loss: float | None = None, computing: float = 0.5
) -> list[Event]:
    """An iteration as a server sees it: 0.2 s to pull, 0.5 s to compute, 0.1 s to wait and 0.2 s to push."""
    computed = at + 0.2 + computing
    return [
        Granted(at, worker, None, 0),
        Pulled(computed, worker, iteration),
        Computed(computed, worker, computing),
        Turned(computed + 0.1, worker),
        Arrived(computed + 0.3, worker, iteration, 32, loss),
        Applied(computed + 0.3, iteration, (worker,), (iteration,), (staleness,), (1,)),
    ]


def a_job(workers: int = 2, iterations: int = 10, policy: str = "bsp") -> list[Event]:
    events: list[Event] = [Began(0.0, "", policy, "whole", 0), *(Joined(0.0, worker) for worker in range(workers))]
    for iteration in range(1, iterations + 1):
        for worker in range(workers):
            events += one_iteration(worker, iteration, iteration - 1.0)
    return events


@pytest.mark.parametrize("policy", ["bsp", "asp", "r2sp"])
def test_the_figures_are_those_of_the_summary(policy: str) -> None:
    events = recorded(policy)
    figures, report = state_of(events).snapshot()["figures"], report_of(events)
    assert figures["iteration_seconds"] == report.mean_iteration_seconds
    assert figures["samples_per_second"] == report.samples_per_second
    assert figures["mean_staleness"] == report.mean_staleness
    assert figures["max_staleness"] == report.max_staleness
    assert figures["updates"] == report.updates > 100
    assert figures["discarded"] == report.discarded


def test_an_iteration_is_split_by_what_the_server_knows() -> None:
    snapshot = state_of(a_job()).snapshot()
    number, worker, iteration, *times, batch, loss, staleness, fate = snapshot["iterations"][-1]
    assert (number, worker, iteration, batch, loss, staleness, fate) == (20, "1", 10, 32, None, 0, "applied")
    assert times == pytest.approx([9.0, 9.0, 9.0, 9.2, 9.7, 9.8, 10.0])
    assert snapshot["shares"] == pytest.approx({"computing": 0.5, "pulling": 0.2, "pushing": 0.2, "waiting": 0.1})
    assert snapshot["figures"]["recent_iteration_seconds"] == pytest.approx(1.0)


def test_a_simulated_iteration_is_split_by_its_transfers() -> None:
    """The shares of the workers' time add up, and agree with the report."""
    events = recorded("r2sp")
    snapshot, report = state_of(events).snapshot(), report_of(events)
    assert sum(snapshot["shares"].values()) == pytest.approx(1.0)
    assert snapshot["figures"]["recent_iteration_seconds"] == pytest.approx(report.mean_iteration_seconds, rel=0.1)
    assert snapshot["links"]["in"][-1][1] <= 1.0


def test_changes_are_those_since_the_last_time() -> None:
    events = a_job()
    state = state_of(events)
    assert len(state.changes(slow=False)["iterations"]) == 20
    assert state.changes(slow=False)["iterations"] == []
    for event in one_iteration(0, 11, 10.0)[:-1]:
        state.tell(event)
    (undecided,) = state.changes(slow=False)["iterations"]
    state.tell(one_iteration(0, 11, 10.0, staleness=3)[-1])
    (decided,) = state.changes(slow=False)["iterations"]
    assert undecided[0] == decided[0], "the same iteration, told again"
    assert undecided[-2:] == [None, ""]
    assert decided[-2:] == [3, "applied"]


def test_another_run_replaces_the_one_before() -> None:
    state = state_of([*recorded("bsp"), *recorded("r2sp")])
    snapshot = state.snapshot()
    assert snapshot["job"]["policy"] == "r2sp"
    assert snapshot["figures"]["updates"] == report_of(recorded("r2sp")).updates
    (before,) = snapshot["runs"]
    assert before["policy"] == "bsp"
    assert before["iteration_seconds"] == report_of(recorded("bsp")).mean_iteration_seconds


def endless(workers: int) -> Any:
    """The events of a job with many workers, metrics and names, without an end."""
    yield Began(0.0, "", "asp", "whole", 0)
    for worker in range(workers):
        yield Joined(0.0, worker)
    version = 0
    for iteration in count(1):
        for worker in range(workers):
            version += 1
            at = float(iteration)
            yield from one_iteration(worker, iteration, at, staleness=iteration % 7, loss=1.0 / version)[:-1]
            yield Applied(at + 1.0, version, (worker,), (iteration,), (0,), (1,))
            yield Used(at, "in", (version % 10) / 10)
            yield Measured(at, worker, f"metric {version % 100}", 0.5)
            yield Clipped(at, worker, iteration, 0.5)
            if version % 50 == 0:
                yield Left(at + 1.0, worker, True)
                yield Joined(at + 1.0, worker, version)


@pytest.mark.parametrize("workers", [8, MAX_ROWS + 1])
def test_the_memory_is_bounded(workers: int) -> None:
    """After 100,000 events, nobody having looked, the page holds a window of the job, and grows no more."""
    state, events = PageState(), endless(workers)
    for _ in range(100_000):
        state.tell(next(events))
    recent, happenings = state.recent, state.happenings
    assert len(recent.iterations) == MAX_ITERATIONS
    assert len(recent.take()) <= MAX_ITERATIONS
    assert len(recent.links["in"].items) <= MAX_LINK_POINTS
    assert len(recent.steps.items) <= MAX_STEPS
    assert len(happenings.newest) <= MAX_HAPPENINGS
    assert all(len(each["points"]) <= MAX_POINTS for each in state.curves.as_rows())
    assert len(state.curves.as_rows()) <= 7
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(20_000):
            state.tell(next(events))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What replaces older things is allocated anew: a window of iterations is 1.5 MB. The rest would be a leak.
    assert after - before < 4_000_000


def test_a_snapshot_is_bounded() -> None:
    state, events = PageState(), endless(16)
    for _ in range(100_000):
        state.tell(next(events))
    assert len(state.snapshot()["iterations"]) == MAX_SNAPSHOT
    assert sys.getsizeof(str(state.snapshot())) < 1_000_000
    assert len(state.changes(slow=False)["iterations"]) == MAX_CHANGES


def test_many_workers_are_drawn_as_distributions() -> None:
    state = state_of(a_job(workers=MAX_ROWS + 1, policy="fl-r2sp"))
    snapshot = state.snapshot()
    assert snapshot["workers"] == snapshot["iterations"] == []
    assert sum(snapshot["crowd"]["now"]) == MAX_ROWS + 1
    assert snapshot["crowd"]["updates"]["median"] == 10
    assert snapshot["crowd"]["iteration_seconds"]["median"] == pytest.approx(1.0)
    assert snapshot["steps"][-1][0] == 10.0
    assert "clients" in snapshot["sentences"]["health"][1]


@pytest.mark.parametrize(
    ("values", "counts"),
    [([1, 1, 2, 5], [2, 1, 0, 0, 1]), ([3, 3], [2]), ([0.5, 0.5], [2]), ([], None)],
)
def test_histograms_count_every_value(values: list[float], counts: list[int] | None) -> None:
    found = histogram(values)
    assert (found and found["counts"]) == counts


def test_a_histogram_of_many_numbers_has_few_bins() -> None:
    for values in (list(range(1000)), [each / 7 for each in range(1000)]):
        found = histogram(values)
        assert found is not None
        assert len(found["counts"]) <= 24
        assert sum(found["counts"]) == 1000
        assert found["from"] <= 0 < values[-1] <= found["to"]


def test_a_thinned_curve_keeps_the_means() -> None:
    curve = ThinnedCurve()
    for at in range(10_000):
        curve.add(float(at), float(at % 2))
    assert len(curve.points) <= MAX_POINTS
    assert all(value == 0.5 for _, value in curve.points)
    assert curve.points[-1][0] > 9_900


def test_happenings_of_the_same_kind_share_a_line() -> None:
    state = state_of([*a_job(workers=3, iterations=1), Left(1.5, 0, True), Left(1.6, 2, True), Joined(9.0, 0, 2)])
    texts = [text for _, _, text in state.snapshot()["happenings"]]
    assert texts[0] == "Worker 0 came back."
    assert texts[1] == "Workers 0 and 2 were lost."
    assert texts[2] == "Workers 0, 1 and 2 joined."


def test_checkpoints_and_exclusions_are_told() -> None:
    state = state_of(a_job())
    state.happenings.saved(10.0, 1234)
    state.happenings.exclude(11.0, {7: "its updates have little in common with those of the others (cosines 0.01)"})
    state.happenings.exclude(12.0, {})
    texts = [text for _, _, text in state.snapshot()["happenings"]]
    assert texts[:3] == [
        "Worker 7 was readmitted.",
        "Worker 7 was excluded: its updates have little in common with those of the others (cosines 0.01).",
        "A checkpoint of version 1,234 was written.",
    ]
    assert state.snapshot()["checkpoints"] == [(10.0, 1234)]


def test_the_workers_of_a_federation_are_called_clients() -> None:
    state = state_of([Began(0.0, "", "fl-r2sp", "whole", 0), Joined(1.0, 7), Left(2.0, 7, True)])
    state.happenings.exclude(11.0, {8: "its updates are noise"})
    texts = [text for _, _, text in state.snapshot()["happenings"]]
    assert texts[0] == "Client 8 was excluded: its updates are noise."
    assert texts[1].startswith("Client 7 was lost")
    assert not any("orker" in each for each in texts + [text for _, text in state.snapshot()["sentences"].values()])


def advice_after(iterations: int, computing: Callable[[int], float], workers: int = 2) -> Iterator[str]:
    """The advice after each iteration of a job under ASP. computing: the seconds that a worker computes."""
    state = state_of([Began(0.0, "", "asp", "whole", 0), *(Joined(0.0, worker) for worker in range(workers))])
    at = [0.0] * workers
    for _ in range(iterations * workers):
        worker = at.index(min(at))
        events = one_iteration(
            worker, state.recent.workers[worker].iteration + 1, at[worker], 0, 0.5, computing(worker)
        )
        at[worker] = events[-1].time
        for event in events:
            state.tell(event)
        yield advice(state.situation()).text


@pytest.mark.parametrize("workers", [2, 8])
def test_noise_makes_no_worker_slow(workers: int) -> None:
    """Equal workers of a busy machine: one iteration in ten takes six times as long."""
    noise = random.Random(0)
    said = advice_after(40, lambda _: noise.lognormvariate(-1.0, 0.2) * noise.choice([1] * 9 + [6]), workers)
    assert not [each for each in said if "as long as the others" in each]


def test_a_small_difference_makes_no_worker_slow() -> None:
    said = advice_after(20, lambda worker: 0.5 if worker else 0.7)
    assert not [each for each in said if "as long as the others" in each]


@pytest.mark.parametrize("workers", [2, 8])
def test_a_slow_worker_is_told_after_some_iterations(workers: int) -> None:
    noise = random.Random(0)
    said = list(advice_after(30, lambda worker: noise.uniform(0.99, 1.01) * (0.5 if worker else 1.5), workers))
    first = next(number for number, each in enumerate(said) if "as long as the others" in each)
    assert first >= LEAST_TYPICAL * workers, "each has had some iterations, and the slow worker the fewest"
    assert said[-1] == "Worker 0 computes 3.0 × as long as the others: r2sp:tune_batches=true gives it less."


@pytest.mark.parametrize(
    ("title", "cluster", "policy", "expected"),
    [
        ("train.py", "lab-1mb", "fl-r2sp", "train.py"),
        ("", "lab-1mb", "fl-r2sp:groups=4", "lab-1mb"),
        ("", "", "fl-r2sp:groups=4", "Federation"),
        ("", "", "bsp", ""),
    ],
)
def test_a_job_is_named_by_what_is_known_of_it(title: str, cluster: str, policy: str, expected: str) -> None:
    state = state_of([Began(0.0, cluster, policy, "whole", 0)], title=title)
    assert state.snapshot()["job"]["title"] == expected


def test_a_loss_that_is_no_number_is_told() -> None:
    state = state_of([*a_job(), *one_iteration(0, 11, 10.0, loss=float("nan"))])
    snapshot = state.snapshot()
    assert snapshot["figures"]["loss"] == "not a number"
    assert snapshot["sentences"]["health"][0] == "bad"


def test_a_job_that_has_not_begun_says_what_it_waits_for() -> None:
    state = PageState()
    for event in (Began(0.0, "", "bsp", "whole", 0), Awaited(1.0, 1, 2)):
        state.tell(event)
    assert state.snapshot()["sentences"]["health"][1] == "Waiting to begin: 1 worker joined, 2 more workers must join."


def test_the_time_goes_on_between_events_until_the_job_is_lost() -> None:
    clock = SimpleNamespace(now=100.0)
    state = PageState(clock=lambda: clock.now)
    for event in a_job():
        state.tell(event)
    clock.now += 3.0
    assert state.now() == 13.0
    state.lose()
    assert state.state == "lost"
    assert state.now() == 10.0
    state.tell(Left(11.0, 0))
    state.tell(Left(11.0, 1))
    assert state.state == "running"
    state.lose()
    assert state.state == "ended", "all workers have left, so the job is done"
