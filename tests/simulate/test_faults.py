"""Machines that die, hang or lose their link and come back: the others continue, and the counts stay right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
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
from paceline.simulate.random_faults import with_random_faults
from tries import tries

LEASE = 5.0
SECOND = 100e6  # bytes that a worker's link carries in one second
#: Policies, and whether they are streamed.
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
    ("r2sp:groups=2", True),
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
IDS = [f"{name} streamed" if streamed else name for name, streamed in POLICIES]
with_every_policy = pytest.mark.parametrize(("policy", "streamed"), POLICIES, ids=IDS)


def cluster(
    *faults: Fault, workers: int = 4, compute: float = 1.0, transfer: float = 0.2, colocate: bool = False
) -> ClusterSpec:
    """Return a cluster whose workers compute for 1 s, and push and pull for 0.2 s at best."""
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
def test_a_killed_worker_leaves_when_its_lease_expires_and_the_others_continue(policy: str, streamed: bool) -> None:
    events, judge = run(cluster(Fault(3.05, 1, "kill")), policy, streamed)
    assert times(events, Left, 1) == [pytest.approx(3.05 + LEASE)]
    assert all(time <= 3.05 for kind in (Pulled, Computed, Arrived) for time in times(events, kind, 1))
    assert judge.arrivals >= 40
    assert min(len(times(events, Granted, worker)) for worker in (0, 2, 3)) >= 5


@with_every_policy
def test_a_killed_worker_that_rejoins_soon_is_a_new_incarnation(policy: str, streamed: bool) -> None:
    events, judge = run(cluster(Fault(3.05, 1, "kill"), Fault(3.5, 1, "rejoin")), policy, streamed, iterations=16)
    assert times(events, Left, 1) == [3.5]
    assert times(events, Joined, 1) == [0.0, 3.5]
    assert any(time >= 3.5 for time in times(events, Granted, 1))
    assert judge.done.keys() == {0, 1, 2, 3}


@with_every_policy
def test_a_killed_worker_rejoins_after_its_lease_has_expired(policy: str, streamed: bool) -> None:
    events, judge = run(cluster(Fault(3.05, 1, "kill"), Fault(12.0, 1, "rejoin")), policy, streamed, iterations=16)
    assert times(events, Left, 1) == [pytest.approx(8.05)]
    assert times(events, Joined, 1) == [0.0, 12.0]
    assert judge.done.keys() == {0, 1, 2, 3}
    assert len([time for time in times(events, Granted, 1) if time >= 12.0]) >= 2


@with_every_policy
def test_when_all_workers_are_killed_the_run_ends_with_a_clear_error(policy: str, streamed: bool) -> None:
    faults = [Fault(3.0 + worker / 10, worker, "kill") for worker in range(4)]
    with pytest.raises(
        SimulationError, match=r"no worker can continue, with \d+ of 40 iterations done; the faults have left"
    ):
        run(cluster(*faults), policy, streamed)


@with_every_policy
def test_when_all_workers_were_killed_one_may_rejoin(policy: str, streamed: bool) -> None:
    faults = [Fault(3.0 + worker / 10, worker, "kill") for worker in range(4)]
    if policy == "kbatch":
        faults.append(Fault(21.0, 1, "rejoin"))
    _, judge = run(cluster(*faults, Fault(20.0, 2, "rejoin")), policy, streamed)
    assert judge.arrivals >= 40
    assert 2 in judge.done


def test_a_dead_worker_does_not_push() -> None:
    """When streamed, r2sp may give a Turn to a worker that has died since it was ready."""
    spec = cluster(workers=6, transfer=1.0)
    calm, _ = run(spec, "r2sp", streamed=True)
    waits = [event for event in calm if isinstance(event, Computed) and event.time > 10]
    for computed in waits[:6]:
        died = computed.time + 1e-6
        events, _ = run(replace(spec, faults=(Fault(died, computed.worker, "kill"),)), "r2sp", streamed=True)
        assert all(time <= died for time in times(events, Arrived, computed.worker))


def test_a_dead_worker_does_not_wait_at_the_gates() -> None:
    """A worker may die while it waits at the gate to the servers' links."""
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
        assert waited, "no transfer waited in this cluster"
        for worker, died in waited[:4]:
            events, _ = run(replace(spec, faults=(Fault(died, worker, "kill"),)), "r2sp", iterations=6)
            assert all(time <= died for time in times(events, kind, worker))


def test_killing_a_dead_worker_changes_nothing() -> None:
    once, _ = run(cluster(Fault(3.05, 1, "kill")), "r2sp")
    twice, _ = run(cluster(Fault(3.05, 1, "kill"), Fault(4.0, 1, "kill"), Fault(4.5, 1, "pause", 2.0)), "r2sp")
    assert twice == once


def test_rejoining_without_having_left_changes_nothing() -> None:
    calm, _ = run(cluster(), "r2sp")
    assert run(cluster(Fault(3.05, 1, "rejoin")), "r2sp")[0] == calm


