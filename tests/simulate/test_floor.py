"""The floor: by hand on small clusters, and below every policy on any cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import paceline  # noqa: F401 (registers rlp)
from paceline.observe.driver import Fault
from paceline.policies import make, names
from paceline.simulate import (
    Cluster,
    ClusterSpec,
    Jitter,
    WorkerSpec,
    limit_seconds,
    load_cluster,
    run_limit_seconds,
)
from tries import tries

POLICIES = [
    *names(),
    *("bsp:pipeline=true", "bsp:backup=1", "bsp:tune_batches=true", "dssp:bound=none", "groups:count=2"),
    *("r2sp:groups=2", "r2sp:groups=auto", "r2sp:tune_batches=true"),
]
LINK = 100e6  # bytes per second


def worker(compute: float, link: float = LINK) -> WorkerSpec:
    return WorkerSpec(link=link, batch=100, samples_per_second=100 / compute)


def cluster(*workers: WorkerSpec, servers: int = 1, link: float = LINK) -> ClusterSpec:
    return ClusterSpec("made", 100e6, servers, link, 0.0, 10e9, 30.0, workers)


def test_workers_need_not_make_equally_many_updates() -> None:
    # Paths of 3 and 12 s: together 1/3 + 1/12 updates per second. The link would allow one.
    spec = cluster(worker(1.0), worker(10.0))
    assert limit_seconds(spec, streamed=False) == pytest.approx(2 / (1 / 3 + 1 / 12))
    assert limit_seconds(spec, streamed=True) == pytest.approx(2 / (1 / (2 + 1 / 16) + 1 / (11 + 1 / 16)))


def test_the_links_carry_all_updates_whoever_makes_them() -> None:
    spec = cluster(*(worker(0.1) for _ in range(3)), worker(50.0))
    assert limit_seconds(spec, streamed=False) == pytest.approx(4.0)
    assert limit_seconds(replace(spec, server_link_in=LINK / 2), streamed=False) == pytest.approx(8.0)


def test_a_slow_link_of_one_colocated_worker_limits_what_the_others_send_to_it() -> None:
    spec = cluster(*(worker(0.01) for _ in range(3)), worker(0.01, link=LINK / 10)).colocated()
    # Its own link carries a quarter of the model in each update of the others: at most 0.4 updates per second.
    assert limit_seconds(spec, streamed=False) == pytest.approx(4 / 0.4, rel=1e-6)
    equal = cluster(*(worker(0.01) for _ in range(4))).colocated()
    assert limit_seconds(equal, streamed=True) == pytest.approx(2 * 3 / 4)
    assert limit_seconds(cluster(worker(2.0)).colocated(), streamed=False) == pytest.approx(2.0)
    assert limit_seconds(cluster(worker(0.01), worker(0.01)).colocated(), streamed=True) == pytest.approx(1.0)


def test_tuned_batches_make_the_iterations_of_fast_workers_longer() -> None:
    spec = cluster(worker(1.0), worker(4.0))
    assert limit_seconds(spec, streamed=False, batches={0: 400}) == pytest.approx(6.0)
    tuned = Cluster(replace(spec, model_bytes=1e6), make("r2sp:tune_batches=true"), 40)
    result = tuned.run()
    assert result.report.batch_sizes[0] > 300
    limit = run_limit_seconds(tuned.spec, make("r2sp"), result)
    assert limit is not None
    assert result.report.mean_iteration_seconds == pytest.approx(limit, rel=0.02)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    rates = st.floats(6.0, 8.0).map(lambda power: 10**power)
    jitter = Jitter("straggle", probability=0.2, mean=1.0)  # it only adds to compute times
    workers = draw(
        st.lists(
            st.builds(
                WorkerSpec,
                link=rates,
                batch=st.just(32),
                samples_per_second=st.floats(0.5, 3.5).map(lambda power: 10**power),
                overhead=st.sampled_from((0.0, 0.05)),
                jitter=st.sampled_from((Jitter(), jitter)),
            ),
            min_size=1,
            max_size=5,
        )
    )
    spec = ClusterSpec(
        "any",
        model_bytes=draw(st.floats(5.0, 7.5).map(lambda power: 10**power)),
        servers=draw(st.integers(1, 3)),
        server_link=draw(rates),
        latency=draw(st.sampled_from((0.0, 1e-3, 0.05))),
        apply_rate=draw(st.sampled_from((1e7, 1e10))),
        lease=30.0,
        workers=tuple(workers) if draw(st.booleans()) else (workers[0],) * len(workers),
        server_link_in=draw(st.one_of(st.just(0.0), rates)),
    )
    return spec.colocated() if draw(st.booleans()) else spec


@pytest.mark.slow
@given(spec=clusters(), policy=st.sampled_from(POLICIES), streamed=st.booleans())
@tries(50, 150)
def test_no_policy_is_below_the_floor_on_any_cluster(spec: ClusterSpec, policy: str, streamed: bool) -> None:
    made, N, iterations = make(policy), len(spec.workers), 24
    assume(made.least_workers <= N)
    result = Cluster(spec, made, iterations, streamed=streamed).run()
    limit = run_limit_seconds(spec, made, result)
    if limit is None:
        assert result.pulls_saved and policy in ("kbatch", "fedbuff", "bsp:backup=1")
        return
    # When the means begin, every worker may already have done a part of an iteration, so N more may be counted.
    counted = (iterations - iterations // 4) * N
    assert result.report.mean_iteration_seconds >= 0.999 * limit * counted / (counted + N)


@pytest.mark.parametrize("policy", ["asp", "ssp", "dssp", "bsp", "r2sp", "bsp:backup=2", "ksync:k=4", "rlp"])
def test_no_policy_is_below_the_floor_on_ten_unequal_workers(policy: str) -> None:
    spec, made = load_cluster("rlp-10"), make(policy)
    result = Cluster(spec, made, 60).run()
    limit = run_limit_seconds(spec, made, result)
    assert limit is not None
    assert result.report.mean_iteration_seconds >= 0.98 * limit


def test_a_run_without_a_floor() -> None:
    spec = cluster(worker(1.0), worker(1.0))
    faulty = replace(spec, faults=(Fault(5.0, 1, "kill"),))
    asp = make("asp")
    assert run_limit_seconds(faulty, asp, Cluster(faulty, asp, 10).run()) is None
    buffered = make("fedbuff:k=2")
    assert run_limit_seconds(spec, buffered, Cluster(spec, buffered, 10).run()) is None


def test_replicas_raise_the_floor_by_the_bytes_that_are_passed_on() -> None:
    spec = replace(cluster(*[worker(0.01)] * 4), servers=1)
    alone = limit_seconds(spec, streamed=False)
    assert limit_seconds(replace(spec, replicas=1), streamed=False) == pytest.approx(2 * alone), "its link out"
    wide = replace(spec, server_link=8 * LINK, server_link_in=LINK, replicas=1)
    assert limit_seconds(wide, streamed=False) == pytest.approx(alone), "the backup has a link of its own"
    two = replace(wide, servers=2)
    assert limit_seconds(two, streamed=False) == pytest.approx(alone), "two servers, and twice the bytes into them"
    beside = cluster(*[worker(0.01)] * 4).colocated()
    each = limit_seconds(beside, streamed=True)
    assert limit_seconds(replace(beside, replicas=1), streamed=True) == pytest.approx(each + 1.0)


@pytest.mark.parametrize(
    ("policy", "servers", "cost"),
    [("bsp", 1, 1.0), ("bsp", 2, 1.5), ("r2sp", 1, 2.0), ("r2sp", 2, 2.0)],
)
def test_a_simulated_run_pays_for_replicas(policy: str, servers: int, cost: float) -> None:
    """BSP pushes while nobody pulls, so the link out is free for the backup. R²SP uses both directions all the time."""
    spec = cluster(*[worker(0.01)] * 4, servers=servers)
    backed = replace(spec, replicas=1)
    alone, safe = (Cluster(each, make(policy), 40).run() for each in (spec, backed))
    ratio = safe.report.mean_iteration_seconds / alone.report.mean_iteration_seconds
    assert ratio == pytest.approx(cost, rel=0.1)
    limit = run_limit_seconds(backed, make(policy), safe)
    assert limit is not None and safe.report.mean_iteration_seconds >= 0.999 * limit
    if policy == "r2sp":
        assert safe.report.mean_iteration_seconds <= 1.1 * limit
