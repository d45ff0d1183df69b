"""SSP: no worker runs more than `staleness` ahead of the slowest."""

import pytest

from paceline.policies import PolicyError
from paceline.policies.ssp import SSP
from policies.cluster import run, steady
from policies.conversation import Conversation, applied, granted, streamed, streams, turn


def test_the_fastest_waits_for_the_slowest() -> None:
    talk = Conversation(SSP(staleness=1), workers="ab")
    talk.arrives("a", at=1.0).answers(applied("a"), granted("a"))
    talk.arrives("a", at=2.0).answers(applied("a"))  # a has done two and b none, so a gets no Grant
    talk.arrives("b", at=3.0).answers(applied("b"), granted("b"), granted("a"))


def test_to_the_letter_a_worker_waits_at_a_lead_of_s() -> None:
    """The RLP paper: a worker runs while 0 < p - min < s, waits at s, and all idle workers run after the slowest."""
    talk = Conversation(SSP(staleness=2, wait="at"), workers="abc")
    talk.arrives("a", at=1.0).answers(applied("a"), granted("a"))
    talk.arrives("a", at=2.0).answers(applied("a"))  # a lead of 2
    talk.arrives("b", at=3.0).answers(applied("b"), granted("b"))
    talk.arrives("c", at=4.0).answers(applied("c"), granted("c"), granted("a"))


def test_to_the_letter_a_threshold_of_0_is_refused() -> None:
    with pytest.raises(PolicyError, match="wait=at needs a staleness of at least 1"):
        SSP(staleness=0, wait="at")


@pytest.mark.parametrize("staleness", [1, 3])
def test_to_the_letter_the_progress_gap_is_one_less(staleness: int) -> None:
    letter, default = (
        run(policy, {0: steady(1.0), 1: steady(10.0)}, updates=100)
        for policy in (SSP(staleness, wait="at"), SSP(staleness - 1))
    )
    assert max(letter.gaps) == staleness - 1
    assert letter.gaps == default.gaps


def test_with_staleness_0_no_worker_is_ahead() -> None:
    talk = Conversation(SSP(staleness=0), workers="ab")
    talk.arrives("a", at=1.0).answers(applied("a"))
    talk.arrives("b", at=2.0).answers(applied("b"), granted("b"), granted("a"))


def test_workers_are_released_in_the_order_of_their_progress() -> None:
    talk = Conversation(SSP(staleness=0), workers="abc")
    talk.arrives("a", at=1.0).answers(applied("a"))
    talk.arrives("b", at=2.0).answers(applied("b"))
    talk.arrives("c", at=3.0).answers(applied("c"), granted("c"), granted("a"), granted("b"))


def test_when_the_slowest_leaves_others_may_proceed() -> None:
    talk = Conversation(SSP(staleness=1), workers="abc")
    for at in (1.0, 2.0):
        talk.arrives("a", at=at)
    talk.answers(applied("a"))
    talk.arrives("b", at=3.0).answers(applied("b"), granted("b"))
    talk.leaves("c", at=4.0).answers(granted("a"))


def test_a_worker_that_joins_starts_at_the_slowest_members_progress() -> None:
    talk = Conversation(SSP(staleness=1), workers="ab")
    for at in (1.0, 2.0, 3.0):
        talk.arrives("a", at=at)
        talk.arrives("b", at=at)
    talk.joins("c", at=4.0).answers(granted("c"))  # c starts at three, not at zero
    talk.arrives("a", at=5.0).answers(applied("a"), granted("a"))
    talk.arrives("a", at=6.0).answers(applied("a"))  # a has done five and c three
    talk.leaves("b", at=6.5).answers()
    talk.arrives("c", at=7.0).answers(applied("c"), granted("c"), granted("a"))


def test_a_worker_that_left_while_it_waited_is_not_released() -> None:
    talk = Conversation(SSP(staleness=0), workers="ab")
    talk.arrives("a", at=1.0).answers(applied("a"))
    talk.leaves("a", at=1.5).answers()
    talk.joins("a", at=1.6).answers(granted("a"))
    talk.arrives("b", at=2.0).answers(applied("b"))  # a has rejoined and has done none
    talk.arrives("a", at=3.0).answers(applied("a"), granted("a"), granted("b"))


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_progress_gap_reaches_the_bound_and_no_more(staleness: int) -> None:
    story = run(SSP(staleness), {0: steady(1.0), 1: steady(10.0)}, updates=100)
    assert max(story.gaps) == staleness


def test_streamed_each_update_has_its_own_stream() -> None:
    talk = Conversation(streamed(SSP(staleness=1)), workers="ab")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a", (1.0,), in_order=False))
    talk.is_ready("b", at=1.5).answers(turn("b"), streams("b", (1.0,), in_order=False))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"))
    talk.leaves("b", at=2.5).answers()
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a", (1.0,), in_order=False))
