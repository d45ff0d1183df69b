"""The ledger between a driver and a policy: staleness and progress gaps, counted once for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.job import Ledger
from paceline.observe.observer import Observer, Recorder
from paceline.observe.trace import (
    Applied,
    Arrived,
    Cancelled,
    Computed,
    Discarded,
    Event,
    Granted,
    Joined,
    Kept,
    Left,
    Measured,
)
from paceline.observe.trace import Turned as TurnedEvent
from paceline.policies import Apply, Cancel, Decision, Discard, Grant, Keep, Policy, Turn, Update, WakeAt, make
from paceline.policies.asp import ASP


class Scripted(Policy):
    """Says what it is told to say next."""

    def __init__(self) -> None:
        self.says: list[Decision] = []

    def joined(self, worker: int, now: float) -> list[Decision]:
        return self.says

    def ready(self, worker: int, batch_size: int, now: float) -> list[Decision]:
        return self.says

    def arrived(self, update: Update, now: float) -> list[Decision]:
        return self.says

    def measured(self, kind: str, subject: object, value: float, now: float) -> list[Decision]:
        return self.says

    def left(self, worker: int, now: float) -> list[Decision]:
        return self.says

    def woke(self, now: float) -> list[Decision]:
        return self.says


#: Where the time stands among what a ledger is told.
NOW = {"joined": 1, "ready": 2, "arrived": 1, "measured": 3, "left": 1, "woke": 0}


class Book:
    """A ledger whose driver carries out every decision at once, and a page of events."""

    def __init__(self) -> None:
        self.policy = Scripted()
        self.events: list[Event] = []
        self.ledger = Ledger(self.policy, Recorder(self.events.append))

    def says(self, *decisions: Decision) -> Book:
        self.policy.says = list(decisions)
        self.events.clear()
        return self

    def __getattr__(self, told: str) -> Callable[..., list[Decision]]:
        def tell(*of: Any, **more: Any) -> list[Decision]:
            decisions: list[Decision] = getattr(self.ledger, told)(*of, **more)
            for decision in decisions:
                self.ledger.note(decision, of[NOW[told]])
            return decisions

        return tell


def update(worker: int, iteration: int = 1, base_version: int = 0, incarnation: int = 1) -> Update:
    return Update(worker, iteration, base_version, 32, 1.0, incarnation=incarnation)


def test_what_happened_is_written_before_what_was_decided() -> None:
    book = Book()
    decisions = book.says(Grant(0), WakeAt(5.0)).joined(0, 1.0)
    assert decisions == [Grant(0), WakeAt(5.0)], "all decisions are handed on, in their order"
    assert book.events == [Joined(1.0, 0), Granted(1.0, 0, None, 0)]
    book.says(Turn(0)).ready(0, 32, 2.0)
    assert book.events == [Computed(2.0, 0), TurnedEvent(2.0, 0)]
    mine = update(0)
    book.says(Apply((mine,), (1.0,)), Grant(0, 64)).arrived(mine, 3.0)
    assert book.events == [
        Arrived(3.0, 0, 1, 32),
        Applied(3.0, 1, (0,), (1,), (0,), (1,)),
        Granted(3.0, 0, 64, 0),
    ]
    book.says().left(0, 4.0)
    assert book.events == [Left(4.0, 0)]


def test_what_a_driver_knows_beside_is_written_down_too() -> None:
    book = Book()
    book.says().joined(0, 1.0, incarnation=2)
    assert book.events == [Joined(1.0, 0, 2)]
    book.says().ready(0, 32, 2.0, seconds=0.5)
    assert book.events == [Computed(2.0, 0, 0.5)]
    book.says().arrived(Update(0, 1, 0, 32, 1.0, loss=0.25, incarnation=2), 3.0)
    assert book.events == [Arrived(3.0, 0, 1, 32, 0.25, 2)]
    book.says().left(0, 4.0, lost=True)
    assert book.events == [Left(4.0, 0, True)]


def test_staleness_is_the_versions_between_the_pull_and_the_application() -> None:
    book = Book()
    for worker in range(3):
        book.says().joined(worker, 0.0)
    for version in range(1, 6):
        book.says(Apply((update(0, version, version - 1),), (1.0,))).arrived(update(0, version, version - 1), 1.0)
        assert book.events[-1] == Applied(1.0, version, (0,), (version,), (0,), (1,))
    together = (update(1, 1, 0), update(2, 1, 3), update(0, 6, 5))
    book.says(Apply(together, (1.0, 1.0, 1.0))).woke(2.0)
    assert book.events == [Applied(2.0, 6, (1, 2, 0), (1, 1, 6), (5, 2, 0), (1, 1, 1))]
    assert book.ledger.version == 6


def test_the_gap_is_taken_at_the_grant_after_the_push_has_counted() -> None:
    book = Book()
    for worker in range(2):
        book.says(Grant(worker)).joined(worker, 0.0)
    for done in (1, 2, 3):
        book.says(Grant(0)).arrived(update(0, done), 1.0)
        assert book.events[-1] == Granted(1.0, 0, None, done)
    book.says(Grant(1)).arrived(update(1), 2.0)
    assert book.events[-1] == Granted(2.0, 1, None, 0)
    book.says(Grant(0)).woke(2.0)
    assert book.events == [Granted(2.0, 0, None, 2)]


def test_a_joiner_starts_at_the_slowest_members_progress() -> None:
    book = Book()
    for worker in range(2):
        book.says(Grant(worker)).joined(worker, 0.0)
    for done in (1, 2, 3):
        book.says().arrived(update(0, done), 1.0)
    book.says().arrived(update(1), 1.0)
    book.says(Grant(2), Grant(0)).joined(2, 2.0)
    assert book.events[1:] == [Granted(2.0, 2, None, 0), Granted(2.0, 0, None, 2)]
    book.says().arrived(update(2), 3.0)
    book.says(Grant(2), Grant(0)).left(1, 3.0)  # the slowest is gone
    assert book.events[1:] == [Granted(3.0, 2, None, 0), Granted(3.0, 0, None, 1)]


def test_a_joiner_who_waits_for_its_first_grant_holds_nobody_back() -> None:
    """A barrier that lets nobody in until it closes: those who then go on are level, the joiners among them."""
    book = Book()
    for worker in range(2):
        book.says(Grant(worker)).joined(worker, 0.0)
    book.says().arrived(update(0), 1.0)
    for worker in (2, 3):
        book.says().joined(worker, 1.5)
    book.says(*map(Grant, range(4))).arrived(update(1), 2.0)
    assert book.events[1:] == [Granted(2.0, worker, None, 0) for worker in range(4)]
    book.says().joined(4, 3.0)
    book.says().left(4, 3.5)  # it never began
    book.says().arrived(update(0, 2), 4.0)
    book.says(Grant(0)).woke(4.0)
    assert book.events == [Granted(4.0, 0, None, 1)]


def test_every_decision_that_is_an_event_is_written() -> None:
    book = Book()
    book.says().joined(0, 0.0)
    mine = update(0)
    book.says(Keep(mine, 4), Discard(mine), Cancel(0), WakeAt(9.0)).measured("loss", 0, 0.5, 1.0)
    said = [Measured(1.0, 0, "loss", 0.5), Kept(1.0, 0, 1, 4), Discarded(1.0, 0, 1), Cancelled(1.0, 0)]
    assert book.events == said


def test_every_decision_names_the_incarnation_of_its_update() -> None:
    book = Book()
    old, new = update(0, incarnation=3), update(0, incarnation=4)
    book.says(Apply((new,), (1.0,)), Keep(old, 4), Discard(new), Apply((old, new), (1.0, 1.0))).woke(1.0)
    assert book.events == [
        Applied(1.0, 1, (0,), (1,), (0,), (4,)),
        Kept(1.0, 0, 1, 4, 3),
        Discarded(1.0, 0, 1, 4),
        Applied(1.0, 2, (0, 0), (1, 1), (1, 1), (3, 4)),
    ]


def test_where_pushes_are_free_nobody_need_be_asked() -> None:
    events: list[Event] = []
    free = Ledger(make("asp"), Recorder(events.append))
    assert free.pushes_freely
    free.joined(0, 0.0)
    events.clear()
    free.turned(0, 1.0)
    assert events == [Computed(1.0, 0), TurnedEvent(1.0, 0)]
    for spec in ("bsp", "ssp", "dssp", "r2sp", "groups"):
        assert Ledger(make(spec), Recorder(events.append)).pushes_freely


def test_where_something_comes_of_it_the_policy_is_told_who_is_ready() -> None:
    for spec in ("asp", "ssp", "dssp", "r2sp"):
        policy = make(spec)
        policy.streamed = True
        assert not Ledger(policy, Observer()).pushes_freely
    assert not Ledger(make("bsp:pipeline=true"), Observer()).pushes_freely
    assert not Ledger(Scripted(), Observer()).pushes_freely

    class Asks(ASP):
        def ready(self, worker: int, batch_size: int, now: float) -> list[Decision]:
            return super().ready(worker, batch_size, now)

    assert not Ledger(Asks(), Observer()).pushes_freely, "one who answers for itself is asked, whatever it inherits"
