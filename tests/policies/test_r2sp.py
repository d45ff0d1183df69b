"""R²SP: turns in a fixed order, evenly gapped. With relax=1 the gap is T/N, which keeps the sums easy."""

import math
from itertools import count, pairwise

import pytest

from paceline.policies.fewest_groups import FewestGroups
from paceline.policies.r2sp import R2SP
from policies.cluster import run, steady
from policies.conversation import (
    Conversation,
    applied,
    cancelled,
    discarded,
    granted,
    streamed,
    streams,
    turn,
    wake_at,
)


def three(**options: float) -> Conversation:
    """a, b and c, each of whom takes 3 s, in the midst of things: it is 5 s, and a has just had its turn."""
    talk = Conversation(R2SP(relax=1.0, **options), workers="abc")  # type: ignore[arg-type]
    talk.arrives("a", at=3.0).answers(granted("b"))
    talk.wakes().answers(granted("c"))
    talk.wakes().answers(applied("a"), granted("a"))
    assert talk.now == 5.0
    return talk


# The start


def test_a_pilot_runs_alone_and_then_one_starts_each_gap() -> None:
    talk = Conversation(R2SP(relax=1.0))
    talk.joins("a", at=0.0).answers(granted("a", staleness=0))
    for worker in "bcd":
        talk.joins(worker).answers()
    talk.arrives("a", at=4.0).answers(granted("b", staleness=3), wake_at(5.0))  # T is 4 s, so the gap is 1 s
    talk.wakes().answers(granted("c"), wake_at(6.0))
    talk.wakes().answers(granted("d"), wake_at(7.0))
    talk.wakes().answers(applied("a"), granted("a", staleness=3), wake_at(24.0))  # b is overdue at 8 + 4·4


def test_if_the_pilot_leaves_the_next_one_is_the_pilot() -> None:
    talk = Conversation(R2SP(), workers="abc")
    talk.leaves("a", at=3.0).answers(granted("b"))
    talk.leaves("b", at=4.0).answers(granted("c"))
    talk.arrives("c", at=5.0).answers(applied("c"), granted("c"))


def test_no_stampede_and_the_order_in_which_they_joined() -> None:
    story = run(R2SP(), {worker: steady(1.0) for worker in (5, 2, 9, 0)}, updates=40)
    first = [worker for _, (worker,) in story.applied[:4]]
    times = [time for time, _ in story.applied]
    assert first == [5, 2, 9, 0]
    assert min(b - a for a, b in pairwise(times)) >= 0.8 / 4 - 1e-9


def test_who_joins_later_is_last_in_line() -> None:
    talk = three()
    talk.joins("d", at=5.5).answers(wake_at(5.75))  # four now: the gap is 0.75 s
    talk.wakes().answers(granted("d"))
    talk.arrives("b", at=6.0).answers()
    talk.wakes().answers(applied("b"), granted("b"))
    talk.arrives("d", at=7.0).answers()  # before c and a
    talk.arrives("c", at=7.0).answers()
    talk.wakes().answers(applied("c"), granted("c"))
    talk.arrives("a", at=8.0).answers(applied("a"), granted("a"))
    talk.wakes().answers(applied("d"), granted("d"))
    assert max(talk.staleness) <= 3


def test_an_instant_cluster_is_no_reason_to_give_up_on_anybody() -> None:
    """T is 0: then there is no gap, and nobody can be overdue."""
    talk = Conversation(R2SP(), workers="ab")
    talk.arrives("a", at=0.0).answers(granted("b"), applied("a"), granted("a"))
    talk.arrives("a", at=0.0).answers()
    talk.arrives("b", at=9.0).answers(applied("b"), granted("b"))


# The order


def test_the_order_is_kept_even_if_a_later_one_arrives_first() -> None:
    talk = three()
    talk.arrives("c", at=5.5).answers()
    talk.arrives("b", at=6.0).answers(applied("b"), granted("b"), wake_at(7.0))
    talk.wakes().answers(applied("c"), granted("c"))
    talk.arrives("a", at=8.0).answers(applied("a"), granted("a"))


