"""The gate where transfers wait for their turn on the servers' links."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.simulate.clock import Clock
from paceline.simulate.transfer.gate import LinkGate


class Door:
    """A gate that a transfer holds for two seconds, and a list of who went through when."""

    HOLDS = 2.0

    def __init__(self) -> None:
        self.clock = Clock()
        self.went: list[tuple[float, str]] = []
        self.gate: LinkGate[str] = LinkGate(self.clock, self.HOLDS, lambda who: self.went.append((self.clock.now, who)))

    def comes(self, who: str, at: float, turn: int) -> Door:
        self.clock.at(at, lambda _: self.gate.enter(turn, who))
        return self

    def gives_up(self, who: str, at: float) -> Door:
        self.clock.at(at, lambda _: self.gate.leave(who))
        return self

    def run(self) -> list[tuple[float, str]]:
        while self.clock.run(100):
            pass
        return self.went


def test_the_first_goes_at_once() -> None:
    assert Door().comes("a", 1.0, turn=0).run() == [(1.0, "a")]


def test_the_next_goes_when_the_gate_is_free() -> None:
    endpoint = Door().comes("a", 1.0, turn=0).comes("b", 1.5, turn=1).comes("c", 1.6, turn=2)
    assert endpoint.run() == [(1.0, "a"), (3.0, "b"), (5.0, "c")]


def test_a_free_gate_holds_nobody_up() -> None:
    endpoint = Door().comes("a", 1.0, turn=0).comes("b", 3.5, turn=1).comes("c", 5.6, turn=2)
    assert endpoint.run() == [(1.0, "a"), (3.5, "b"), (5.6, "c")]


def test_members_of_one_turn_go_together_and_the_next_waits_for_all_of_them() -> None:
    endpoint = Door().comes("a1", 1.0, turn=0).comes("a2", 1.0, turn=0).comes("a3", 1.2, turn=0).comes("b", 1.3, turn=1)
    assert endpoint.run() == [(1.0, "a1"), (1.0, "a2"), (1.2, "a3"), (7.0, "b")]


def test_members_of_one_turn_who_waited_go_together_too() -> None:
    endpoint = Door().comes("a", 0.0, turn=0).comes("b1", 0.5, turn=1).comes("b2", 0.6, turn=1).comes("c", 0.7, turn=2)
    assert endpoint.run() == [(0.0, "a"), (2.0, "b1"), (2.0, "b2"), (6.0, "c")]


def test_who_leaves_the_queue_is_passed_over() -> None:
    endpoint = Door().comes("a", 0.0, turn=0).comes("b", 0.5, turn=1).comes("c", 0.7, turn=2).gives_up("b", 1.0)
    assert endpoint.run() == [(0.0, "a"), (2.0, "c")]


def test_an_empty_queue_wakes_up_again() -> None:
    endpoint = Door().comes("a", 0.0, turn=0).comes("b", 0.5, turn=1).gives_up("b", 1.0).comes("c", 9.0, turn=2)
    assert endpoint.run() == [(0.0, "a"), (9.0, "c")]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=20))
def test_everyone_goes_once_in_order_and_apart(times: list[float]) -> None:
    endpoint = Door()
    for i, time in enumerate(sorted(times)):
        endpoint.comes(f"{i}", time, turn=i)
    went = endpoint.run()
    assert [who for _, who in went] == [f"{i}" for i in range(len(times))]
    for (before, _), (after, _) in pairwise(went):
        assert after >= before + Door.HOLDS * (1 - 1e-12)
    for (at, _), came in zip(went, sorted(times), strict=True):
        free = max((before + Door.HOLDS for before, _ in went if before < at), default=0.0)
        assert at <= max(came, free) + 1e-9, "the gate stood open and somebody waited"
