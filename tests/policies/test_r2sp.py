"""R²SP: turns in a fixed order, evenly gapped. With relax=1 the gap is T/N, which keeps the arithmetic easy."""

import math
from itertools import count, pairwise

import pytest

from paceline.policies.fewest_groups import FewestGroups
from paceline.policies.r2sp import R2SP
from policies.cluster import run, steady
from policies.conversation import Conversation, applied, discarded, granted, wake_at


def three(**options: float) -> Conversation:
    """Return a ring of a, b and c in full swing. Each takes 3 s. It is 5 s, and a has just had its turn."""
    talk = Conversation(R2SP(relax=1.0, **options), workers="abc")  # type: ignore[arg-type]
    talk.arrives("a", at=3.0).answers(granted("b"))
    talk.wakes().answers(granted("c"))
    talk.wakes().answers(applied("a"), granted("a"))
    assert talk.now == 5.0
    return talk


# Start


def test_the_pilot_runs_alone_and_then_one_worker_starts_per_gap() -> None:
    talk = Conversation(R2SP(relax=1.0))
    talk.joins("a", at=0.0).answers(granted("a", staleness=0))
    for worker in "bcd":
        talk.joins(worker).answers()
    talk.arrives("a", at=4.0).answers(granted("b", staleness=3), wake_at(5.0))  # T is 4 s, so the gap is 1 s
    talk.wakes().answers(granted("c"), wake_at(6.0))
    talk.wakes().answers(granted("d"), wake_at(7.0))
    talk.wakes().answers(applied("a"), granted("a", staleness=3), wake_at(24.0))  # b is overdue at 8 + 4·4


def test_if_the_pilot_leaves_the_next_worker_is_the_pilot() -> None:
    talk = Conversation(R2SP(), workers="abc")
    talk.leaves("a", at=3.0).answers(granted("b"))
    talk.leaves("b", at=4.0).answers(granted("c"))
    talk.arrives("c", at=5.0).answers(applied("c"), granted("c"))


def test_workers_take_turns_in_the_order_of_joining_at_least_a_gap_apart() -> None:
    story = run(R2SP(), {worker: steady(1.0) for worker in (5, 2, 9, 0)}, updates=40)
    first = [worker for _, (worker,) in story.applied[:4]]
    times = [time for time, _ in story.applied]
    assert first == [5, 2, 9, 0]
    assert min(b - a for a, b in pairwise(times)) >= 0.8 / 4 - 1e-9


def test_a_worker_that_joins_later_is_last_in_line() -> None:
    talk = three()
    talk.joins("d", at=5.5).answers(wake_at(5.75))  # there are four now, so the gap is 0.75 s
    talk.wakes().answers(granted("d"))
    talk.arrives("b", at=6.0).answers()
    talk.wakes().answers(applied("b"), granted("b"))
    talk.arrives("d", at=7.0).answers()  # d must wait for c and a
    talk.arrives("c", at=7.0).answers()
    talk.wakes().answers(applied("c"), granted("c"))
    talk.arrives("a", at=8.0).answers(applied("a"), granted("a"))
    talk.wakes().answers(applied("d"), granted("d"))
    assert max(talk.staleness) <= 3


def test_no_worker_is_overdue_if_iterations_take_no_time() -> None:
    """If T is 0, there is no gap, and no worker can be overdue."""
    talk = Conversation(R2SP(), workers="ab")
    talk.arrives("a", at=0.0).answers(granted("b"), applied("a"), granted("a"))
    talk.arrives("a", at=0.0).answers()
    talk.arrives("b", at=9.0).answers(applied("b"), granted("b"))


# Order


def test_the_order_holds_even_if_a_later_worker_arrives_first() -> None:
    talk = three()
    talk.arrives("c", at=5.5).answers()
    talk.arrives("b", at=6.0).answers(applied("b"), granted("b"), wake_at(7.0))
    talk.wakes().answers(applied("c"), granted("c"))
    talk.arrives("a", at=8.0).answers(applied("a"), granted("a"))


def test_turns_are_a_gap_apart_even_if_all_updates_have_arrived() -> None:
    talk = three()
    for worker in "cab":
        talk.arrives(worker, at=6.0)
    talk.answers(applied("b"), granted("b"))
    talk.wakes().answers(applied("c"), granted("c"))
    assert talk.now == 7.0
    talk.wakes().answers(applied("a"), granted("a"))
    assert talk.now == 8.0


def test_an_early_or_repeated_wake_changes_nothing() -> None:
    talk = three()
    talk.arrives("c", at=5.5)
    talk.arrives("b", at=6.0)
    for _ in range(2):
        talk.wakes(at=6.5).answers(wake_at(7.0))
    talk.wakes().answers(applied("c"), granted("c"))