def test_turns_are_a_gap_apart_even_if_all_have_arrived() -> None:
    talk = three()
    for worker in "cab":
        talk.arrives(worker, at=6.0)
    talk.answers(applied("b"), granted("b"))
    talk.wakes().answers(applied("c"), granted("c"))
    assert talk.now == 7.0
    talk.wakes().answers(applied("a"), granted("a"))
    assert talk.now == 8.0


def test_a_wake_too_early_or_too_often_changes_nothing() -> None:
    talk = three()
    talk.arrives("c", at=5.5)
    talk.arrives("b", at=6.0)
    for _ in range(2):
        talk.wakes(at=6.5).answers(wake_at(7.0))
    talk.wakes().answers(applied("c"), granted("c"))


# Leaving


def test_one_who_leaves_passes_the_turn_at_once() -> None:
    talk = three()
    talk.arrives("c", at=7.0).answers()
    talk.leaves("b", at=7.5).answers(applied("c"), granted("c", staleness=1))


def test_what_one_who_leaves_had_brought_goes_with_the_next_turn() -> None:
    talk = three()
    talk.arrives("c", at=5.5).answers()
    talk.leaves("c", at=5.75).answers()
    talk.arrives("b", at=6.0).answers(wake_at(6.5))  # two are left: the gap is 1.5 s
    talk.wakes().answers(applied("cb"), granted("b"))
    talk.arrives("a", at=8.0).answers(applied("a"), granted("a"))
    assert talk.staleness[-1] == 1  # one version since a's Grant, not two


def test_nothing_is_left_lying_when_the_last_one_leaves() -> None:
    talk = three()
    talk.arrives("c", at=5.5).answers()
    talk.leaves("c").answers()
    talk.leaves("a").answers()
    talk.leaves("b").answers(applied("c"))


def test_one_who_comes_back_gets_no_second_turn_before_the_others() -> None:
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


# The overdue


def test_one_who_is_overdue_loses_its_turn_but_not_its_place() -> None:
    talk = three(patience=1.0)
    talk.arrives("c", at=7.0).answers()
    talk.arrives("a", at=8.0).answers()
    assert talk.wake == 9.0  # b was granted at 3 and is due at 6; one T later it is overdue
    talk.wakes().answers(applied("c"), granted("c"))
    talk.wakes().answers(applied("a"), granted("a"))
    assert talk.now == 10.0
    talk.arrives("b", at=11.0).answers(discarded("b"), wake_at(12.0))  # b has shown T to be 6 s: the gap is 2 s
    talk.wakes().answers(granted("b"))
    talk.arrives("c", at=12.5).answers()
    talk.arrives("a", at=13.0).answers()
    talk.wakes().answers(applied("c"), granted("c"))
    talk.arrives("b", at=15.0).answers()
    talk.wakes().answers(applied("a"), granted("a"))
    talk.wakes().answers(applied("b"), granted("b"))  # its place is between a and c, as ever
    assert max(talk.staleness) <= 2


def test_nobody_is_given_up_while_nobody_waits_for_it() -> None:
    talk = Conversation(R2SP(patience=1.0), workers="a")
    talk.arrives("a", at=1.0).answers(applied("a"), granted("a"))
    talk.wakes().answers()
    talk.arrives("a", at=50.0).answers(applied("a"), granted("a"))


def test_one_who_hangs_and_never_answers_stops_nobody() -> None:
    hangs = (1.0 if i < 5 else math.inf for i in count())
    story = run(R2SP(), {0: steady(1.0), 1: lambda batch: next(hangs), 2: steady(1.0)}, updates=60)
    assert {worker for _, workers in story.applied[-10:] for worker in workers} == {0, 2}


# T


@pytest.mark.parametrize("relax", [0.8, 1.0, 3.0])
def test_the_wait_for_a_turn_is_no_part_of_the_iteration_time(relax: float) -> None:
    """With relax=3 a round lasts three times the iteration; if T counted that, it would grow for ever."""
    policy = R2SP(relax=relax)
    story = run(policy, {worker: steady(1.0) for worker in range(4)}, updates=400)
    assert policy.pace.T == pytest.approx(1.0)
    (before, _), (after, _) = story.applied[-5], story.applied[-1]
    assert after - before == pytest.approx(max(1.0, relax))