def test_a_push_that_is_cut_off_has_no_effect() -> None:
    spec = cluster(transfer=1.0)
    calm, _ = run(spec, "asp")
    first = times(calm, Arrived, 1)[0]
    events, judge = run(replace(spec, faults=(Fault(first - 0.01, 1, "kill"),)), "asp")
    assert times(events, Arrived, 1) == []
    assert not any(1 in event.workers for event in events if isinstance(event, Applied))
    assert judge.applied == judge.arrivals


def test_an_update_that_arrived_before_its_worker_died_still_counts() -> None:
    calm, _ = run(cluster(), "bsp")
    first = times(calm, Arrived, 1)[0]
    # Worker 1 dies just after its update arrives, while the barrier waits for worker 3, which hangs.
    events, _ = run(cluster(Fault(0.5, 3, "pause", 3.0), Fault(first + 0.01, 1, "kill")), "bsp")
    applied = next(event for event in events if isinstance(event, Applied))
    assert 1 in applied.workers


# Pause


@with_every_policy
def test_a_short_pause_only_delays(policy: str, streamed: bool) -> None:
    events, judge = run(cluster(Fault(3.05, 1, "pause", 0.9 * LEASE)), policy, streamed)
    assert judge.departures == 0
    assert judge.arrivals >= 40
    computed = times(events, Computed, 1)
    assert not any(3.05 < time < 3.05 + 0.9 * LEASE for time in computed)
    assert len(judge.done) == 4


@with_every_policy
def test_a_worker_with_a_long_pause_loses_its_membership_and_joins_again(policy: str, streamed: bool) -> None:
    events, judge = run(cluster(Fault(3.05, 1, "pause", 2 * LEASE)), policy, streamed, iterations=16)
    assert times(events, Left, 1) == [pytest.approx(3.05 + LEASE)]
    assert times(events, Joined, 1) == [0.0, pytest.approx(3.05 + 2 * LEASE)]
    assert judge.done.keys() == {0, 1, 2, 3}


def test_a_pause_makes_an_iteration_longer_by_its_duration() -> None:
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


def test_consecutive_short_silences_add_up_to_a_long_one() -> None:
    faults = (Fault(3.0, 1, "pause", 3.0), Fault(5.5, 1, "cut", 3.0), Fault(8.2, 1, "pause", 3.0))
    events, _ = run(cluster(*faults), "asp", iterations=16)
    assert times(events, Left, 1) == [pytest.approx(3.0 + LEASE)]
    assert times(events, Joined, 1) == [0.0, pytest.approx(11.2)], "it joins when the last of them is over"


def test_a_pause_delays_the_start_of_a_computation() -> None:
    calm, _ = run(cluster(workers=1), "asp")
    pulled = times(calm, Pulled, 0)[1]
    paused, _ = run(cluster(Fault(pulled - 0.1, 0, "pause", 2.0), workers=1), "asp")
    assert times(paused, Pulled, 0)[1] == pytest.approx(pulled), "a pause does not stop transfers"
    assert times(paused, Computed, 0)[1] == pytest.approx(pulled - 0.1 + 2.0 + 1.0)


def test_nothing_is_returned_to_a_worker_that_has_left() -> None:
    """A streamed push over a slow link: the worker is given up before its first slice has come back."""
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
def test_a_short_cut_only_delays(policy: str, streamed: bool, at: float) -> None:
    events, judge = run(cluster(Fault(at, 1, "cut", 0.9 * LEASE), transfer=0.6), policy, streamed, iterations=14)
    assert judge.departures == 0
    assert not any(at < time < at + 0.9 * LEASE for time in times(events, Arrived, 1))


@with_every_policy
@pytest.mark.parametrize("at", [2.4, 3.05, 3.6])
def test_a_worker_with_a_long_cut_loses_its_membership_and_joins_again(policy: str, streamed: bool, at: float) -> None:
    events, judge = run(cluster(Fault(at, 1, "cut", 2 * LEASE), transfer=0.6), policy, streamed, iterations=16)
    assert times(events, Left, 1) == [pytest.approx(at + LEASE)]
    assert times(events, Joined, 1) == [0.0, pytest.approx(at + 2 * LEASE)]
    assert judge.done.keys() == {0, 1, 2, 3}


def test_a_transfer_continues_where_it_was_after_a_cut() -> None:
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


def test_overlapping_cuts_last_until_the_last_of_them_ends() -> None:
    calm, _ = run(cluster(workers=1, transfer=1.0), "asp")
    arrived = times(calm, Arrived, 0)[0]
    faults = (Fault(arrived - 0.5, 0, "cut", 2.0), Fault(arrived, 0, "cut", 3.0), Fault(arrived + 1, 0, "cut", 0.1))
    cut, _ = run(cluster(*faults, workers=1, transfer=1.0), "asp")
    assert times(cut, Arrived, 0)[0] == pytest.approx(arrived + 3.0 + 0.5)