# Leaving


def test_the_turn_passes_on_at_once_when_its_worker_leaves() -> None:
    talk = three()
    talk.arrives("c", at=7.0).answers()
    talk.leaves("b", at=7.5).answers(applied("c"), granted("c", staleness=1))


def test_the_update_of_a_departed_worker_is_applied_with_the_next_turn() -> None:
    talk = three()
    talk.arrives("c", at=5.5).answers()
    talk.leaves("c", at=5.75).answers()
    talk.arrives("b", at=6.0).answers(wake_at(6.5))  # two are left, so the gap is 1.5 s
    talk.wakes().answers(applied("cb"), granted("b"))
    talk.arrives("a", at=8.0).answers(applied("a"), granted("a"))
    assert talk.staleness[-1] == 1  # one version since a's Grant, not two


def test_no_update_is_left_undecided_when_the_last_worker_leaves() -> None:
    talk = three()
    talk.arrives("c", at=5.5).answers()
    talk.leaves("c").answers()
    talk.leaves("a").answers()
    talk.leaves("b").answers(applied("c"))


def test_a_worker_that_rejoins_gets_no_second_turn_before_the_others() -> None:
    talk = three()
    talk.arrives("b", at=6.0).answers(applied("b"), granted("b"))
    talk.leaves("b", at=6.25).answers()
    talk.joins("b", at=6.5).answers()
    talk.wakes().answers(granted("b"))
    talk.arrives("b", at=7.5).answers()
    talk.arrives("c", at=8.0).answers()
    talk.arrives("a", at=8.0).answers()
    talk.wakes().answers(applied("c"), granted("c"))
    talk.wakes().answers(applied("a"), granted("a"))
    talk.wakes().answers(applied("b"), granted("b"))
    assert max(talk.staleness) <= 2


# Overdue workers


def test_an_overdue_worker_loses_its_turn_but_not_its_place() -> None:
    talk = three(patience=1.0)
    talk.arrives("c", at=7.0).answers()
    talk.arrives("a", at=8.0).answers()
    assert talk.wake == 9.0  # b was granted at 3 s and is due at 6 s; it is overdue T = 3 s later
    talk.wakes().answers(applied("c"), granted("c"))
    talk.wakes().answers(applied("a"), granted("a"))
    assert talk.now == 10.0
    talk.arrives("b", at=11.0).answers(discarded("b"), wake_at(12.0))  # b has raised T to 6 s, so the gap is 2 s
    talk.wakes().answers(granted("b"))
    talk.arrives("c", at=12.5).answers()
    talk.arrives("a", at=13.0).answers()
    talk.wakes().answers(applied("c"), granted("c"))
    talk.arrives("b", at=15.0).answers()
    talk.wakes().answers(applied("a"), granted("a"))
    talk.wakes().answers(applied("b"), granted("b"))  # its place is still between a and c
    assert max(talk.staleness) <= 2


def test_an_overdue_worker_keeps_its_turn_while_no_other_waits() -> None:
    talk = Conversation(R2SP(patience=1.0), workers="a")
    talk.arrives("a", at=1.0).answers(applied("a"), granted("a"))
    talk.wakes().answers()
    talk.arrives("a", at=50.0).answers(applied("a"), granted("a"))


def test_a_worker_that_hangs_stops_no_other() -> None:
    hangs = (1.0 if i < 5 else math.inf for i in count())
    story = run(R2SP(), {0: steady(1.0), 1: lambda batch: next(hangs), 2: steady(1.0)}, updates=60)
    assert {worker for _, workers in story.applied[-10:] for worker in workers} == {0, 2}


# T


@pytest.mark.parametrize("relax", [0.8, 1.0, 2.0])
def test_the_wait_for_a_turn_is_no_part_of_the_iteration_time(relax: float) -> None:
    """With relax=2 a round lasts twice as long as an iteration. If T included the wait, it would grow forever."""
    policy = R2SP(relax=relax)
    story = run(policy, {worker: steady(1.0) for worker in range(4)}, updates=400)
    assert policy.pace.T == pytest.approx(1.0)
    (before, _), (after, _) = story.applied[-5], story.applied[-1]
    assert after - before == pytest.approx(max(1.0, relax))


def test_the_iteration_time_falls_again() -> None:
    slow_for_a_while = (5.0 if i < 60 else 1.0 for i in count())
    policy = R2SP()
    run(policy, {worker: lambda batch: next(slow_for_a_while) for worker in range(3)}, updates=300)
    assert policy.pace.T == pytest.approx(1.0, rel=0.05)


