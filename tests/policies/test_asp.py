"""ASP: never blocks."""

from paceline.policies.asp import ASP
from policies.cluster import run, steady
from policies.conversation import Conversation, applied, granted


def test_each_update_is_applied_as_it_comes_and_its_worker_goes_on() -> None:
    talk = Conversation(ASP(), workers="ab")
    for at in (1.0, 2.0, 3.0):
        talk.arrives("a", at=at).answers(applied("a"), granted("a"))
    talk.arrives("b", at=4.0).answers(applied("b"), granted("b"))
    assert talk.staleness == [0, 0, 0, 3]


def test_joins_and_leaves_hold_nobody_up() -> None:
    talk = Conversation(ASP(), workers="ab")
    talk.joins("c", at=1.0).answers(granted("c"))
    talk.leaves("a", at=2.0).answers()
    talk.arrives("c", at=3.0).answers(applied("c"), granted("c"))


def test_nobody_ever_waits() -> None:
    story = run(ASP(), {0: steady(1.0), 1: steady(7.3), 2: steady(0.4)}, updates=200)
    assert sum(story.waited.values()) == 0
