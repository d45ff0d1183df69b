"""K-sync and K-batch-sync: the first K updates make a step, and the other workers start again."""

from paceline.policies.ksync import KBatch, KSync
from policies.conversation import Conversation, applied, cancelled, discarded, granted


def test_the_first_k_workers_make_a_step_and_the_rest_start_again() -> None:
    talk = Conversation(KSync(k=2), workers="abc")
    talk.arrives("c", at=1.0).answers()
    talk.arrives("a", at=2.0).answers(applied("ca"), cancelled("b"), granted("a"), granted("b"), granted("c"))


def test_the_update_of_a_cancelled_grant_is_discarded_and_brings_no_new_grant() -> None:
    talk = Conversation(KSync(k=1), workers="ab")
    talk.arrives("a", at=1.0).answers(applied("a"), cancelled("b"), granted("a"), granted("b"))
    talk.arrives("b", at=1.5, iteration=1).answers(discarded("b"))  # b holds its second Grant already
    talk.arrives("b", at=2.0).answers(applied("b"), cancelled("a"), granted("a"), granted("b"))
    assert talk.staleness == [0, 0]


def test_k_is_at_most_the_number_of_members() -> None:
    talk = Conversation(KSync(k=4), workers="ab")
    talk.arrives("a", at=1.0).answers()
    talk.arrives("b", at=2.0).answers(applied("ab"), granted("a"), granted("b"))


def test_a_step_is_made_when_a_missing_worker_leaves() -> None:
    talk = Conversation(KSync(k=3), workers="abc")
    talk.arrives("a", at=1.0).answers()
    talk.arrives("b", at=2.0).answers()
    talk.leaves("c", at=3.0).answers(applied("ab"), granted("a"), granted("b"))


def test_a_worker_that_joins_starts_at_once() -> None:
    talk = Conversation(KSync(k=2), workers="a")
    talk.joins("b", at=1.0).answers(granted("b"))
    talk.arrives("b", at=2.0).answers()
    talk.arrives("a", at=3.0).answers(applied("ba"), granted("a"), granted("b"))


def test_a_fast_worker_may_give_several_of_the_k_batches() -> None:
    talk = Conversation(KBatch(k=3), workers="ab")
    talk.arrives("a", at=1.0).answers(granted("a"))  # two are missing, so a computes another one from the same weights
    talk.arrives("a", at=2.0).answers(granted("a"))
    talk.arrives("a", at=3.0).answers(applied("aaa"), cancelled("b"), granted("a"), granted("b"))
    talk.arrives("b", at=3.5, iteration=1).answers(discarded("b"))
    assert talk.staleness == [0, 0, 0]


def test_the_worker_that_completes_k_batches_is_not_cancelled() -> None:
    talk = Conversation(KBatch(k=2), workers="abc")
    talk.arrives("b", at=1.0).answers(granted("b"))
    talk.arrives("c", at=2.0).answers(
        applied("bc"), cancelled("a"), cancelled("b"), granted("a"), granted("b"), granted("c")
    )


def test_no_update_is_left_undecided_when_the_last_worker_leaves() -> None:
    talk = Conversation(KBatch(k=3), workers="a")
    talk.arrives("a", at=1.0).answers(granted("a"))
    talk.leaves("a", at=2.0).answers(applied("a"))
