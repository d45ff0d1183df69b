"""The ledger between a driver and a policy, which defines staleness and progress gaps."""

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
    """A policy that answers every event with the decisions that the test has set."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def joined(self, worker: int, now: float) -> list[Decision]:
        return self.decisions

    def ready(self, worker: int, batch_size: int, now: float) -> list[Decision]:
        return self.decisions

    def arrived(self, update: Update, now: float) -> list[Decision]:
        return self.decisions

    def measured(self, kind: str, subject: object, value: float, now: float) -> list[Decision]:
        return self.decisions

    def left(self, worker: int, now: float) -> list[Decision]:
        return self.decisions

    def woke(self, now: float) -> list[Decision]:
        return self.decisions


#: The position of the time among the arguments of each method of a ledger.
NOW = {"joined": 1, "ready": 2, "arrived": 1, "measured": 3, "left": 1, "woke": 0}


class Driven:
    """A ledger with a scripted policy. Every decision is carried out at once, and `events` records the trace."""

    def __init__(self) -> None:
        self.policy = Scripted()
        self.events: list[Event] = []
        self.ledger = Ledger(self.policy, Recorder(self.events.append))

    def deciding(self, *decisions: Decision) -> Driven:
        """Have the policy answer the next event with these decisions."""
        self.policy.decisions = list(decisions)
        self.events.clear()
        return self

    def __getattr__(self, method: str) -> Callable[..., list[Decision]]:
        def call(*arguments: Any, **more: Any) -> list[Decision]:
            decisions: list[Decision] = getattr(self.ledger, method)(*arguments, **more)
            for decision in decisions:
                self.ledger.note(decision, arguments[NOW[method]])
            return decisions

        return call


def update(worker: int, iteration: int = 1, base_version: int = 0, incarnation: int = 1) -> Update:
    return Update(worker, iteration, base_version, 32, 1.0, incarnation=incarnation)


def test_an_event_is_reported_before_the_decisions_that_answer_it() -> None:
    driven = Driven()
    decisions = driven.deciding(Grant(0), WakeAt(5.0)).joined(0, 1.0)
    assert decisions == [Grant(0), WakeAt(5.0)], "all decisions are returned, in order"
    assert driven.events == [Joined(1.0, 0), Granted(1.0, 0, None, 0)]
    driven.deciding(Turn(0)).ready(0, 32, 2.0)
    assert driven.events == [Computed(2.0, 0), TurnedEvent(2.0, 0)]
    mine = update(0)
    driven.deciding(Apply((mine,), (1.0,)), Grant(0, 64)).arrived(mine, 3.0)
    assert driven.events == [
        Arrived(3.0, 0, 1, 32),
        Applied(3.0, 1, (0,), (1,), (0,), (1,)),
        Granted(3.0, 0, 64, 0),
    ]
    driven.deciding().left(0, 4.0)
    assert driven.events == [Left(4.0, 0)]


def test_optional_facts_are_reported_too() -> None:
    driven = Driven()
    driven.deciding().joined(0, 1.0, incarnation=2)
    assert driven.events == [Joined(1.0, 0, 2)]
    driven.deciding().ready(0, 32, 2.0, seconds=0.5)
    assert driven.events == [Computed(2.0, 0, 0.5)]
    driven.deciding().arrived(Update(0, 1, 0, 32, 1.0, loss=0.25, incarnation=2), 3.0)
    assert driven.events == [Arrived(3.0, 0, 1, 32, 0.25, 2)]
    driven.deciding().left(0, 4.0, lost=True)
    assert driven.events == [Left(4.0, 0, True)]


def test_staleness_is_the_versions_between_the_pull_and_the_application() -> None:
    driven = Driven()
    for worker in range(3):
        driven.deciding().joined(worker, 0.0)
    for version in range(1, 6):
        driven.deciding(Apply((update(0, version, version - 1),), (1.0,))).arrived(update(0, version, version - 1), 1.0)
        assert driven.events[-1] == Applied(1.0, version, (0,), (version,), (0,), (1,))
    together = (update(1, 1, 0), update(2, 1, 3), update(0, 6, 5))
    driven.deciding(Apply(together, (1.0, 1.0, 1.0))).woke(2.0)
    assert driven.events == [Applied(2.0, 6, (1, 2, 0), (1, 1, 6), (5, 2, 0), (1, 1, 1))]
    assert driven.ledger.version == 6


def test_the_gap_is_taken_at_the_grant_after_the_update_has_counted() -> None:
    driven = Driven()
    for worker in range(2):
        driven.deciding(Grant(worker)).joined(worker, 0.0)
    for done in (1, 2, 3):
        driven.deciding(Grant(0)).arrived(update(0, done), 1.0)
        assert driven.events[-1] == Granted(1.0, 0, None, done)
    driven.deciding(Grant(1)).arrived(update(1), 2.0)
    assert driven.events[-1] == Granted(2.0, 1, None, 0)
    driven.deciding(Grant(0)).woke(2.0)
    assert driven.events == [Granted(2.0, 0, None, 2)]


def test_a_joiner_starts_at_the_slowest_members_progress() -> None:
    driven = Driven()
    for worker in range(2):
        driven.deciding(Grant(worker)).joined(worker, 0.0)
    for done in (1, 2, 3):
        driven.deciding().arrived(update(0, done), 1.0)
    driven.deciding().arrived(update(1), 1.0)
    driven.deciding(Grant(2), Grant(0)).joined(2, 2.0)
    assert driven.events[1:] == [Granted(2.0, 2, None, 0), Granted(2.0, 0, None, 2)]
    driven.deciding().arrived(update(2), 3.0)
    driven.deciding(Grant(2), Grant(0)).left(1, 3.0)  # the slowest worker leaves
    assert driven.events[1:] == [Granted(3.0, 2, None, 0), Granted(3.0, 0, None, 1)]


def test_a_joiner_that_waits_for_its_first_grant_does_not_widen_the_gap_of_others() -> None:
    """A barrier admits joiners only when it closes. Then all workers, joiners included, have the same progress."""
    driven = Driven()
    for worker in range(2):
        driven.deciding(Grant(worker)).joined(worker, 0.0)
    driven.deciding().arrived(update(0), 1.0)
    for worker in (2, 3):
        driven.deciding().joined(worker, 1.5)
    driven.deciding(*map(Grant, range(4))).arrived(update(1), 2.0)
    assert driven.events[1:] == [Granted(2.0, worker, None, 0) for worker in range(4)]
    driven.deciding().joined(4, 3.0)
    driven.deciding().left(4, 3.5)  # it never had a Grant
    driven.deciding().arrived(update(0, 2), 4.0)
    driven.deciding(Grant(0)).woke(4.0)
    assert driven.events == [Granted(4.0, 0, None, 1)]


def test_every_decision_with_a_trace_event_is_reported() -> None:
    driven = Driven()
    driven.deciding().joined(0, 0.0)
    mine = update(0)
    driven.deciding(Keep(mine, 4), Discard(mine), Cancel(0), WakeAt(9.0)).measured("loss", 0, 0.5, 1.0)
    expected = [Measured(1.0, 0, "loss", 0.5), Kept(1.0, 0, 1, 4), Discarded(1.0, 0, 1), Cancelled(1.0, 0)]
    assert driven.events == expected


def test_every_decision_names_the_incarnation_of_its_update() -> None:
    driven = Driven()
    old, new = update(0, incarnation=3), update(0, incarnation=4)
    driven.deciding(Apply((new,), (1.0,)), Keep(old, 4), Discard(new), Apply((old, new), (1.0, 1.0))).woke(1.0)
    assert driven.events == [
        Applied(1.0, 1, (0,), (1,), (0,), (4,)),
        Kept(1.0, 0, 1, 4, 3),
        Discarded(1.0, 0, 1, 4),
        Applied(1.0, 2, (0, 0), (1, 1), (1, 1), (3, 4)),
    ]


def test_a_policy_that_gates_no_push_is_not_asked() -> None:
    events: list[Event] = []
    free = Ledger(make("asp"), Recorder(events.append))
    assert free.pushes_freely
    free.joined(0, 0.0)
    events.clear()
    free.turned(0, 1.0)
    assert events == [Computed(1.0, 0), TurnedEvent(1.0, 0)]
    for spec in ("bsp", "ssp", "dssp", "r2sp", "groups"):
        assert Ledger(make(spec), Recorder(events.append)).pushes_freely


def test_a_policy_that_answers_ready_is_asked() -> None:
    for spec in ("asp", "ssp", "dssp", "r2sp"):
        policy = make(spec)
        policy.streamed = True
        assert not Ledger(policy, Observer()).pushes_freely
    assert not Ledger(make("bsp:pipeline=true"), Observer()).pushes_freely
    assert not Ledger(Scripted(), Observer()).pushes_freely

    class Asks(ASP):
        def ready(self, worker: int, batch_size: int, now: float) -> list[Decision]:
            return super().ready(worker, batch_size, now)

    assert not Ledger(Asks(), Observer()).pushes_freely, "a policy with its own `ready` is asked"
