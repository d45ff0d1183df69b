"""ASP: no worker ever waits."""

from paceline.policies.asp import ASP
from policies.cluster import run, steady
from policies.conversation import Conversation, applied, granted, streamed, streams, turn


def test_each_update_is_applied_when_it_arrives_and_its_worker_proceeds() -> None:
    talk = Conversation(ASP(), workers="ab")
    for at in (1.0, 2.0, 3.0):
        talk.arrives("a", at=at).answers(applied("a"), granted("a"))
    talk.arrives("b", at=4.0).answers(applied("b"), granted("b"))
    assert talk.staleness == [0, 0, 0, 3]


def test_joining_and_leaving_delay_no_worker() -> None:
    talk = Conversation(ASP(), workers="ab")
    talk.joins("c", at=1.0).answers(granted("c"))
    talk.leaves("a", at=2.0).answers()
    talk.arrives("c", at=3.0).answers(applied("c"), granted("c"))


def test_no_worker_ever_waits() -> None:
    story = run(ASP(), {0: steady(1.0), 1: steady(7.3), 2: steady(0.4)}, updates=200)
    assert sum(story.waited.values()) == 0


def test_streamed_the_weight_is_decided_before_the_push() -> None:
    talk = Conversation(streamed(ASP(weights="mean")), workers="ab")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a", (0.5,), in_order=False))
    talk.joins("c", at=1.5).answers(granted("c"))
    talk.is_ready("b", at=2.0).answers(turn("b"), streams("b", (1 / 3,), in_order=False))
    talk.arrives("b", at=2.5).answers(applied("b", (1 / 3,)), granted("b"))  # b may overtake a
    talk.arrives("a", at=3.0).answers(applied("a", (0.5,)), granted("a"))


def test_streamed_a_worker_that_rejoins_gets_a_new_stream() -> None:
    talk = Conversation(streamed(ASP()), workers="a")
    talk.is_ready("a", at=1.0)
    talk.leaves("a", at=1.5).answers()
    talk.joins("a", at=2.0).answers(granted("a"))
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a", (1.0,), in_order=False))
    talk.arrives("a", at=3.5).answers(applied("a"), granted("a"))


def test_whole_updates_have_no_streams() -> None:
    Conversation(ASP(), workers="a").is_ready("a", at=1.0).answers(turn("a"))
