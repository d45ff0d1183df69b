"""SAFA: quota, compensatory selection, cache and lag. Mostly four clients with equal data, half of them per round."""

import pytest

from paceline.policies import Apply, Keep
from paceline.policies.safa import SAFA
from policies.conversation import Conversation, applied, cancelled, discarded, granted, kept, wake_at


def test_a_round_ends_with_the_first_half_and_clients_without_an_entry_count_as_the_global_model() -> None:
    talk = Conversation(SAFA(fraction=0.5), workers="abcd")
    talk.arrives("c", at=1.0).answers()
    talk.arrives("a", at=2.0).answers(
        kept("c"), kept("a"), applied("ac", weights=(0.5, 0.5), mix=0.5), granted("c"), granted("a")
    )


def test_updates_of_clients_picked_last_time_are_undrafted_and_count_from_the_next_round_on() -> None:
    talk = Conversation(SAFA(fraction=0.5), workers="abcd")
    talk.arrives("a", at=1.0)
    talk.arrives("b", at=2.0)
    talk.arrives("a", at=3.0).answers()  # a was picked in the last round, so the others come first
    talk.arrives("b", at=4.0).answers()
    talk.arrives("c", at=5.0).answers()
    first_a = talk.policy.cache[0]  # type: ignore[attr-defined]
    talk.arrives("d", at=6.0).answers(
        kept("c"),
        kept("d"),
        applied("abcd", weights=(0.25, 0.25, 0.25, 0.25), mix=1.0),
        kept("a"),
        kept("b"),
        granted("c"),
        granted("d"),
        granted("a"),
        granted("b"),
    )
    (apply,) = [decision for decision in talk.last if isinstance(decision, Apply)]
    assert apply.updates[0] == first_a  # a's old entry; its new update is kept after the aggregation
    assert talk.policy.cache[0].iteration == 2  # type: ignore[attr-defined]


def test_undrafted_updates_fill_the_quota_if_no_client_is_left_to_wait_for() -> None:
    talk = Conversation(SAFA(fraction=0.3), workers="abc")
    talk.arrives("a", at=1.0).answers(kept("a"), applied("a", mix=1 / 3), granted("a"))
    talk.arrives("a", at=2.0).answers()
    talk.leaves("b", at=3.0).answers()
    talk.leaves("c", at=4.0).answers(kept("a"), applied("a", mix=1.0), granted("a"))


def test_a_quota_is_rounded_up_to_whole_clients() -> None:
    talk = Conversation(SAFA(fraction=0.5), workers="abc")
    talk.arrives("a", at=1.0).answers()
    talk.arrives("b", at=2.0).answers(kept("a"), kept("b"), applied("ab", mix=2 / 3), granted("a"), granted("b"))


def test_deprecated_clients_are_cancelled_and_get_the_newest_model() -> None:
    talk = Conversation(SAFA(fraction=0.5, lag=1, limit=10.0), workers="abcd")
    talk.arrives("a", at=1.0)
    talk.arrives("b", at=2.0).answers(
        kept("a"), kept("b"), applied("ab", mix=0.5), granted("a"), granted("b"), wake_at(12.0)
    )
    talk.arrives("a", at=3.0).answers()
    talk.arrives("b", at=4.0).answers()
    talk.wakes().answers(  # the round's time is over, and the models of c and d are two rounds old
        kept("a"),
        kept("b"),
        applied("ab", mix=0.5),
        cancelled("c"),
        cancelled("d"),
        granted("a"),
        granted("b"),
        granted("c"),
        granted("d"),
        wake_at(22.0),
    )
    talk.arrives("c", at=13.0, iteration=1).answers(discarded("c"))
    talk.arrives("c", at=14.0).answers()


def test_tolerable_clients_continue_with_the_model_they_have() -> None:
    talk = Conversation(SAFA(fraction=0.25, lag=5), workers="abcd")
    talk.arrives("a", at=1.0).answers(kept("a"), applied("a", mix=0.25), granted("a"))
    talk.arrives("b", at=2.0).answers(kept("b"), applied("ab", mix=0.5), granted("b"))
    assert talk.staleness == [0, 1, 1]  # b is one version behind, and so is a's entry in the cache


def test_a_deprecated_clients_entry_is_reset_to_the_global_model() -> None:
    talk = Conversation(SAFA(fraction=0.25, lag=0), workers="abcd")
    talk.arrives("a", at=1.0).answers(
        kept("a"), applied("a", mix=0.25), cancelled("b"), cancelled("c"), cancelled("d"),
        granted("a"), granted("b"), granted("c"), granted("d"),
    )  # fmt: skip
    talk.arrives("b", at=2.0)
    assert [decision for decision in talk.last if isinstance(decision, Keep)] == [
        Keep(talk.policy.cache[1], 1)  # type: ignore[attr-defined]
    ]
    (apply,) = [decision for decision in talk.last if isinstance(decision, Apply)]
    assert [update.worker for update in apply.updates] == [1]  # a still runs, and its model is one round old
    assert apply.mix == 0.25


def test_a_departed_clients_entry_is_dropped() -> None:
    talk = Conversation(SAFA(fraction=0.5), workers="abcd")
    talk.arrives("a", at=1.0)
    talk.arrives("b", at=2.0).answers(kept("a"), kept("b"), applied("ab", mix=0.5), granted("a"), granted("b"))
    talk.leaves("a", at=3.0).answers()
    talk.arrives("c", at=4.0).answers()
    talk.arrives("d", at=5.0).answers(kept("c"), kept("d"), applied("bcd", mix=1.0), granted("c"), granted("d"))


def test_weights_follow_the_amount_of_data_and_sum_to_1() -> None:
    policy = SAFA(fraction=1.0)
    talk = Conversation(policy, workers="abc")
    for worker, batch in (("a", 10), ("b", 20), ("c", 30)):
        base, _, since = talk.grants[worker][-1]
        talk.grants[worker][-1] = (base, batch, since)
        talk.arrives(worker, at=1.0)
    (apply,) = [decision for decision in talk.last if isinstance(decision, Apply)]
    assert apply.weights == pytest.approx((1 / 6, 2 / 6, 3 / 6))
    assert apply.mix == pytest.approx(1.0)


def test_a_client_that_rejoined_and_is_deprecated_does_not_lose_its_earlier_update() -> None:
    talk = Conversation(SAFA(fraction=1.0, lag=0, limit=1.0), workers="abc")
    talk.arrives("c", at=0.25)
    talk.leaves("c", at=0.5).answers()
    talk.joins("c", at=0.75).answers(granted("c"))
    talk.wakes().answers(
        kept("c"), applied("c", mix=1 / 3), cancelled("a"), cancelled("b"), cancelled("c"),
        granted("a"), granted("b"), granted("c"), wake_at(2.0),
    )  # fmt: skip


def test_a_round_without_an_update_gets_more_time() -> None:
    talk = Conversation(SAFA(limit=5.0), workers="ab")
    talk.wakes().answers(wake_at(10.0))
