"""Machines that die, hang, lose their link and come back: the others go on, and the books stay right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.judge import Judge, judge_of
from paceline.observe.driver import Fault
from paceline.observe.observer import Recorder
from paceline.observe.trace import (
    Applied,
    Arrived,
    Cancelled,
    Computed,
    Event,
    Granted,
    Joined,
    Left,
    Pulled,
    Pulling,
    Pushing,
    Turned,
)
from paceline.policies import make, names
from paceline.simulate import Cluster, ClusterSpec, SimulationError, WorkerSpec, load_cluster
from paceline.simulate.random_faults import chaos

LEASE = 5.0
SECOND = 100e6  # the bytes that a worker's link carries in one
#: Name, and whether it is streamed.
POLICIES = [
    ("bsp", False),
    ("bsp:pipeline=true", False),
    ("bsp:backup=1", False),
    ("asp", False),
    ("asp", True),
    ("ssp", False),
    ("ssp:staleness=1", True),
    ("dssp", False),
    ("ksync:k=2", False),
    ("kbatch", False),
    ("r2sp", False),
    ("r2sp", True),
    ("r2sp:groups=3", False),
    ("r2sp:groups=auto", False),
    ("r2sp:tune_batches=true", False),
    ("safa", False),
    ("safa:limit=3", False),
    ("fedbuff:k=2", False),
    ("filtered:policy=(bsp:fraction=0.5)", False),
    ("fl-r2sp:groups=2", False),
    ("groups", False),
    ("groups:count=2,inner=(bsp:fraction=0.5)", False),
    ("rlp", False),
]
with_every_policy = pytest.mark.parametrize(
    ("policy", "streamed"), POLICIES, ids=[f"{name} streamed" if streamed else name for name, streamed in POLICIES]
)


def cluster(
    *faults: Fault, workers: int = 4, compute: float = 1.0, transfer: float = 0.2, colocate: bool = False
) -> ClusterSpec:
    """Workers who compute for a second and push and pull for a fifth of one, at best."""
    spec = ClusterSpec(
        name="faulty",
        model_bytes=transfer * SECOND,
        servers=2,
        server_link=SECOND,
        latency=0.001,
        apply_rate=20 * SECOND,
        lease=LEASE,
        workers=(WorkerSpec(SECOND, 32, 32 / compute),) * workers,
        faults=faults,
    )
    return spec.colocated() if colocate else spec


def run(
    spec: ClusterSpec, policy: str, streamed: bool = False, iterations: int = 10, seed: int = 0
) -> tuple[list[Event], Judge]:
    events: list[Event] = []
    Cluster(spec, make(policy), iterations, seed, streamed, Recorder(events.append)).run()
    return events, judge_of(policy, streamed).watch(events)


def times(events: list[Event], kind: type, worker: int) -> list[float]:
    return [event.time for event in events if isinstance(event, kind) and getattr(event, "worker", None) == worker]


# Kill


@with_every_policy
def test_a_killed_worker_leaves_when_its_lease_runs_out_and_the_others_go_on(policy: str, streamed: bool) -> None:
    events, judge = run(cluster(Fault(3.05, 1, "kill")), policy, streamed)
    assert times(events, Left, 1) == [pytest.approx(3.05 + LEASE)]
    assert all(time <= 3.05 for kind in (Pulled, Computed, Arrived) for time in times(events, kind, 1))
    assert judge.arrivals >= 40
    assert min(len(times(events, Granted, worker)) for worker in (0, 2, 3)) >= 5


@with_every_policy
def test_a_killed_worker_that_rejoins_at_once_is_a_new_one(policy: str, streamed: bool) -> None:
    events, judge = run(cluster(Fault(3.05, 1, "kill"), Fault(3.5, 1, "rejoin")), policy, streamed, iterations=16)
    assert times(events, Left, 1) == [3.5]
    assert times(events, Joined, 1) == [0.0, 3.5]
    assert any(time >= 3.5 for time in times(events, Granted, 1))
    assert judge.done.keys() == {0, 1, 2, 3}


@with_every_policy
def test_a_killed_worker_comes_back_long_after(policy: str, streamed: bool) -> None:
    events, judge = run(cluster(Fault(3.05, 1, "kill"), Fault(12.0, 1, "rejoin")), policy, streamed, iterations=16)
    assert times(events, Left, 1) == [pytest.approx(8.05)]
    assert times(events, Joined, 1) == [0.0, 12.0]
    assert judge.done.keys() == {0, 1, 2, 3}
    assert len([time for time in times(events, Granted, 1) if time >= 12.0]) >= 2


@with_every_policy
def test_when_everyone_is_killed_the_run_ends_with_a_plain_word(policy: str, streamed: bool) -> None:
    faults = [Fault(3.0 + worker / 10, worker, "kill") for worker in range(4)]
    with pytest.raises(
        SimulationError, match=r"nobody can go on, with \d+ of 40 iterations done; the faults have left"
    ):
        run(cluster(*faults), policy, streamed)


@with_every_policy
def test_when_everyone_was_killed_one_may_come_back(policy: str, streamed: bool) -> None:
    faults = [Fault(3.0 + worker / 10, worker, "kill") for worker in range(4)]
    if policy == "kbatch":
        faults.append(Fault(21.0, 1, "rejoin"))
    _, judge = run(cluster(*faults, Fault(20.0, 2, "rejoin")), policy, streamed)
    assert judge.arrivals >= 40
    assert 2 in judge.done


def test_the_dead_do_not_push() -> None:
    """Streamed, r2sp may give a Turn to one who has died since it asked for it."""
    spec = cluster(workers=6, transfer=1.0)
    calm, _ = run(spec, "r2sp", streamed=True)
    waits = [event for event in calm if isinstance(event, Computed) and event.time > 10]
    for computed in waits[:6]:
        died = computed.time + 1e-6
        events, _ = run(replace(spec, faults=(Fault(died, computed.worker, "kill"),)), "r2sp", streamed=True)
        assert all(time <= died for time in times(events, Arrived, computed.worker))


def test_the_dead_do_not_wait_at_the_gates() -> None:
    """Where transfers are let onto the servers' links in turn, one may die in the queue."""
    spec = load_cluster("r2sp-a-vgg16").with_jitter(0.5)
    calm, _ = run(spec, "r2sp", iterations=6)
    waits: dict[type, list[tuple[int, float]]] = {Pushing: [], Pulling: []}
    since: dict[tuple[type, int], float] = {}
    for event in calm:
        if isinstance(event, Turned | Granted):
            since[Pushing if isinstance(event, Turned) else Pulling, event.worker] = event.time
        elif isinstance(event, Pushing | Pulling):
            began = since[type(event), event.worker]
            if event.time > began + 0.05:
                waits[type(event)].append((event.worker, (began + event.time) / 2))
    for kind, waited in waits.items():
        assert waited, "this cluster was to make them wait"
        for worker, died in waited[:4]:
            events, _ = run(replace(spec, faults=(Fault(died, worker, "kill"),)), "r2sp", iterations=6)
            assert all(time <= died for time in times(events, kind, worker))


