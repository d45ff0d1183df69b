"""Batch-size tuning, with the numbers of table II of the INFOCOM paper."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from paceline.policies import Policy, Update
from paceline.policies.bsp import BSP
from paceline.policies.r2sp import R2SP
from paceline.policies.tuning import BatchTuner
from policies.cluster import Seconds, Story, run, steady

# Table II: marginal samples per second, overhead per iteration in seconds, and the tuned batch, which starts at 512.
G2, P2, G3 = (429, 0.242, 512), (628, 0.0, 901), (917, 0.057, 1264)
KINDS = (G2, P2, G3)


def machines(count: int, jitter: float = 0.0, seed: int = 0) -> dict[int, Seconds]:
    """Return the iteration times of workers. Workers 0, 3, 6, … are g2; 1, 4, 7, … are p2; the rest are g3."""
    rng = random.Random(seed)

    def seconds(worker: int) -> Seconds:
        speed, overhead, _ = KINDS[worker % 3]
        return lambda batch: (overhead + batch / speed) * max(0.5, rng.gauss(1.0, jitter))

    return {worker: seconds(worker) for worker in range(count)}


def reported(count: int, with_overhead: bool) -> dict[int, Seconds]:
    """Return the compute times that workers report."""

    def seconds(worker: int) -> Seconds:
        speed, overhead, _ = KINDS[worker % 3]
        return lambda batch: batch / speed + (overhead if with_overhead else 0.0)

    return {worker: seconds(worker) for worker in range(count)}


TUNED: dict[str, Callable[[], Policy]] = {
    "bsp": lambda: BSP(tune_batches=True),
    "r2sp": lambda: R2SP(tune_batches=True),
}


def tuned(
    policy: str, updates: int, count: int = 6, jitter: float = 0.0, seed: int = 0, overhead: bool = True
) -> Story:
    return run(
        TUNED[policy](),
        machines(count, jitter, seed),
        updates=updates,
        batch=512,
        computing=reported(count, overhead),
    )


@pytest.mark.parametrize("policy", TUNED)
@pytest.mark.parametrize("overhead", [True, False], ids=["overhead counted", "overhead not counted"])
def test_batches_settle_at_those_of_table_2(policy: str, overhead: bool) -> None:
    story = tuned(policy, updates=600, overhead=overhead)
    for worker, batches in story.batches.items():
        assert batches[-1] == pytest.approx(KINDS[worker % 3][2], rel=0.02)


def test_fast_workers_hardly_wait_after_tuning() -> None:
    machine = machines(3)
    untuned = run(BSP(), machine, updates=300, batch=512)
    tuned_story = tuned("bsp", updates=300, count=3)
    fast = (1, 2)
    assert all(untuned.waited[worker] / 100 > 0.6 for worker in fast)
    assert all(tuned_story.waited[worker] / 100 < 0.1 for worker in fast)  # the wait before the batches were tuned


@pytest.mark.parametrize("policy", TUNED)
@pytest.mark.parametrize("seed", range(5))
def test_batches_settle_and_do_not_oscillate_with_10_percent_jitter(policy: str, seed: int) -> None:
    story = tuned(policy, updates=6 * 600, jitter=0.1, seed=seed)
    for worker, batches in story.batches.items():
        settled = batches[200:]
        assert max(settled) / min(settled) < 1.06
        changes = sum(a != b for a, b in pairwise(settled))
        assert changes <= 5
        assert settled[-1] == pytest.approx(KINDS[worker % 3][2], rel=0.08)


def test_a_batch_grows_to_max_growth_at_most() -> None:
    story = run(
        BSP(tune_batches=True, max_growth=1.5),
        {0: lambda batch: batch / 10, 1: lambda batch: batch / 1000},
        updates=400,
        batch=100,
    )
    assert story.batches[1][-1] == 150
    assert max(story.batches[1]) == 150


@pytest.mark.parametrize("relax", [0.8, 2.0])
def test_no_batch_grows_in_a_ring_where_all_workers_are_equally_idle(relax: float) -> None:
    """With relax=2 every worker waits for its turn half of the time. Larger batches would gain nothing."""
    story = run(R2SP(tune_batches=True, relax=relax), {w: lambda batch: batch / 100 for w in range(4)}, 800, batch=100)
    assert {batch for batches in story.batches.values() for batch in batches} == {100}


def test_the_slowest_keeps_its_own_batch_and_no_worker_gets_less_than_its_own() -> None:
    story = tuned("bsp", updates=1200, jitter=0.1)
    assert all(batch >= 512 for batches in story.batches.values() for batch in batches)
    assert all(batch <= 512 * 1.05 for batch in story.batches[0])


def test_a_batch_shrinks_again_when_the_slowest_has_left() -> None:
    policy = BSP(tune_batches=True)
    run(policy, {0: lambda batch: batch / 50, 1: lambda batch: batch / 100}, updates=100, batch=100)
    assert policy.tuner is not None
    assert policy.tuner.batch(1) == pytest.approx(200, abs=2)
    policy.left(0, 1000.0)
    now = 1000.0
    for iteration in range(60):
        batch = policy.tuner.batch(1)
        assert batch is not None
        policy.tuner.observe(Update(1, iteration, 0, batch, batch / 100), batch / 100)
        now += 1
    assert policy.tuner.batch(1) == 100


def test_no_batch_is_granted_before_a_workers_own_is_known() -> None:
    tuner = BatchTuner(4.0)
    assert tuner.batch(7) is None
    tuner.observe(Update(7, 1, 0, 64, 1.0), 1.0)
    assert tuner.batch(7) == 64
    tuner.forget(7)
    assert tuner.batch(7) is None


def test_iterations_without_compute_time_do_not_change_a_batch() -> None:
    story = run(
        BSP(tune_batches=True), {0: steady(0.0), 1: steady(1.0)}, updates=60, computing={0: steady(0.0), 1: steady(0.0)}
    )
    assert story.batches[0][-1] == 32
