"""The pieces that policies share: progress, pace, weights."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.policies import Update
from paceline.policies.components import IterationTime, Progress, RecentMax, Waiting, Weigher


def update(worker: int, batch: int) -> Update:
    return Update(worker, iteration=1, base_version=0, batch_size=batch, compute_seconds=1.0)


@given(st.lists(st.tuples(st.sampled_from(["add", "advance", "advance", "advance", "remove"]), st.integers(0, 4))))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_progress_knows_the_slowest_and_the_fastest(steps: list[tuple[str, int]]) -> None:
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


def test_waiting_releases_the_nearest_first_and_in_the_order_they_came() -> None:
    waiting = Waiting()
    for worker, progress in ((1, 5), (2, 3), (3, 5), (4, 9)):
        waiting.add(worker, progress)
    waiting.discard(1)
    assert waiting.release(limit=2) == []
    waiting.add(1, 3)
    assert waiting.release(limit=5) == [2, 1, 3]
    assert len(waiting) == 1


def test_pace_is_unknown_and_then_the_slowest_workers_mean() -> None:
    pace = IterationTime()
    assert pace.T is None
    pace.observe(0, 2.0)
    assert pace.T == 2.0
    pace.observe(1, 5.0)
    assert pace.T == 5.0


def test_pace_weighs_the_newest_observation_with_a_tenth() -> None:
    pace = IterationTime()
    pace.observe(0, 2.0)
    pace.observe(0, 2.0)
    pace.observe(0, 3.0)
    assert pace.T == pytest.approx(2.1)


def test_a_first_iteration_that_warms_up_is_soon_forgotten() -> None:
    pace = IterationTime()
    for worker in (0, 1):
        pace.observe(worker, 100.0)
    assert pace.T == 100.0
    for _ in range(2):
        for worker in (0, 1):
            pace.observe(worker, 1.0)
    assert pace.T == 1.0
    pace.forget(1)
    pace.observe(1, 50.0)  # it came back, and warms up again
    pace.observe(0, 1.0)
    assert pace.T == 50.0


def test_pace_forgets_one_who_left_within_two_rounds() -> None:
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


def test_pace_starts_afresh_with_one_who_comes_back() -> None:
    pace = IterationTime()
    pace.observe(0, 9.0)
    pace.forget(0)
    for _ in range(2):
        pace.observe(0, 1.0)
    assert pace.T == pytest.approx(1.0)


def test_pace_comes_down_as_it_went_up() -> None:
    pace = IterationTime()
    for seconds in [1.0] * 20 + [4.0] * 60 + [1.0] * 60:
        pace.observe(0, seconds)
        pace.observe(1, 1.0)
    assert pace.T == pytest.approx(1.0, rel=0.02)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.integers(1, 5))
@settings(max_examples=100, deadline=None, derandomize=True)
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


def test_in_the_mean_those_not_heard_of_yet_are_taken_to_be_average() -> None:
    weigher = Weigher("mean")
    weigher.see(0, 32)
    assert weigher.in_round([update(0, 32)], members=4) == (0.25,)


def test_the_mean_forgets_one_who_left() -> None:
    weigher = Weigher("mean")
    for worker in (0, 1):
        weigher.see(worker, 32)
    weigher.forget(1)
    assert weigher.in_round([update(0, 32)], members=1) == (1.0,)
