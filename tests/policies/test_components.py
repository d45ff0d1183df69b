"""The components that policies share: progress, iteration time, quorums, wake times, weights."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies import Update, WakeAt
from paceline.policies.components import IterationTime, Progress, RecentMax, Waiting, WakeTimes, Weigher, count_of
from tries import tries


def update(worker: int, batch: int) -> Update:
    return Update(worker, iteration=1, base_version=0, batch_size=batch, compute_seconds=1.0)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 20_000))
@tries(60, 300)
def test_a_share_is_rounded_up_exactly_whatever_floating_point_makes_of_it(top: int, bottom: int, members: int) -> None:
    """The exact count is that of the fraction as people write it, such as 0.75 or 2/3."""
    share = Fraction(min(top, bottom), bottom)
    count = count_of(float(share), members)
    assert share * members <= count < share * members + 1


@pytest.mark.parametrize(
    ("share", "members", "count"),
    [(0.75, 4, 3), (0.75, 5, 4), (0.75, 10, 8), (0.1, 30, 3), (0.29, 100, 29), (1.0, 7, 7), (1e-12, 5, 1), (0.0, 5, 0)],
)
def test_a_share_of_the_members_is_a_whole_number_of_them(share: float, members: int, count: int) -> None:
    assert count_of(share, members) == count


@given(st.lists(st.tuples(st.sampled_from(["add", "advance", "advance", "advance", "remove"]), st.integers(0, 4))))
@tries(60, 200)
def test_progress_tracks_the_slowest_and_the_fastest(steps: list[tuple[str, int]]) -> None:
    progress, done = Progress(), dict[int, int]()
    for action, worker in steps:
        if action == "add" and worker not in done:
            progress.add(worker)
            done[worker] = min(done.values(), default=progress[worker])
        elif action == "advance" and worker in done:
            done[worker] += 1
            assert progress.advance(worker) == done[worker]
        elif action == "remove" and worker in done:
            progress.remove(worker)
            del done[worker]
        assert len(progress) == len(done)
        if done:
            assert (progress.slowest, progress.fastest) == (min(done.values()), max(done.values()))
            assert all(progress[worker] == count for worker, count in done.items())


def test_waiting_releases_workers_by_progress_and_then_by_arrival() -> None:
    waiting = Waiting()
    for worker, progress in ((1, 5), (2, 3), (3, 5), (4, 9)):
        waiting.add(worker, progress)
    waiting.discard(1)
    assert waiting.release(limit=2) == []
    waiting.add(1, 3)
    assert waiting.release(limit=5) == [2, 1, 3]
    assert len(waiting) == 1


def test_T_is_unknown_at_first_and_then_the_slowest_workers_mean() -> None:
    pace = IterationTime()
    assert pace.T is None
    pace.observe(0, 2.0)
    assert pace.T == 2.0
    pace.observe(1, 5.0)
    assert pace.T == 5.0


def test_T_weighs_the_newest_observation_with_a_tenth() -> None:
    pace = IterationTime()
    for _ in range(1 + IterationTime.START):
        pace.observe(0, 2.0)
    pace.observe(0, 3.0)
    assert pace.T == pytest.approx(2.1)


@pytest.mark.parametrize("stalled", range(1, 1 + IterationTime.START))
def test_T_soon_forgets_a_stall_in_one_of_the_first_iterations(stalled: int) -> None:
    """A transfer may stall for TCP's 200 ms. Gaps of such a T would slow ten rounds down."""
    pace = IterationTime()
    for iteration in range(2 + IterationTime.START):
        for worker in (0, 1):
            pace.observe(worker, 5.0 if (worker, iteration) == (1, stalled) else 1.0)
    assert pace.T == pytest.approx(1.0)


def test_T_soon_forgets_a_slow_first_iteration() -> None:
    pace = IterationTime()
    for worker in (0, 1):
        pace.observe(worker, 100.0)
    assert pace.T == 100.0
    for _ in range(2):
        for worker in (0, 1):
            pace.observe(worker, 1.0)
    assert pace.T == 1.0
    pace.forget(1)
    pace.observe(1, 50.0)  # it has rejoined and warms up again
    pace.observe(0, 1.0)
    assert pace.T == 50.0


def test_T_forgets_a_departed_worker_within_two_rounds() -> None:
    pace = IterationTime()
    for _ in range(3):
        for worker, seconds in ((0, 1.0), (1, 1.0), (2, 9.0)):
            pace.observe(worker, seconds)
    assert pace.T == pytest.approx(9.0)
    pace.forget(2)
    for _ in range(2):
        for worker in (0, 1):
            pace.observe(worker, 1.0)
    assert pace.T == pytest.approx(1.0)