def test_the_iteration_time_comes_down_again() -> None:
    slow_for_a_while = (5.0 if i < 60 else 1.0 for i in count())
    policy = R2SP()
    run(policy, {worker: lambda batch: next(slow_for_a_while) for worker in range(3)}, updates=300)
    assert policy.pace.T == pytest.approx(1.0, rel=0.05)


def test_the_iteration_time_follows_one_who_has_become_slow() -> None:
    """At first its updates come too late; then T has grown, and they are applied."""
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


def test_two_groups_take_turns_with_a_barrier_in_each() -> None:
    talk = Conversation(R2SP(relax=1.0, groups=2), workers="abcd")  # a and c in one, b and d in the other
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
    """Where the search ends if a round is as long as the slower of the links and of one group's own path."""
    now = 0.0
    for _ in range(1000):
        size = math.ceil(members / search.groups)
        for _ in range(search.groups):
            search.turn(compute)
        now += max(members * transfer, compute + 2 * size * transfer)
        search.revolution(members, now)
        if search.settled:
            return search.groups
    raise AssertionError("the search does not settle")


@pytest.mark.parametrize("members", [4, 9, 16, 100])
@pytest.mark.parametrize("compute", [0.05, 0.3, 0.5, 0.7])
def test_auto_finds_the_fewest_groups_that_reach_the_floor(members: int, compute: float) -> None:
    """Compute is given as a fraction of the communication, which takes 1 s."""
    transfer = 1.0 / members
    reach = [m for m in range(3, members + 1) if compute + 2 * math.ceil(members / m) * transfer <= 1.0 + 1e-9]
    found = floor_of(FewestGroups(), members, compute, transfer)
    if reach:
        assert found == reach[0]
    assert found >= 3  # two only match pipelined BSP


def test_auto_stops_where_more_groups_cost_more_than_they_bring() -> None:
    """Compute-bound: a round can hardly get shorter, and staleness is not taken for nothing."""
    assert floor_of(FewestGroups(), 16, compute=100.0, transfer=1 / 16) == 3


def test_auto_starts_with_three_groups_tries_more_and_seats_everyone() -> None:
    """Without a network, four groups are not faster than three."""
    policy = R2SP(groups="auto")
    story = run(policy, {worker: steady(1.0) for worker in range(12)}, updates=2000)
    sizes = [len(workers) for _, workers in story.applied[12:]]
    assert set(sizes) == {4, 3}
    assert sizes[-1] == sizes[0] == 4
    for seats in (story.applied[-3:], story.applied[-6:-3]):
        assert sorted(worker for _, workers in seats for worker in workers) == list(range(12))


# Weights


def test_in_the_mean_one_round_is_one_data_parallel_step() -> None:
    story = run(R2SP(weights="mean"), {worker: steady(1.0) for worker in range(4)}, updates=40)
    assert [weight for (weight,) in story.weights] == pytest.approx([0.25] * len(story.weights))


def test_tuned_batches_travel_and_scale_the_learning_rate() -> None:
    policy = R2SP(tune_batches=True)
    story = run(policy, {0: lambda batch: batch / 100, 1: lambda batch: batch / 200}, updates=100, batch=100)
    assert story.batches[0][-1] == 100
    assert story.batches[1][-1] == pytest.approx(200, abs=2)
    assert max(weight for weights in story.weights[-4:] for weight in weights) == pytest.approx(2.0, abs=0.02)


# Streamed: a turn gates the push