def test_killing_the_dead_changes_nothing() -> None:
    once, _ = run(cluster(Fault(3.05, 1, "kill")), "r2sp")
    twice, _ = run(cluster(Fault(3.05, 1, "kill"), Fault(4.0, 1, "kill"), Fault(4.5, 1, "pause", 2.0)), "r2sp")
    assert twice == once


def test_rejoining_without_having_left_changes_nothing() -> None:
    calm, _ = run(cluster(), "r2sp")
    assert run(cluster(Fault(3.05, 1, "rejoin")), "r2sp")[0] == calm


def test_a_push_that_was_cut_half_way_never_happened() -> None:
    spec = cluster(transfer=1.0)
    calm, _ = run(spec, "asp")
    first = times(calm, Arrived, 1)[0]
    events, judge = run(replace(spec, faults=(Fault(first - 0.01, 1, "kill"),)), "asp")
    assert times(events, Arrived, 1) == []
    assert not any(1 in event.workers for event in events if isinstance(event, Applied))
    assert judge.applied == judge.arrivals


def test_what_had_arrived_before_the_end_still_counts() -> None:
    calm, _ = run(cluster(), "bsp")
    first = times(calm, Arrived, 1)[0]
    # It dies a moment after its update was in, while the barrier waits for one who hangs.
    events, _ = run(cluster(Fault(0.5, 3, "pause", 3.0), Fault(first + 0.01, 1, "kill")), "bsp")
    applied = next(event for event in events if isinstance(event, Applied))
    assert 1 in applied.workers