def test_T_starts_afresh_for_a_worker_that_rejoins() -> None:
    pace = IterationTime()
    pace.observe(0, 9.0)
    pace.forget(0)
    for _ in range(2):
        pace.observe(0, 1.0)
    assert pace.T == pytest.approx(1.0)


def test_T_falls_again_after_it_has_risen() -> None:
    pace = IterationTime()
    for seconds in [1.0] * 20 + [4.0] * 60 + [1.0] * 60:
        pace.observe(0, seconds)
        pace.observe(1, 1.0)
    assert pace.T == pytest.approx(1.0, rel=0.02)


def test_wake_times_are_merged_into_one_wake_at() -> None:
    wakes = WakeTimes()
    assert wakes.next() == []
    wakes.set(1, 5.0)
    assert wakes.next() == [WakeAt(5.0)]
    assert wakes.next() == [], "it is set already"
    wakes.set(2, 7.0)
    wakes.set(3, 3.0)
    assert wakes.next() == [WakeAt(3.0)]
    wakes.set(1, 6.0)
    wakes.cancel(2)
    assert wakes.due(now=4.0) == [3]
    assert wakes.next() == [WakeAt(6.0)], "the first time of policy 1 was replaced"
    assert wakes.due(now=9.0) == [1]
    assert wakes.next() == []


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.integers(1, 5))
@tries(50, 100)
def test_the_recent_maximum_covers_one_to_two_rounds(values: list[float], members: int) -> None:
    recent = RecentMax()
    for value in values:
        recent.see(value, members)
    assert recent.value >= max(values[-members:])
    assert recent.value <= max(values[-2 * members :])


def test_sum_gives_every_update_its_own_learning_rate() -> None:
    weigher = Weigher("sum")
    for each in (update(0, 32), update(1, 64), update(0, 16)):
        weigher.see(each.worker, each.batch_size)
        assert weigher.in_round([each], members=2) == (1.0,)
    assert weigher.together([update(0, 32), update(1, 64)]) == (1.0, 1.0)


def test_sum_scales_with_a_tuned_batch() -> None:
    weigher = Weigher("sum", tuned=True)
    weigher.see(0, 512)
    weigher.see(0, 1264)
    assert weigher.in_round([update(0, 1264)], members=3) == (1264 / 512,)


def test_mean_of_updates_applied_together_sums_to_1() -> None:
    assert Weigher("mean").together([update(0, 32), update(1, 96)]) == (0.25, 0.75)


def test_mean_of_updates_applied_one_by_one_sums_to_1_over_a_round() -> None:
    weigher = Weigher("mean")
    batches = {0: 32, 1: 96, 2: 64}
    for _ in range(2):
        weights: list[float] = []
        for worker, batch in batches.items():
            weigher.see(worker, batch)
            weights += weigher.in_round([update(worker, batch)], members=3)
    assert weights == pytest.approx([32 / 192, 96 / 192, 64 / 192])


def test_the_mean_assumes_the_average_batch_for_members_without_an_update() -> None:
    weigher = Weigher("mean")
    weigher.see(0, 32)
    assert weigher.in_round([update(0, 32)], members=4) == (0.25,)


def test_the_mean_forgets_a_departed_worker() -> None:
    weigher = Weigher("mean")
    for worker in (0, 1):
        weigher.see(worker, 32)
    weigher.forget(1)
    assert weigher.in_round([update(0, 32)], members=1) == (1.0,)


@pytest.mark.parametrize("kind", ["mean", "equal"])
def test_a_worker_that_leaves_counts_in_the_updates_that_others_have_begun(kind: str) -> None:
    weigher = Weigher(kind)
    for worker in range(4):
        weigher.see(worker, 32)
        weigher.in_round([update(worker, 32)], members=4)
    weigher.forget(0)
    weights: list[float] = []
    for worker in (1, 2, 3, 1):
        weigher.see(worker, 32)
        weights += weigher.in_round([update(worker, 32)], members=3)
    assert weights == pytest.approx([1 / 4, 1 / 4, 1 / 4, 1 / 3])


def test_the_last_updates_of_a_job_that_ends_count_alike() -> None:
    """Each worker leaves after its last update."""
    weigher, weights = Weigher("mean"), list[float]()
    for members, worker in ((4, 0), (4, 1), (4, 2), (4, 3), (4, 0), (3, 1), (2, 2), (1, 3)):
        weigher.see(worker, 32)
        weights += weigher.in_round([update(worker, 32)], members)
        if len(weights) > 4:
            weigher.forget(worker)
    assert weights == pytest.approx([1 / 4] * 8)
