"""SSP: at most `staleness` ahead of the slowest."""

import pytest

from paceline.policies.ssp import SSP
from policies.cluster import run, steady
from policies.conversation import Conversation, applied, granted, streamed, streams, turn


def test_the_fastest_waits_for_the_slowest() -> None:
    talk = Conversation(SSP(staleness=1), workers="ab")
    talk.arrives("a", at=1.0).answers(applied("a"), granted("a"))
    talk.arrives("a", at=2.0).answers(applied("a"))  # two done, b none: no grant
    talk.arrives("b", at=3.0).answers(applied("b"), granted("b"), granted("a"))


def test_with_no_staleness_nobody_is_ahead() -> None:
    talk = Conversation(SSP(staleness=0), workers="ab")
    talk.arrives("a", at=1.0).answers(applied("a"))
    talk.arrives("b", at=2.0).answers(applied("b"), granted("b"), granted("a"))


def test_those_nearest_to_the_slowest_are_released_first() -> None:
    talk = Conversation(SSP(staleness=0), workers="abc")
    talk.arrives("a", at=1.0).answers(applied("a"))
    talk.arrives("b", at=2.0).answers(applied("b"))
    talk.arrives("c", at=3.0).answers(applied("c"), granted("c"), granted("a"), granted("b"))


def test_when_the_slowest_leaves_others_may_go() -> None:
    talk = Conversation(SSP(staleness=1), workers="abc")
    for at in (1.0, 2.0):
        talk.arrives("a", at=at)
    talk.answers(applied("a"))
    talk.arrives("b", at=3.0).answers(applied("b"), granted("b"))
    talk.leaves("c", at=4.0).answers(granted("a"))


def test_a_joiner_starts_at_the_slowest_members_progress() -> None:
    talk = Conversation(SSP(staleness=1), workers="ab")
    for at in (1.0, 2.0, 3.0):
        talk.arrives("a", at=at)
        talk.arrives("b", at=at)
    talk.joins("c", at=4.0).answers(granted("c"))  # it starts at three, not at none
    talk.arrives("a", at=5.0).answers(applied("a"), granted("a"))
    talk.arrives("a", at=6.0).answers(applied("a"))  # five to three
    talk.leaves("b", at=6.5).answers()
    talk.arrives("c", at=7.0).answers(applied("c"), granted("c"), granted("a"))


def test_one_who_left_while_waiting_is_not_released() -> None:
    talk = Conversation(SSP(staleness=0), workers="ab")
    talk.arrives("a", at=1.0).answers(applied("a"))
    talk.leaves("a", at=1.5).answers()
    talk.joins("a", at=1.6).answers(granted("a"))
    talk.arrives("b", at=2.0).answers(applied("b"))  # a, anew, stands at none
    talk.arrives("a", at=3.0).answers(applied("a"), granted("a"), granted("b"))


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_gap_is_used_and_not_exceeded(staleness: int) -> None:
    story = run(SSP(staleness), {0: steady(1.0), 1: steady(10.0)}, updates=100)
    assert max(story.gaps) == staleness


def test_streamed_each_update_is_a_stream_of_its_own() -> None:
    talk = Conversation(streamed(SSP(staleness=1)), workers="ab")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a", (1.0,), in_order=False))
    talk.is_ready("b", at=1.5).answers(turn("b"), streams("b", (1.0,), in_order=False))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"))
    talk.leaves("b", at=2.5).answers()
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a", (1.0,), in_order=False))