# Pause


@with_every_policy
def test_a_short_pause_delays_and_no_more(policy: str, streamed: bool) -> None:
    events, judge = run(cluster(Fault(3.05, 1, "pause", 0.9 * LEASE)), policy, streamed)
    assert judge.departures == 0
    assert judge.arrivals >= 40
    computed = times(events, Computed, 1)
    assert not any(3.05 < time < 3.05 + 0.9 * LEASE for time in computed)
    assert len(judge.done) == 4


@with_every_policy
def test_a_long_pause_costs_the_membership_and_it_joins_again(policy: str, streamed: bool) -> None:
    events, judge = run(cluster(Fault(3.05, 1, "pause", 2 * LEASE)), policy, streamed, iterations=16)
    assert times(events, Left, 1) == [pytest.approx(3.05 + LEASE)]
    assert times(events, Joined, 1) == [0.0, pytest.approx(3.05 + 2 * LEASE)]
    assert judge.done.keys() == {0, 1, 2, 3}


def test_a_pause_makes_an_iteration_just_so_much_longer() -> None:
    calm, _ = run(cluster(workers=1), "asp")
    first, second = times(calm, Computed, 0)[:2]
    paused, _ = run(cluster(Fault(first - 0.3, 0, "pause", 2.0), workers=1), "asp")
    assert times(paused, Computed, 0)[:2] == [pytest.approx(first + 2.0), pytest.approx(second + 2.0)]


def test_a_pause_within_a_pause_adds_nothing() -> None:
    calm, _ = run(cluster(workers=1), "asp")
    first = times(calm, Computed, 0)[0]
    begin = first - 0.3
    inner = (Fault(begin, 0, "pause", 2.0), Fault(begin + 0.5, 0, "pause", 1.0))
    assert times(run(cluster(*inner, workers=1), "asp")[0], Computed, 0)[0] == pytest.approx(first + 2.0)
    overlapping = (Fault(begin, 0, "pause", 2.0), Fault(begin + 1.5, 0, "pause", 1.0))
    assert times(run(cluster(*overlapping, workers=1), "asp")[0], Computed, 0)[0] == pytest.approx(first + 2.5)


def test_short_silences_that_follow_each_other_add_up_to_a_long_one() -> None:
    faults = (Fault(3.0, 1, "pause", 3.0), Fault(5.5, 1, "cut", 3.0), Fault(8.2, 1, "pause", 3.0))
    events, _ = run(cluster(*faults), "asp", iterations=16)
    assert times(events, Left, 1) == [pytest.approx(3.0 + LEASE)]
    assert times(events, Joined, 1) == [0.0, pytest.approx(11.2)], "it comes back when the last of them is over"


def test_a_pause_holds_up_what_has_not_begun_to_compute() -> None:
    calm, _ = run(cluster(workers=1), "asp")
    pulled = times(calm, Pulled, 0)[1]
    paused, _ = run(cluster(Fault(pulled - 0.1, 0, "pause", 2.0), workers=1), "asp")
    assert times(paused, Pulled, 0)[1] == pytest.approx(pulled), "transfers go on by themselves"
    assert times(paused, Computed, 0)[1] == pytest.approx(pulled - 0.1 + 2.0 + 1.0)