def test_streamed_the_push_is_gated_in_ring_order() -> None:
    talk = Conversation(streamed(R2SP(relax=1.0)), workers="abc")
    talk.is_ready("a", at=2.0).answers(turn("a"), streams("a", staleness=2))  # b and c come before its next turn
    talk.arrives("a", at=3.0).answers(applied("a"), granted("a"), granted("b"))  # T is 3 s, the gap 1 s
    talk.wakes().answers(granted("c"))
    talk.is_ready("a", at=5.0).answers(turn("a"), streams("a"))
    talk.is_ready("c", at=5.5).answers()  # b's turn comes first
    talk.arrives("a", at=6.0).answers(applied("a"), granted("a"))
    talk.is_ready("b").answers(turn("b"), streams("b"))
    talk.wakes().answers(turn("c"), streams("c"))
    assert talk.now == 7.0
    talk.arrives("c", at=7.5).answers()  # it overtook b on the way, but is not applied before it
    talk.arrives("b", at=7.75).answers(applied("b"), granted("b"), applied("c"), granted("c"))
    assert max(talk.staleness) <= 2


def test_streamed_the_wait_for_a_turn_is_no_part_of_the_iteration_time() -> None:
    policy = R2SP(relax=1.0)
    talk = Conversation(streamed(policy), workers="ab")
    talk.is_ready("a", at=2.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=4.0).answers(applied("a"), granted("a"), granted("b"))
    talk.is_ready("b", at=5.0).answers()  # it waits for a
    talk.is_ready("a", at=7.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=8.0).answers(applied("a"), granted("a"))
    talk.wakes().answers(turn("b"), streams("b"))
    talk.arrives("b", at=10.0)
    assert policy.pace.T == 4.0  # b took 1 s to compute and 1 s to push; the 4 s between do not count


def test_streamed_what_an_overdue_worker_computed_is_not_pushed() -> None:
    talk = Conversation(streamed(R2SP(relax=1.0, patience=1.0)), workers="ab")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"), granted("b"))
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=4.0).answers(applied("a"), granted("a"))
    talk.is_ready("a", at=5.0).answers()
    talk.wakes().answers(turn("a"), streams("a"))  # b has lost its turn
    assert talk.now == 6.0
    talk.arrives("a", at=6.5).answers(applied("a"), granted("a"))
    talk.is_ready("b", at=8.0).answers(cancelled("b"), granted("b"))


def test_streamed_one_who_dies_in_mid_push_is_not_waited_for() -> None:
    talk = Conversation(streamed(R2SP(relax=1.0)), workers="ab")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"), granted("b"))
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a"))
    talk.is_ready("b", at=4.0).answers(turn("b"), streams("b"))
    talk.arrives("b", at=5.0).answers()
    talk.leaves("a", at=5.5).answers(applied("b"), granted("b"))
    talk.is_ready("b", at=7.0).answers(turn("b"), streams("b", staleness=0))  # nobody is left to come in between


def test_streamed_one_who_hangs_in_mid_push_is_given_up() -> None:
    talk = Conversation(streamed(R2SP(relax=1.0, patience=1.0)), workers="ab")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"), granted("b"))
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a"))
    talk.is_ready("b", at=3.5).answers()
    talk.wakes().answers(turn("b"), streams("b"))
    talk.arrives("b", at=4.5).answers()  # behind a, whose push may take 2 T
    while talk.now < 7.0:
        talk.answers()
        talk.wakes()
    talk.answers(cancelled("a"), applied("b"), granted("b"), granted("a"))  # the shards skip what is missing of it
    talk.arrives("a", at=8.0, iteration=2).answers(discarded("a"))


@pytest.mark.parametrize("comes", ["while it computes", "while it waits", "while it pushes", "after that", "never"])
def test_streamed_what_was_cancelled_in_mid_push_is_never_applied_and_grants_nothing(comes: str) -> None:
    talk = Conversation(streamed(R2SP(relax=1.0, patience=1.0)), workers="ab")

    def perhaps(moment: str) -> None:
        if comes == moment:
            talk.arrives("a", iteration=2).answers(discarded("a"))

    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"), granted("b"))
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a"))
    talk.is_ready("b", at=3.5).answers()
    talk.wakes().answers(turn("b"), streams("b"))
    talk.arrives("b", at=4.5).answers()
    while talk.now < 7.0:
        talk.wakes()
    talk.answers(cancelled("a"), applied("b"), granted("b"), granted("a"))
    perhaps("while it computes")
    talk.is_ready("a", at=8.0).answers()
    perhaps("while it waits")
    talk.wakes().answers(turn("a"), streams("a"))
    perhaps("while it pushes")
    talk.arrives("a", at=10.0).answers(applied("a"), granted("a"))
    perhaps("after that")
    talk.is_ready("b").answers()
    talk.wakes().answers(turn("b"), streams("b"))  # the order is as ever


