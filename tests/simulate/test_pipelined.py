"""Pipelined BSP is faster than plain BSP, never below the floor, and never stuck when members join and leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.judge import judge_of
from paceline.observe.driver import Fault
from paceline.observe.observer import Recorder
from paceline.observe.trace import Applied, Event, Granted
from paceline.policies import make
from paceline.simulate import Cluster, ClusterSpec, WorkerSpec, limit_seconds
from pairs import parametrize_pairs
from tries import every

LINK = 100e6


def cluster(
    workers: int = 8,
    servers: int = 2,
    compute: float = 1.0,
    model: float = 50e6,
    link: float = LINK,
    apply_rate: float = 10e9,
    latency: float = 0.0,
    slices: int = 16,
    faults: tuple[Fault, ...] = (),
) -> ClusterSpec:
    return ClusterSpec(
        name="test",
        model_bytes=model,
        servers=servers,
        server_link=LINK,
        latency=latency,
        apply_rate=apply_rate,
        lease=10.0,
        workers=(WorkerSpec(link, 32, 32 / compute),) * workers,
        slices=slices,
        faults=faults,
    )


def seconds(spec: ClusterSpec, policy: str, iterations: int = 12) -> float:
    return Cluster(spec, make(policy), iterations).run().report.mean_iteration_seconds


def test_a_round_takes_one_way_and_one_slice() -> None:
    spec = cluster()
    one_way = 8 * 50e6 / (2 * LINK)
    assert seconds(spec, "bsp") == pytest.approx(1.0 + 2 * one_way, rel=0.01)
    assert seconds(spec, "bsp:pipeline=true") == pytest.approx(1.0 + one_way * (1 + 1 / 16), rel=0.01)


def test_more_slices_bring_a_round_closer_to_one_way() -> None:
    one_way = 8 * 50e6 / (2 * LINK)
    by_slices = [seconds(cluster(slices=slices), "bsp:pipeline=true") for slices in (1, 4, 16, 64)]
    assert by_slices == sorted(by_slices, reverse=True)
    assert by_slices[0] == pytest.approx(seconds(cluster(), "bsp"), rel=0.01)
    assert by_slices[-1] == pytest.approx(1.0 + one_way * (1 + 1 / 64), rel=0.01)


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("servers", [1, 4])
@pytest.mark.parametrize("compute", [0.05, 5.0])
@pytest.mark.parametrize("latency", [0.0, 0.3])
@pytest.mark.parametrize("link", [LINK, LINK / 10])
def test_it_is_never_below_the_floor_nor_slower_than_plain_bsp(
    workers: int, servers: int, compute: float, latency: float, link: float
) -> None:
    spec = cluster(workers, servers, compute, latency=latency, link=link)
    pipelined = seconds(spec, "bsp:pipeline=true", 4)
    assert pipelined >= 0.999 * limit_seconds(spec, streamed=True)
    assert pipelined <= 1.001 * seconds(spec, "bsp", 4)


def test_jitter_and_colocation_do_not_break_it() -> None:
    for spec in (cluster().with_jitter(0.3), cluster().colocated(), cluster().with_jitter(0.3).colocated()):
        assert judged(spec).arrivals >= 12 * 8


# Members join and leave. In some of these tests the servers apply slowly, so slices are complete but not released.


@parametrize_pairs(
    ("apply_rate", "link", "compute", "rejoins_after"),
    *((10e9, 20e6), (LINK, LINK / 10), (0.01, 1.0), (0.05, 0.9, 4.0, 25.0)),
)
def test_a_worker_that_is_killed_at_any_moment_and_rejoins(
    apply_rate: float, link: float, compute: float, rejoins_after: float
) -> None:
    for twentieth in every(2, range(20)):
        time = 3.0 + 10 * twentieth / 20
        faults = (Fault(time, 1, "kill"), Fault(time + rejoins_after, 1, "rejoin"))
        judged(cluster(4, 2, compute, link=link, apply_rate=apply_rate, faults=faults), iterations=6)


@pytest.mark.parametrize("apply_rate", [10e9, 20e6])
def test_links_that_are_cut_and_restored(apply_rate: float) -> None:
    for tenth in every(2, range(0, 60, 2)):
        faults = (Fault(3 + tenth / 10, 0, "cut", 2.5), Fault(4 + tenth / 10, 2, "cut", 15.0))
        judged(cluster(4, apply_rate=apply_rate, faults=faults), iterations=8)


def test_all_workers_are_killed_during_a_round_and_rejoin() -> None:
    faults = tuple(Fault(3.3 + worker / 3, worker, "kill") for worker in range(4))
    back = tuple(Fault(20 + worker / 3, worker, "rejoin") for worker in range(4))
    judged(cluster(4, faults=faults + back))


@pytest.mark.parametrize(("rejoins", "granted"), [(1.9, 1.9), (2.5, 2.75)])
def test_a_worker_that_joins_a_settled_round_waits_until_it_closes(rejoins: float, granted: float) -> None:
    """All workers are ready at 2 s. Then the round is settled: its members are fixed.

    If a worker dies before that, the round is settled when the job learns of its death, which is when it rejoins.
    """
    faults = (Fault(1.5, 3, "kill"), Fault(rejoins, 3, "rejoin"))
    events = trace(cluster(4, faults=faults))
    judge_of("bsp").watch(events)
    assert [event.time for event in events if isinstance(event, Granted) and event.worker == 3][1] == granted
    first = next(event for event in events if isinstance(event, Applied))
    assert set(first.workers) == ({0, 1, 2, 3} if granted == rejoins else {0, 1, 2})


def test_the_others_wait_until_the_lease_expires_and_then_continue() -> None:
    spec = cluster(4, faults=(Fault(2.0, 3, "kill"),))
    untroubled = Cluster(replace(spec, faults=()), make("bsp:pipeline=true"), 12).run()
    troubled = Cluster(spec, make("bsp:pipeline=true"), 12).run()
    assert troubled.simulated_seconds > untroubled.simulated_seconds + spec.lease
    assert troubled.report.batch_sizes.keys() == {0, 1, 2, 3}


def judged(spec: ClusterSpec, iterations: int = 12):  # type: ignore[no-untyped-def]
    return judge_of("bsp").watch(trace(spec, iterations))


def trace(spec: ClusterSpec, iterations: int = 12) -> list[Event]:
    events: list[Event] = []
    Cluster(spec, make("bsp:pipeline=true"), iterations, observer=Recorder(events.append)).run()
    return events