def test_nothing_is_returned_to_one_who_has_left() -> None:
    """Streamed over a slow line: it is given up while the first slice of what it pushed is still to come back."""
    spec = replace(cluster(transfer=2.0), latency=0.5, lease=1.0)
    calm, _ = run(spec, "asp", streamed=True)
    for worker in range(4):
        push = times(calm, Computed, worker)[1]
        fault = Fault(push + 0.5, worker, "pause", 2.5)
        events, judge = run(replace(spec, faults=(fault,)), "asp", streamed=True)
        assert times(events, Left, worker) == [pytest.approx(push + 1.5)]
        assert not any(push + 1.5 < time < push + 3.0 for time in times(events, Pulled, worker))
        assert judge.arrivals >= 40


# Cut


@with_every_policy
@pytest.mark.parametrize("at", [2.4, 3.05, 3.6])
def test_a_short_cut_delays_and_no_more(policy: str, streamed: bool, at: float) -> None:
    events, judge = run(cluster(Fault(at, 1, "cut", 0.9 * LEASE), transfer=0.6), policy, streamed, iterations=14)
    assert judge.departures == 0
    assert not any(at < time < at + 0.9 * LEASE for time in times(events, Arrived, 1))


@with_every_policy
@pytest.mark.parametrize("at", [2.4, 3.05, 3.6])
def test_a_long_cut_costs_the_membership_and_it_joins_again(policy: str, streamed: bool, at: float) -> None:
    events, judge = run(cluster(Fault(at, 1, "cut", 2 * LEASE), transfer=0.6), policy, streamed, iterations=16)
    assert times(events, Left, 1) == [pytest.approx(at + LEASE)]
    assert times(events, Joined, 1) == [0.0, pytest.approx(at + 2 * LEASE)]
    assert judge.done.keys() == {0, 1, 2, 3}


def test_after_a_cut_a_transfer_goes_on_where_it_was() -> None:
    calm, _ = run(cluster(workers=1, transfer=1.0), "asp")
    arrived = times(calm, Arrived, 0)[0]
    for at in (arrived - 0.9, arrived - 0.01):
        cut, _ = run(cluster(Fault(at, 0, "cut", 2.0), workers=1, transfer=1.0), "asp")
        assert times(cut, Arrived, 0)[0] == pytest.approx(arrived + 2.0)


def test_a_cut_frees_the_servers_links_for_the_others() -> None:
    spec = replace(cluster(workers=2, transfer=1.0), servers=1)
    calm, _ = run(spec, "asp")
    assert times(calm, Arrived, 0)[0] == pytest.approx(times(calm, Arrived, 1)[0])
    push = times(calm, Computed, 0)[0]
    cut, _ = run(replace(spec, faults=(Fault(push, 1, "cut", 4.0),)), "asp")
    assert times(cut, Arrived, 0)[0] == pytest.approx(push + 1.0)
    assert times(calm, Arrived, 0)[0] == pytest.approx(push + 2.0)


def test_a_cut_within_a_cut() -> None:
    calm, _ = run(cluster(workers=1, transfer=1.0), "asp")
    arrived = times(calm, Arrived, 0)[0]
    faults = (Fault(arrived - 0.5, 0, "cut", 2.0), Fault(arrived, 0, "cut", 3.0), Fault(arrived + 1, 0, "cut", 0.1))
    cut, _ = run(cluster(*faults, workers=1, transfer=1.0), "asp")
    assert times(cut, Arrived, 0)[0] == pytest.approx(arrived + 3.0 + 0.5)


# R²SP in particular


