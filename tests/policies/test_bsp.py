"""BSP: the barrier, and how joining and leaving change it."""

import pytest

from paceline.policies import PolicyError
from paceline.policies.bsp import BSP
from policies.cluster import run, steady
from policies.conversation import Conversation, applied, discarded, granted, streams, turn


def test_the_barrier_closes_when_all_updates_have_arrived() -> None:
    talk = Conversation(BSP(), workers="abc")
    talk.arrives("b", at=1.0).answers()
    talk.arrives("a", at=2.0).answers()
    talk.arrives("c", at=3.0).answers(applied("bac"), granted("b"), granted("a"), granted("c"))
    talk.arrives("a", at=4.0).answers()
    assert talk.staleness == [0, 0, 0]


def test_backup_closes_the_barrier_without_the_slowest_and_discards_its_update() -> None:
    talk = Conversation(BSP(backup=1), workers="abc")
    talk.arrives("a", at=1.0).answers()
    talk.arrives("b", at=2.0).answers(applied("ab"), granted("a"), granted("b"))
    talk.arrives("c", at=3.0).answers(discarded("c"), granted("c"))  # late: c starts from the newest model
    talk.arrives("c", at=4.0).answers()
    talk.arrives("a", at=5.0).answers(applied("ca"), granted("c"), granted("a"))


def test_with_more_backups_than_workers_the_barrier_waits_for_one() -> None:
    talk = Conversation(BSP(backup=5), workers="ab")
    talk.arrives("b", at=1.0).answers(applied("b"), granted("b"))


def test_a_fraction_of_the_members_is_enough() -> None:
    talk = Conversation(BSP(fraction=0.5), workers="abcd")
    talk.arrives("a", at=1.0).answers()
    talk.arrives("d", at=2.0).answers(applied("ad"), granted("a"), granted("d"))
    talk.arrives("b", at=3.0).answers(discarded("b"), granted("b"))


def test_a_fraction_is_not_rounded_down_by_floating_point() -> None:
    """0.29 · 100 is 28.999…, and the barrier still waits for exactly 29 updates."""
    policy = BSP(fraction=0.29)
    story = run(policy, {worker: steady(1.0 + worker / 1000) for worker in range(100)}, updates=29)
    assert [len(workers) for _, workers in story.applied] == [29]


def test_a_fraction_is_not_rounded_up_by_floating_point() -> None:
    """0.1 · 30 is 3.0000000000000004, and the barrier still waits for exactly 3 updates."""
    policy = BSP(fraction=0.1)
    story = run(policy, {worker: steady(1.0 + worker / 1000) for worker in range(30)}, updates=3)
    assert [len(workers) for _, workers in story.applied] == [3]


def test_a_fraction_is_rounded_up_to_whole_members() -> None:
    talk = Conversation(BSP(fraction=0.75), workers="abcde")
    for worker, time in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        talk.arrives(worker, at=time).answers()
    talk.arrives("d", at=4.0).answers(applied("abcd"), granted("a"), granted("b"), granted("c"), granted("d"))


def test_a_worker_that_joins_enters_the_open_round() -> None:
    talk = Conversation(BSP(), workers="ab")
    talk.arrives("a", at=1.0).answers()
    talk.joins("c", at=1.5).answers(granted("c"))
    talk.arrives("b", at=2.0).answers()
    talk.arrives("c", at=3.0).answers(applied("abc"), granted("a"), granted("b"), granted("c"))


def test_the_barrier_closes_when_the_missing_worker_leaves() -> None:
    talk = Conversation(BSP(), workers="abc")
    talk.arrives("a", at=1.0).answers()
    talk.arrives("b", at=2.0).answers()
    talk.leaves("c", at=3.0).answers(applied("ab"), granted("a"), granted("b"))


def test_the_update_of_a_departed_worker_still_counts() -> None:
    talk = Conversation(BSP(), workers="ab")
    talk.arrives("a", at=1.0).answers()
    talk.leaves("a", at=2.0).answers()  # the barrier waits for b
    talk.arrives("b", at=3.0).answers(applied("ab"), granted("b"))


def test_no_update_is_left_undecided_when_the_last_worker_leaves() -> None:
    talk = Conversation(BSP(), workers="ab")
    talk.arrives("a", at=1.0).answers()
    talk.leaves("a", at=2.0).answers()
    talk.leaves("b", at=3.0).answers(applied("a"))
    talk.joins("c", at=4.0).answers(granted("c"))
    talk.arrives("c", at=5.0).answers(applied("c"), granted("c"))


def test_a_worker_that_rejoins_is_a_new_member() -> None:
    talk = Conversation(BSP(), workers="ab")
    talk.arrives("a", at=1.0).answers()
    talk.leaves("a", at=2.0).answers()
    talk.joins("a", at=2.5).answers(granted("a"))
    talk.arrives("b", at=3.0).answers()
    talk.arrives("a", at=4.0).answers(applied("aba"), granted("b"), granted("a"))


def test_a_grant_carries_the_tuned_batch_which_scales_the_learning_rate() -> None:
    """The fast worker idles half the time with 100 samples, so it gets 200. Its updates then weigh twice as much."""
    policy = BSP(tune_batches=True)
    slow, fast = (lambda batch: batch / 100), (lambda batch: batch / 200)
    story = run(policy, {0: slow, 1: fast}, updates=60, batch=100)
    assert story.batches[0][-1] == 100
    assert story.batches[1][-1] == pytest.approx(200, abs=2)
    assert story.weights[0] == (1.0, 1.0)
    assert sorted(story.weights[-1]) == pytest.approx([1.0, 2.0], abs=0.02)


def test_without_tuning_a_grant_carries_no_batch() -> None:
    talk = Conversation(BSP(), workers="a")
    talk.arrives("a", at=1.0).answers(applied("a"), granted("a", batch=None))