def test_the_iteration_time_follows_a_worker_that_becomes_slow() -> None:
    """At first its updates arrive too late. When T has grown, they are applied."""
    becomes_slow = (1.0 if i < 10 else 10.0 for i in count())
    policy = R2SP()
    story = run(policy, {0: steady(1.0), 1: steady(1.0), 2: lambda batch: next(becomes_slow)}, updates=500)
    assert story.discarded > 0
    assert 2 in {worker for _, workers in story.applied[-6:] for worker in workers}


def test_staleness_is_n_minus_1() -> None:
    policy = R2SP()
    story = run(policy, {0: steady(1.0), 1: steady(2.9), 2: steady(0.3), 3: steady(1.7)}, updates=200)
    assert set(story.staleness[4:]) == {3}
    assert {len(workers) for _, workers in story.applied} == {1}


# Groups


def test_two_groups_take_turns_with_a_barrier_inside_each() -> None:
    talk = Conversation(R2SP(relax=1.0, groups=2), workers="abcd")  # a and c in one group, b and d in the other
    talk.arrives("a", at=4.0).answers(granted("b"))
    talk.wakes().answers(granted("c"))  # the gap is T/2
    talk.wakes().answers(granted("d"))
    assert talk.now == 8.0
    talk.arrives("b", at=8.0).answers()
    talk.arrives("c", at=10.0).answers(applied("ac"), granted("a"), granted("c"))
    talk.arrives("d", at=12.0).answers(applied("bd"), granted("b"), granted("d"))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_staleness_in_m_groups_is_m_minus_1(groups: int) -> None:
    story = run(R2SP(groups=groups), {worker: steady(1.0 + worker / 7) for worker in range(6)}, updates=300)
    assert set(story.staleness[20:]) == {groups - 1}
    assert {len(workers) for _, workers in story.applied[6:]} == {6 // groups}


def floor_of(search: FewestGroups, members: int, compute: float, transfer: float) -> int:
    """Return where the search ends if a round takes the longer of the links' time and one group's own path."""
    now = 0.0
    for _ in range(1000):
        size = math.ceil(members / search.groups)
        for _ in range(search.groups):
            search.turn(compute)
        now += max(members * transfer, compute + 2 * size * transfer)
        search.revolution(members, now)
        if search.settled:
            return search.groups
    raise AssertionError("the search did not settle")


@pytest.mark.parametrize("members", [4, 9, 16, 100])
@pytest.mark.parametrize("compute", [0.05, 0.3, 0.5, 0.7])
def test_auto_finds_the_fewest_groups_that_reach_the_floor(members: int, compute: float) -> None:
    """`compute` is a fraction of the communication time, which is 1 s."""
    transfer = 1.0 / members
    reach = [m for m in range(3, members + 1) if compute + 2 * math.ceil(members / m) * transfer <= 1.0 + 1e-9]
    found = floor_of(FewestGroups(), members, compute, transfer)
    if reach:
        assert found == reach[0]
    assert found >= 3  # two groups are only as fast as pipelined BSP


def test_auto_stops_where_more_groups_gain_nothing() -> None:
    """If computing is the bottleneck, more groups hardly shorten a round, so their staleness is not worth it."""
    assert floor_of(FewestGroups(), 16, compute=100.0, transfer=1 / 16) == 3


def test_auto_starts_with_three_groups_and_tries_more() -> None:
    """Without a network, four groups are not faster than three."""
    policy = R2SP(groups="auto")
    story = run(policy, {worker: steady(1.0) for worker in range(12)}, updates=2000)
    sizes = [len(workers) for _, workers in story.applied[12:]]
    assert set(sizes) == {4, 3}
    assert sizes[-1] == sizes[0] == 4
    for seats in (story.applied[-3:], story.applied[-6:-3]):
        assert sorted(worker for _, workers in seats for worker in workers) == list(range(12))


# Weights


def test_with_mean_weights_one_round_is_one_data_parallel_step() -> None:
    story = run(R2SP(weights="mean"), {worker: steady(1.0) for worker in range(4)}, updates=40)
    assert [weight for (weight,) in story.weights] == pytest.approx([0.25] * len(story.weights))


def test_a_grant_carries_the_tuned_batch_which_scales_the_learning_rate() -> None:
    policy = R2SP(tune_batches=True)
    story = run(policy, {0: lambda batch: batch / 100, 1: lambda batch: batch / 200}, updates=100, batch=100)
    assert story.batches[0][-1] == 100
    assert story.batches[1][-1] == pytest.approx(200, abs=2)
    assert max(weight for weights in story.weights[-4:] for weight in weights) == pytest.approx(2.0, abs=0.02)