@pytest.mark.parametrize("streamed", [False, True])
def test_one_who_hangs_loses_its_turn_but_not_its_place(streamed: bool) -> None:
    spec = replace(cluster(Fault(12.3, 1, "pause", 20.0)), lease=100.0)
    events, judge = run(spec, "r2sp", streamed, iterations=24)
    assert judge.departures == 0
    applied = [event for event in events if isinstance(event, Applied)]
    meanwhile = Counter(worker for event in applied if 20 < event.time < 32 for worker in event.workers)
    assert meanwhile[1] == 0
    assert min(meanwhile[worker] for worker in (0, 2, 3)) >= 3
    later = [worker for event in applied if event.time > 36 for worker in event.workers]
    begin = later.index(0)
    assert later[begin : begin + 8] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_streamed_a_push_that_hangs_is_abandoned_and_its_worker_starts_again() -> None:
    spec = replace(cluster(transfer=1.0), lease=1000.0)
    calm, _ = run(spec, "r2sp", streamed=True)
    push = next(event.time for event in calm if isinstance(event, Pushing) and event.worker == 1 and event.time > 15)
    for into in (0.01, 0.5):  # before a first slice has come back, and while they come
        fault = Fault(push + into, 1, "cut", 40.0)
        events, judge = run(replace(spec, faults=(fault,)), "r2sp", streamed=True, iterations=24)
        cancelled, *later = times(events, Cancelled, 1)
        assert push < cancelled < push + 40
        assert all(time > push + 40 for time in later)  # what it began before the link was back is overdue too
        assert not any(push < time < push + 40 for kind in (Arrived, Computed) for time in times(events, kind, 1))
        meanwhile = [event for event in events if isinstance(event, Applied) and cancelled < event.time < push + 40]
        assert {worker for event in meanwhile for worker in event.workers} == {0, 2, 3}
        assert any(time > push + 40 for time in times(events, Arrived, 1))
        assert judge.departures == judge.discarded == 0


# Chaos


@pytest.mark.parametrize("seed", range(12))
@with_every_policy
def test_chaos_from_a_seed(policy: str, streamed: bool, seed: int) -> None:
    calm = replace(cluster(transfer=0.4, colocate=seed % 3 == 2), lease=2.0 + seed % 3).with_jitter(0.2)
    spec = chaos(calm, count=12, iterations=12, seed=seed)
    events, judge = run(spec, policy, streamed, iterations=12, seed=seed)
    assert judge.arrivals >= 48
    assert judge.version > 0
    again, _ = run(spec, policy, streamed, iterations=12, seed=seed)
    assert again == events


def test_chaos_is_the_same_for_the_same_seed() -> None:
    spec = load_cluster("r2sp-a-vgg16")
    first = chaos(spec, 20, 50, seed=1)
    assert chaos(spec, 20, 50, seed=1) == first
    assert chaos(spec, 20, 50, seed=2) != first
    kinds = Counter(fault.kind for fault in first.faults)
    assert kinds["kill"] == kinds["rejoin"]
    assert kinds["kill"] + kinds["pause"] + kinds["cut"] == 20
    assert all(fault.time >= 0 and 0 <= fault.worker < 16 for fault in first.faults)


def test_chaos_comes_on_top_of_the_faults_there_are() -> None:
    spec = cluster(Fault(1.0, 0, "pause", 1.0))
    assert chaos(spec, 3, 10, seed=0).faults[0] == spec.faults[0]
    assert chaos(spec, 0, 10, seed=0) == spec


SCRIPTS = st.lists(
    st.builds(
        Fault,
        time=st.floats(0.0, 15.0),
        worker=st.integers(0, 3),
        kind=st.sampled_from(["kill", "pause", "cut", "rejoin"]),
        seconds=st.floats(0.0, 3 * LEASE),
    ),
    max_size=10,
)


@settings(derandomize=True, deadline=None, max_examples=250)
@given(SCRIPTS, st.sampled_from(POLICIES), st.sampled_from([0.05, 0.4, 2.0]), st.booleans())
def test_any_script_of_faults(script: list[Fault], run_as: tuple[str, bool], transfer: float, colocate: bool) -> None:
    """Whatever happens to them, if they all come back in the end the run is finished and the books are right."""
    policy, streamed = run_as
    back = [Fault(16.0 + worker, worker, "rejoin") for worker in range(4)]
    spec = cluster(*script, *back, transfer=transfer, colocate=colocate)
    _, judge = run(spec, policy, streamed, iterations=6)
    assert judge.arrivals >= 24


def test_every_policy_is_among_those_that_are_broken_here() -> None:
    assert {name.partition(":")[0] for name, _ in POLICIES} == set(names())