def test_a_pipeline_needs_every_member() -> None:
    with pytest.raises(PolicyError, match="pipeline=true needs every member's slices"):
        BSP(pipeline=True, backup=1)
    assert BSP(pipeline=True).pipelined
    assert not BSP().pipelined


# Pipelined: a round is settled when all its members are ready to push


def pipelined(workers: str, **options: str) -> Conversation:
    return Conversation(BSP(pipeline=True, **options), workers=workers)  # type: ignore[arg-type]


def test_pipelined_the_last_member_to_be_ready_settles_the_round() -> None:
    talk = pipelined("abc", weights="mean")
    talk.is_ready("b", at=1.0).answers(turn("b"))
    talk.is_ready("a", at=2.0).answers(turn("a"))
    talk.arrives("b", at=2.5).answers()  # it has arrived before the round is settled
    third = (1 / 3,) * 3
    talk.is_ready("c", at=3.0).answers(turn("c"), streams("bac", third))
    talk.arrives("c", at=4.0).answers()
    talk.arrives("a", at=5.0).answers(applied("bac", third), granted("b"), granted("c"), granted("a"))
    talk.is_ready("a", at=6.0).answers(turn("a"))
    assert talk.staleness == [0, 0, 0]


def test_pipelined_the_round_is_settled_when_the_missing_worker_leaves() -> None:
    talk = pipelined("abc")
    for worker in "ab":
        talk.is_ready(worker, at=1.0)
    talk.arrives("a", at=1.5).answers()
    talk.leaves("c", at=2.0).answers(streams("ab"))
    talk.arrives("b", at=3.0).answers(applied("ab"), granted("a"), granted("b"))


def test_pipelined_the_round_ends_when_the_missing_worker_leaves_after_all_pushes() -> None:
    talk = pipelined("abc")
    for worker in "ab":
        talk.is_ready(worker, at=1.0)
        talk.arrives(worker).answers()
    talk.leaves("c", at=2.0).answers(streams("ab"), applied("ab"), granted("a"), granted("b"))


def test_pipelined_a_worker_that_joins_before_the_round_is_settled_enters_it() -> None:
    talk = pipelined("ab")
    talk.is_ready("a", at=1.0).answers(turn("a"))
    talk.joins("c", at=1.5).answers(granted("c"))
    talk.is_ready("b", at=2.0).answers(turn("b"))
    talk.is_ready("c", at=3.0).answers(turn("c"), streams("abc"))


def test_pipelined_a_worker_that_joins_later_waits_for_the_next_round() -> None:
    talk = pipelined("ab")
    for worker in "ab":
        talk.is_ready(worker, at=1.0)
    talk.answers(turn("b"), streams("ab"))
    talk.joins("c", at=1.5).answers()
    talk.joins("d", at=1.5).answers()
    talk.arrives("a", at=2.0).answers()
    talk.leaves("d", at=2.5).answers()
    talk.arrives("b", at=3.0).answers(applied("ab"), granted("a"), granted("b"), granted("c"))
    for worker in "abc":
        talk.is_ready(worker, at=4.0)
    talk.answers(turn("c"), streams("abc"))


def test_pipelined_a_worker_that_leaves_during_its_push_is_missing_from_the_apply() -> None:
    talk = pipelined("abc", weights="mean")
    for worker in "abc":
        talk.is_ready(worker, at=1.0)
    talk.arrives("a", at=2.0).answers()
    talk.leaves("c", at=2.5).answers()
    talk.arrives("b", at=3.0).answers(applied("ab", (1 / 3, 1 / 3)), granted("a"), granted("b"))


def test_pipelined_the_update_of_a_departed_worker_still_counts() -> None:
    talk = pipelined("ab")
    for worker in "ab":
        talk.is_ready(worker, at=1.0)
    talk.arrives("a", at=2.0).answers()
    talk.leaves("a", at=2.5).answers()
    talk.joins("a", at=2.75).answers()  # its old update is in this round; the new incarnation is in the next
    talk.arrives("b", at=3.0).answers(applied("ab"), granted("b"), granted("a"))


def test_pipelined_the_update_is_discarded_if_its_worker_leaves_before_the_round_is_settled() -> None:
    talk = pipelined("ab")
    talk.is_ready("a", at=1.0)
    talk.arrives("a", at=2.0).answers()
    talk.leaves("a", at=2.5).answers(discarded("a"))
    talk.joins("a", at=2.75).answers(granted("a"))
    talk.is_ready("b", at=3.0).answers(turn("b"))
    talk.is_ready("a", at=4.0).answers(turn("a"), streams("ba"))


def test_pipelined_the_next_round_begins_when_all_members_of_a_round_have_left() -> None:
    for arrived in (True, False):
        talk = pipelined("ab")
        for worker in "ab":
            talk.is_ready(worker, at=1.0)
        talk.joins("c", at=1.5).answers()
        if arrived:
            talk.arrives("a", at=2.0).answers()
        talk.leaves("a", at=2.5).answers()
        talk.leaves("b", at=3.0).answers(*[applied("a")] * arrived, granted("c"))
        talk.is_ready("c", at=4.0).answers(turn("c"), streams("c"))
        talk.arrives("c", at=5.0).answers(applied("c"), granted("c"))


def test_pipelined_tuned_batches_scale_the_learning_rate() -> None:
    policy = BSP(pipeline=True, tune_batches=True)
    slow, fast = (lambda batch: batch / 100), (lambda batch: batch / 200)
    story = run(policy, {0: slow, 1: fast}, updates=60, batch=100)
    assert story.batches[1][-1] == pytest.approx(200, abs=2)
    assert sorted(story.weights[-1]) == pytest.approx([1.0, 2.0], abs=0.02)
