"""Streamed R²SP: a turn gates the push. With relax=1 the gap is T/N, which keeps the arithmetic easy."""

import pytest

from paceline.policies.contract import WakeAt
from paceline.policies.r2sp import R2SP
from policies.cluster import run
from policies.conversation import Conversation, applied, cancelled, discarded, granted, shown, streamed, streams, turn


def test_turns_gate_the_pushes_in_the_order_of_the_ring() -> None:
    talk = Conversation(streamed(R2SP(relax=1.0)), workers="abc")
    talk.is_ready("a", at=2.0).answers(turn("a"), streams("a", staleness=2))  # b and c have a turn before its next one
    talk.arrives("a", at=3.0).answers(applied("a"), granted("a"), granted("b"))  # T is 3 s, the gap 1 s
    talk.wakes().answers(granted("c"))
    talk.is_ready("a", at=5.0).answers(turn("a"), streams("a"))
    talk.is_ready("c", at=5.5).answers()  # b's turn comes first
    talk.arrives("a", at=6.0).answers(applied("a"), granted("a"))
    talk.is_ready("b").answers(turn("b"), streams("b"))
    talk.wakes().answers(turn("c"), streams("c"))
    assert talk.now == 7.0
    talk.arrives("c", at=7.5).answers()  # c has overtaken b on the network, but is not applied before it
    talk.arrives("b", at=7.75).answers(applied("b"), granted("b"), applied("c"), granted("c"))
    assert max(talk.staleness) <= 2


def test_the_wait_for_a_turn_is_no_part_of_the_iteration_time() -> None:
    policy = R2SP(relax=1.0)
    talk = Conversation(streamed(policy), workers="ab")
    talk.is_ready("a", at=2.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=4.0).answers(applied("a"), granted("a"), granted("b"))
    talk.is_ready("b", at=5.0).answers()  # it waits for a's turn
    talk.is_ready("a", at=7.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=8.0).answers(applied("a"), granted("a"))
    talk.wakes().answers(turn("b"), streams("b"))
    talk.arrives("b", at=10.0)
    assert policy.pace.T == 4.0  # b took 1 s to compute and 1 s to push; its wait of 4 s does not count


def test_an_overdue_worker_does_not_push_its_gradient() -> None:
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


def test_the_ring_does_not_wait_for_a_worker_that_leaves_during_its_push() -> None:
    talk = Conversation(streamed(R2SP(relax=1.0)), workers="ab")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"), granted("b"))
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a"))
    talk.is_ready("b", at=4.0).answers(turn("b"), streams("b"))
    talk.arrives("b", at=5.0).answers()
    talk.leaves("a", at=5.5).answers(applied("b"), granted("b"))
    talk.is_ready("b", at=7.0).answers(turn("b"), streams("b", staleness=0))  # no other worker is left to take a turn


def test_a_push_that_hangs_is_cancelled() -> None:
    talk = Conversation(streamed(R2SP(relax=1.0, patience=1.0)), workers="ab")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"), granted("b"))
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a"))
    talk.is_ready("b", at=3.5).answers()
    talk.wakes().answers(turn("b"), streams("b"))
    talk.arrives("b", at=4.5).answers()  # b is behind a, whose push may take 2·T
    while talk.now < 7.0:
        talk.answers()
        talk.wakes()
    talk.answers(cancelled("a"), applied("b"), granted("b"), granted("a"))  # the shards skip the missing slices of a
    talk.arrives("a", at=8.0, iteration=2).answers(discarded("a"))


@pytest.mark.parametrize("arrives", ["while it computes", "while it waits", "while it pushes", "after that", "never"])
def test_a_cancelled_push_is_never_applied_and_brings_no_grant(arrives: str) -> None:
    talk = Conversation(streamed(R2SP(relax=1.0, patience=1.0)), workers="ab")

    def arrives_if(moment: str) -> None:
        if arrives == moment:
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
    arrives_if("while it computes")
    talk.is_ready("a", at=8.0).answers()
    arrives_if("while it waits")
    talk.wakes().answers(turn("a"), streams("a"))
    arrives_if("while it pushes")
    talk.arrives("a", at=10.0).answers(applied("a"), granted("a"))
    arrives_if("after that")
    talk.is_ready("b").answers()
    talk.wakes().answers(turn("b"), streams("b"))  # the order has not changed