def test_streamed_what_was_cancelled_before_its_turn_is_discarded_if_it_is_pushed_all_the_same() -> None:
    talk = Conversation(streamed(R2SP(relax=1.0, patience=1.0)), workers="ab")
    talk.is_ready("a", at=1.0)
    talk.arrives("a", at=2.0)
    talk.is_ready("a", at=3.0)
    talk.arrives("a", at=4.0)
    talk.is_ready("a", at=5.0).answers()
    talk.wakes().answers(turn("a"), streams("a"))  # b has lost its turn
    talk.is_ready("b", at=6.5).answers(cancelled("b"))
    talk.arrives("b", iteration=1).answers(discarded("b"))
    talk.arrives("a", at=6.75).answers(applied("a"), granted("a"))
    talk.wakes().answers(granted("b"))


def test_streamed_the_weight_is_settled_with_the_turn() -> None:
    """c comes while a pushes. Applied whole, a would weigh a third by then."""
    talk = Conversation(streamed(R2SP(relax=1.0, weights="mean")), workers="a")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a", (1.0,)))
    talk.arrives("a", at=2.0).answers(applied("a", (1.0,)), granted("a"))
    talk.joins("b", at=2.5).answers(granted("b"))
    talk.is_ready("a", at=4.0).answers(turn("a"), streams("a", (0.5,)))
    talk.joins("c", at=4.25).answers()
    talk.arrives("a", at=4.5).answers(applied("a", (0.5,)), granted("a"))


def test_streamed_what_one_who_leaves_had_brought_is_applied_in_its_place() -> None:
    """The shards have it between the others, as a version of its own."""
    talk = Conversation(streamed(R2SP(relax=0.3)), workers="abc")
    talk.is_ready("a", at=1.0)
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"), granted("b"))
    talk.wakes().answers(granted("c"))
    for at, worker in enumerate("abc", start=3):
        talk.is_ready(worker, at=at).answers(turn(worker), streams(worker))
    talk.arrives("b").answers()
    talk.leaves("b").answers()
    talk.arrives("c").answers()
    talk.arrives("a").answers(applied("a"), granted("a"), applied("b"), applied("c"), granted("c"))


def test_streamed_a_lone_push_is_never_given_up() -> None:
    talk = Conversation(streamed(R2SP(patience=1.0)), workers="a")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"))
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a"))
    while talk.wake < 50.0:
        talk.wakes().answers()
    talk.arrives("a", at=50.0).answers(applied("a"), granted("a"))


def test_streamed_a_starter_takes_its_place_in_the_order_of_the_pushes() -> None:
    """a's push is under way when b comes. Were b granted before it is in, a would come twice before b's first turn."""
    talk = Conversation(streamed(R2SP(relax=1.0)), workers="a")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"))
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a"))
    talk.joins("b", at=4.5).answers()
    talk.arrives("a", at=5.0).answers(applied("a"), granted("a"), granted("b"))
    talk.is_ready("b", at=6.0).answers()
    talk.is_ready("a", at=6.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=7.0).answers(applied("a"), granted("a"))
    talk.wakes().answers(turn("b"), streams("b"))
    talk.arrives("b", at=8.5).answers(applied("b"), granted("b"))
    assert talk.staleness[-1] == 1


def test_streamed_batches_are_tuned_too() -> None:
    policy = streamed(R2SP(tune_batches=True))
    story = run(policy, {0: lambda batch: batch / 100, 1: lambda batch: batch / 200}, updates=100, batch=100)
    assert story.batches[0][-1] == 100
    assert story.batches[1][-1] == pytest.approx(200, abs=2)


def test_only_single_workers_can_be_streamed() -> None:
    assert R2SP().streamable
    assert not R2SP(groups=3).streamable