# R²SP


@pytest.mark.parametrize("streamed", [False, True])
def test_a_worker_that_hangs_loses_its_turn_but_not_its_place(streamed: bool) -> None:
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


def test_a_streamed_push_that_hangs_is_abandoned_and_its_worker_starts_again() -> None:
    spec = replace(cluster(transfer=1.0), lease=1000.0)
    calm, _ = run(spec, "r2sp", streamed=True)
    push = next(event.time for event in calm if isinstance(event, Pushing) and event.worker == 1 and event.time > 15)
    for into in (0.01, 0.5):  # before the first slice has come back, and while slices come back
        fault = Fault(push + into, 1, "cut", 40.0)
        events, judge = run(replace(spec, faults=(fault,)), "r2sp", streamed=True, iterations=24)
        cancelled, *later = times(events, Cancelled, 1)
        assert push < cancelled < push + 40
        assert all(time > push + 40 for time in later)  # iterations that began before the link was back are overdue
        assert not any(push < time < push + 40 for kind in (Arrived, Computed) for time in times(events, kind, 1))
        meanwhile = [event for event in events if isinstance(event, Applied) and cancelled < event.time < push + 40]
        assert {worker for event in meanwhile for worker in event.workers} == {0, 2, 3}
        assert any(time > push + 40 for time in times(events, Arrived, 1))
        assert judge.departures == judge.discarded == 0


def test_of_a_group_whose_push_hangs_only_the_late_worker_is_cancelled() -> None:
    """Workers 1 and 3 push together. The connection of worker 1 is lost meanwhile, and worker 3 has pushed."""
    spec = replace(cluster(transfer=1.0), lease=1000.0)
    policy = "r2sp:groups=2"
    calm, _ = run(spec, policy, streamed=True)
    push = next(event.time for event in calm if isinstance(event, Pushing) and event.worker == 1 and event.time > 15)
    fault = Fault(push + 0.5, 1, "cut", 40.0)
    events, judge = run(replace(spec, faults=(fault,)), policy, streamed=True, iterations=24)
    assert min(times(events, Cancelled, 1)) < push + 40
    assert times(events, Cancelled, 3) == []
    applied = next(
        event for event in events if isinstance(event, Applied) and event.time > min(times(events, Cancelled, 1))
    )
    assert applied.workers == (3,)
    assert judge.departures == judge.discarded == 0


# Random faults


@pytest.mark.parametrize(
    "seed",  # in every run, one with servers of their own, and one with colocated servers
    [pytest.param(seed, marks=() if seed in (0, 2) else pytest.mark.matrix) for seed in range(12)],
)
@with_every_policy
def test_random_faults_from_a_seed(policy: str, streamed: bool, seed: int) -> None:
    calm = replace(cluster(transfer=0.4, colocate=seed % 3 == 2), lease=2.0 + seed % 3).with_jitter(0.2)
    spec = with_random_faults(calm, count=12, iterations=12, seed=seed)
    events, judge = run(spec, policy, streamed, iterations=12, seed=seed)
    assert judge.arrivals >= 48
    assert judge.version > 0
    again, _ = run(spec, policy, streamed, iterations=12, seed=seed)
    assert again == events


def test_random_faults_are_the_same_for_the_same_seed() -> None:
    spec = load_cluster("r2sp-a-vgg16")
    first = with_random_faults(spec, 20, 50, seed=1)
    assert with_random_faults(spec, 20, 50, seed=1) == first
    assert with_random_faults(spec, 20, 50, seed=2) != first
    kinds = Counter(fault.kind for fault in first.faults)
    assert kinds["kill"] == kinds["rejoin"]
    assert kinds["kill"] + kinds["pause"] + kinds["cut"] == 20
    assert all(fault.time >= 0 and 0 <= fault.worker < 16 for fault in first.faults)


def test_random_faults_are_added_to_the_described_ones() -> None:
    spec = cluster(Fault(1.0, 0, "pause", 1.0))
    assert with_random_faults(spec, 3, 10, seed=0).faults[0] == spec.faults[0]
    assert with_random_faults(spec, 0, 10, seed=0) == spec


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


@tries(60, 250)
@given(SCRIPTS, st.sampled_from(POLICIES), st.sampled_from([0.05, 0.4, 2.0]), st.booleans())
def test_any_script_of_faults(script: list[Fault], run_as: tuple[str, bool], transfer: float, colocate: bool) -> None:
    """Whatever the faults, the run ends and the counts are right if all workers rejoin in the end."""
    policy, streamed = run_as
    back = [Fault(16.0 + worker, worker, "rejoin") for worker in range(4)]
    spec = cluster(*script, *back, transfer=transfer, colocate=colocate)
    _, judge = run(spec, policy, streamed, iterations=6)
    assert judge.arrivals >= 24


def test_every_policy_is_tested_with_faults() -> None:
    assert {name.partition(":")[0] for name, _ in POLICIES} == set(names())