def pushing_together() -> Conversation:
    """Two groups of two. At 5 s a and c begin to push together, which may take 4 s. b waits for the next turn."""
    talk = Conversation(streamed(R2SP(relax=1.0, patience=1.0, groups=2)), workers="abcd")
    talk.is_ready("a", at=1.0)
    talk.arrives("a", at=2.0)
    talk.wakes().answers(granted("c"))
    for worker in "abc":
        talk.is_ready(worker, at=3.0).answers()
    talk.wakes().answers(granted("d"))
    talk.wakes().answers(turn("a"), turn("c"), streams("ac", staleness=1))
    assert talk.now == 5.0
    return talk


def all_answers(talk: Conversation, until: float) -> str:
    """Wake the policy whenever it asks for it. Return all that it answers."""
    answers = []
    while talk.wake <= until:
        talk.wakes()
        answers += [shown(decision) for decision in talk.last if not isinstance(decision, WakeAt)]
    return " ".join(answers)


def test_only_the_late_push_of_a_group_is_cancelled() -> None:
    talk = pushing_together()
    talk.is_held("a", at=6.0).answers()
    assert "cancelled" not in all_answers(talk, until=8.9)
    assert all_answers(talk, until=9.0) == "cancelled('c')"  # the servers apply a's update without c's now
    talk.arrives("a", at=9.5).answers(applied("a"), granted("a"))
    talk.arrives("c", at=10.0, iteration=1).answers(discarded("c"))


def test_a_held_update_is_awaited_for_as_long_as_it_takes() -> None:
    talk = pushing_together()
    talk.is_held("a", at=6.0).answers()
    talk.is_held("c", at=7.5)
    assert "cancelled" not in all_answers(talk, until=50.0)
    talk.arrives("a", at=50.0).answers()
    talk.arrives("c", at=50.0)
    assert [shown(decision) for decision in talk.last[:3]] == [
        "applied('ac', (1.0, 1.0))",
        "granted('a')",
        "granted('c')",
    ]


def test_a_group_of_which_nothing_is_held_is_cancelled_as_a_whole() -> None:
    assert "cancelled('a') cancelled('c')" in all_answers(pushing_together(), until=9.0)


def test_an_update_cancelled_before_its_turn_is_discarded_if_it_arrives() -> None:
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


def test_the_weight_is_decided_with_the_turn() -> None:
    """c joins while a pushes. Without streaming, a's update would weigh a third then."""
    talk = Conversation(streamed(R2SP(relax=1.0, weights="mean")), workers="a")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a", (1.0,)))
    talk.arrives("a", at=2.0).answers(applied("a", (1.0,)), granted("a"))
    talk.joins("b", at=2.5).answers(granted("b"))
    talk.is_ready("a", at=4.0).answers(turn("a"), streams("a", (0.5,)))
    talk.joins("c", at=4.25).answers()
    talk.arrives("a", at=4.5).answers(applied("a", (0.5,)), granted("a"))


def test_the_update_of_a_departed_worker_is_applied_at_its_place() -> None:
    """The shards have applied it between the other updates, as a version of its own."""
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


def test_a_push_that_holds_up_no_other_is_never_cancelled() -> None:
    talk = Conversation(streamed(R2SP(patience=1.0)), workers="a")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"))
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a"))
    while talk.wake < 50.0:
        talk.wakes().answers()
    talk.arrives("a", at=50.0).answers(applied("a"), granted("a"))


def test_a_starter_has_a_place_in_the_order_of_the_pushes() -> None:
    """a pushes when b joins. If b were granted before that push ends, a would have two turns before b's first."""
    talk = Conversation(streamed(R2SP(relax=1.0)), workers="a")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"))
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a"))
    talk.joins("b", at=4.5).answers()
    talk.arrives("a", at=5.0).answers(applied("a"), granted("a"), granted("b"))
    talk.is_ready("b", at=6.0).answers()
    talk.is_ready("a", at=6.0).answers(turn("a"), streams("a"))
    talk.arrives("a", at=6.5).answers(applied("a"), granted("a"))
    talk.wakes().answers(turn("b"), streams("b"))
    talk.arrives("b", at=8.5).answers(applied("b"), granted("b"))
    assert talk.staleness[-1] == 1


def test_batches_are_tuned_when_streamed() -> None:
    policy = streamed(R2SP(tune_batches=True))
    story = run(policy, {0: lambda batch: batch / 100, 1: lambda batch: batch / 200}, updates=100, batch=100)
    assert story.batches[0][-1] == 100
    assert story.batches[1][-1] == pytest.approx(200, abs=2)


def test_groups_can_be_streamed_unless_their_number_is_searched_for() -> None:
    assert R2SP().streamable
    assert R2SP(groups=3).streamable
    assert not R2SP(groups="auto").streamable
