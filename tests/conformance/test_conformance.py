"""One suite for all policies and all drivers: it judges the trace of each combination."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from conformance.judge import Judge, judge_of
from paceline.observe.driver import Driver, Fault, Job
from paceline.observe.trace import (
    Applied,
    Arrived,
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
)
from paceline.policies import make, names
from paceline.simulate.driver import colocated, simulated
from pairs import parametrize_pairs

#: The drivers of policies. New drivers belong here too.
DRIVERS: dict[str, Driver] = {"simulated": simulated, "colocated": colocated}
try:
    from conformance.served import served

    DRIVERS["served"] = served
except ImportError:  # without torch there is no real server
    pass
#: The drivers that give the same trace for the same job.
REPEATABLE = {"simulated", "colocated"}

VARIANTS = [
    "bsp:backup=1",
    "bsp:fraction=0.6",
    "bsp:pipeline=true",
    "bsp:tune_batches=true",
    "ksync:k=2",
    "kbatch:k=7",
    "ssp:staleness=0",
    "ssp:staleness=1",
    "ssp:staleness=2,wait=at",
    "dssp:low=1,high=4",
    "dssp:low=1,high=4,bound=none",
    "dssp:low=1,high=4,bound=staleness",
    "r2sp:groups=2",
    "r2sp:groups=3",
    "r2sp:groups=auto",
    "r2sp:patience=0.5",
    "r2sp:tune_batches=true",
    "safa:fraction=0.3,lag=1",
    "safa:limit=2",
    "groups:count=2,inner=(bsp:fraction=0.5)",
    "groups:count=2,inner=ssp,outer=bsp",
    "groups:count=2,inner=r2sp,outer=ssp",
]
POLICIES = names() + VARIANTS
RUNS = [(spec, False) for spec in POLICIES] + [(spec, True) for spec in POLICIES if make(spec).streamable]

JOBS = {
    "even": Job((1.0,) * 6, iterations=12),
    "mixed": Job((1.0, 1.3, 1.0, 2.5, 1.7), iterations=12, seed=1),
    "pair": Job((1.0, 3.0), iterations=15, seed=2),
    "alone": Job((1.0,), iterations=8),
}
FAULTS = {
    # The lease is three times the slowest worker's time, 6 seconds.
    "kill and rejoin": (
        Fault(3.3, 1, "kill"),
        Fault(5.0, 1, "rejoin"),
        Fault(8.0, 0, "kill"),
        Fault(25.0, 0, "rejoin"),
    ),
    "hang": (Fault(2.2, 2, "pause", 1.5), Fault(6.1, 0, "pause", 11.0), Fault(7.0, 3, "pause", 40.0)),
    "cut": (
        Fault(2.05, 0, "cut", 1.0),
        Fault(4.4, 3, "cut", 9.0),
        Fault(4.4, 1, "cut", 5.9),
        Fault(4.4, 2, "cut", 6.1),
    ),
    "all but one": tuple(Fault(4.0 + worker / 10, worker, "kill") for worker in (0, 1, 2)),
    "all, one after the other": tuple(
        fault
        for worker in range(4)
        for fault in (Fault(4.0 + worker, worker, "kill"), Fault(14.0 + worker, worker, "rejoin"))
    ),
}

with_every_simulation = pytest.mark.parametrize(
    "driver", sorted(REPEATABLE)
)  # tests/faults covers the faults of the server


def _cases(driver: str, specs: Collection[str] = POLICIES) -> list[Any]:
    """Return the policies, whole and streamed, with this driver. Other policies than `specs` belong to the matrix."""
    return [
        pytest.param(
            *(driver, spec, streamed),
            id=f"{driver}-{spec}{' streamed' if streamed else ''}",
            marks=() if spec in specs else pytest.mark.matrix,
        )
        for spec, streamed in RUNS
    ]


def _specs(job: str, driver: str) -> Collection[str]:
    """Return the policies that a driver runs in every run of the tests.

    The simulation runs every job with every policy. The jobs with equal workers and with two workers test nothing else
    in another driver than the jobs with unequal workers and with a single one. A real server is slow, and knows nothing
    of a policy's options.
    """
    if driver == "simulated":
        return POLICIES
    if job not in ("mixed", "alone"):
        return ()
    return POLICIES if driver in REPEATABLE else names()


def run(driver: str, spec: str, job: Job) -> tuple[list[Event], Judge]:
    events = list(DRIVERS[driver](make(spec), job))
    return events, judge_of(spec, job.streamed).watch(events)


@pytest.mark.parametrize(
    ("job", "driver", "spec", "streamed"),
    [
        pytest.param(job, *case.values, id=f"{job}-{case.id}", marks=case.marks)
        for job in JOBS
        for driver in DRIVERS
        for case in _cases(driver, _specs(job, driver))
    ],
)
def test_the_trace_is_valid_and_the_policy_keeps_its_promise(driver: str, spec: str, streamed: bool, job: str) -> None:
    asked = _streamed(JOBS[job], streamed)
    _, judge = run(driver, spec, asked)
    workers = len(asked.compute_seconds)
    assert judge.arrivals >= asked.iterations * workers
    assert judge.version > 0
    assert judge.discarded + judge.applied + len(judge.waiting) <= judge.arrivals
    assert len(judge.waiting) <= max(workers, 7), "more updates are undecided than members and K explain"
    assert min(judge.granted_ever[worker] for worker in range(workers)) >= asked.iterations // 4, "a worker was starved"
    assert judge.departures == 0


@parametrize_pairs(("driver", "run_of", "faults"), sorted(REPEATABLE), RUNS, list(FAULTS))
def test_the_promise_holds_when_workers_fail(driver: str, run_of: tuple[str, bool], faults: str) -> None:
    spec, streamed = run_of
    job = _streamed(Job((1.0, 1.2, 1.0, 2.0), iterations=14, seed=3, faults=FAULTS[faults]), streamed)
    _, judge = run(driver, spec, job)
    assert judge.arrivals >= job.iterations * 4
    assert judge.departures > 0, "these faults should make a worker leave"


@pytest.mark.parametrize(("driver", "spec", "streamed"), [*_cases("simulated"), *_cases("colocated", names())])
def test_the_same_job_gives_the_same_trace(driver: str, spec: str, streamed: bool) -> None:
    job = _streamed(Job((1.0, 1.2, 1.0, 2.0), iterations=8, faults=FAULTS["kill and rejoin"]), streamed)
    first, again = ([as_line(event) for event in run(driver, spec, job)[0]] for _ in range(2))
    assert first == again


@with_every_simulation
@pytest.mark.parametrize("streamed", [False, True])
def test_dssp_with_low_equal_to_high_is_ssp(driver: str, streamed: bool) -> None:
    job = _streamed(JOBS["mixed"], streamed)
    ssp, _ = run(driver, "ssp:staleness=2", job)
    for bound in ("gap", "none"):
        dssp, _ = run(driver, f"dssp:low=2,high=2,bound={bound}", job)
        assert dssp == ssp


@with_every_simulation
def test_pipelining_changes_only_the_time(driver: str) -> None:
    plain, _ = run(driver, "bsp", JOBS["mixed"])
    pipelined, _ = run(driver, "bsp:pipeline=true", JOBS["mixed"])
    assert _rounds(pipelined) == _rounds(plain)
    # If workers and shards share links, pushes and pulls gain nothing by overlapping.
    assert pipelined[-1].time < plain[-1].time * (1.01 if driver == "colocated" else 1.0)


@pytest.mark.parametrize(
    ("driver", "streamed"),
    [*((driver, False) for driver in DRIVERS), *((driver, True) for driver in sorted(REPEATABLE))],
)
def test_r2sp_keeps_the_order_of_the_ring(driver: str, streamed: bool) -> None:
    # On a busy machine a real worker may be overdue, so be patient.
    events, judge = run(driver, "r2sp:patience=1000", _streamed(JOBS["mixed"], streamed))
    ring = [event.worker for event in events if isinstance(event, Joined)]
    workers = [worker for event in events if isinstance(event, Applied) for worker in event.workers]
    started = workers.index(ring[-1]) + 1  # the pilot, the first of the ring, may have taken several turns alone
    assert started <= 6
    assert workers[started:] == [ring[i % 5] for i in range(len(workers) - started)]
    assert judge.version >= 5 * 10


def test_the_judge_rejects_invalid_traces() -> None:
    """A judge that accepts every trace would prove nothing."""
    events, _ = run("simulated", "ssp:staleness=1", JOBS["mixed"])
    applied = next(i for i, event in enumerate(events) if isinstance(event, Applied))
    ahead = next(i for i, event in enumerate(events) if isinstance(event, Granted) and event.progress_gap == 1)
    arrived = applied - 1

    def fails(change: Callable[[list[Event]], object], spec: str = "ssp:staleness=1") -> None:
        changed = list(events)
        change(changed)
        with pytest.raises((AssertionError, KeyError)):
            judge_of(spec).watch(changed)

    def replaced(index: int, **fields: object) -> Callable[[list[Event]], None]:
        def change(changed: list[Event]) -> None:
            changed[index] = changed[index]._replace(**fields)  # type: ignore[arg-type]

        return change

    fails(lambda changed: changed.pop(arrived))
    fails(lambda changed: changed.insert(applied, changed[applied]))
    fails(lambda changed: changed.pop(applied))
    fails(lambda changed: changed.pop(0))
    fails(lambda changed: changed.reverse())
    fails(replaced(applied, version=2))
    fails(replaced(applied, staleness=(7,)))
    fails(replaced(ahead, progress_gap=0))
    fails(replaced(arrived, iteration=9))
    fails(lambda changed: None, "ssp:staleness=0")
    fails(lambda changed: None, "bsp")
    fails(lambda changed: None, "r2sp:groups=1")


def _lives(*incarnations: int) -> list[Event]:
    """Return the events of a worker that joins once as each incarnation and makes one update from version 0."""
    events: list[Event] = []
    for incarnation in incarnations:
        events += [Joined(1.0, 0, incarnation), Granted(1.0, 0, None, 0), Pulled(1.0, 0, 0), Computed(2.0, 0)]
        events += [Turned(2.0, 0), Arrived(2.0, 0, 1, 32, None, incarnation), Left(2.0, 0)]
    return [event._replace(time=float(time)) for time, event in enumerate(events)]


def _settled(how: str, incarnation: int) -> Event:
    match how:
        case "applied":
            return Applied(99.0, 1, (0,), (1,), (0,), (incarnation,))
        case "kept":
            return Kept(99.0, 0, 1, 7, incarnation)
        case _:
            return Discarded(99.0, 0, 1, incarnation)


@pytest.mark.parametrize("how", ["applied", "kept", "discarded"])
def test_the_judge_identifies_updates_by_their_incarnation(how: str) -> None:
    judge = Judge().watch([*_lives(1, 2), _settled(how, 2)])
    assert list(judge.waiting) == [(0, 1, 1)], "the update of the old incarnation is still undecided"
    judge = Judge().watch([*_lives(1, 2), _settled(how, 1)])
    assert list(judge.waiting) == [(0, 2, 1)]


@pytest.mark.parametrize("how", ["applied", "kept", "discarded"])
def test_the_judge_rejects_an_update_under_the_wrong_incarnation(how: str) -> None:
    new_has_nothing = [*_lives(1), Joined(50.0, 0, 2)]
    with pytest.raises(AssertionError, match="incarnation 2 has not arrived"):
        Judge().watch([*new_has_nothing, _settled(how, 2)])
    Judge().watch([*new_has_nothing, _settled(how, 1)])
    new_is_settled = [*_lives(1, 2), Discarded(50.0, 0, 1, 2)]
    with pytest.raises(AssertionError, match="incarnation 2 has not arrived or is settled already"):
        Judge().watch([*new_is_settled, _settled(how, 2)])
    Judge().watch([*new_is_settled, _settled(how, 1)])


def test_the_judge_rejects_impossible_incarnations() -> None:
    with pytest.raises(AssertionError, match="no new incarnation"):
        Judge().watch(_lives(1, 1))
    old = [*_lives(1), *_lives(2)[:-2], Arrived(99.0, 0, 1, 32, None, 1)]
    with pytest.raises(AssertionError):
        Judge().watch([event._replace(time=99.0) for event in old])
    unnamed = Applied(99.0, 1, (0,), (1,), (0,))
    with pytest.raises(AssertionError):
        Judge().watch([*_lives(1), unnamed])


def _streamed(job: Job, streamed: bool) -> Job:
    return Job(job.compute_seconds, job.iterations, job.faults, streamed, job.seed)


def _rounds(events: list[Event]) -> list[list[int]]:
    return [sorted(event.workers) for event in events if isinstance(event, Applied)]
