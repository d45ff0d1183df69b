"""The gate at which transfers wait for their turn on the servers' links."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.simulate.clock import Clock
from paceline.simulate.transfer.gate import LinkGate
from tries import tries


class RecordedGate:
    """A gate that each transfer holds for two seconds, and a record of which transfer passed when."""

    HOLDS = 2.0

    def __init__(self) -> None:
        self.clock = Clock()
        self.passed: list[tuple[float, str]] = []
        self.gate: LinkGate[str] = LinkGate(
            self.clock, self.HOLDS, lambda who: self.passed.append((self.clock.now, who))
        )

    def enters(self, who: str, at: float, turn: int, holds: float | None = None) -> RecordedGate:
        self.clock.at(at, lambda _: self.gate.enter(turn, who, holds))
        return self

    def leaves(self, who: str, at: float) -> RecordedGate:
        self.clock.at(at, lambda _: self.gate.leave(who))
        return self

    def run(self) -> list[tuple[float, str]]:
        while self.clock.run(100):
            pass
        return self.passed


def test_the_first_transfer_passes_at_once() -> None:
    assert RecordedGate().enters("a", 1.0, turn=0).run() == [(1.0, "a")]


def test_the_next_transfer_passes_when_the_gate_is_free() -> None:
    gate = RecordedGate().enters("a", 1.0, turn=0).enters("b", 1.5, turn=1).enters("c", 1.6, turn=2)
    assert gate.run() == [(1.0, "a"), (3.0, "b"), (5.0, "c")]


def test_a_free_gate_delays_no_transfer() -> None:
    gate = RecordedGate().enters("a", 1.0, turn=0).enters("b", 3.5, turn=1).enters("c", 5.6, turn=2)
    assert gate.run() == [(1.0, "a"), (3.5, "b"), (5.6, "c")]


def test_members_of_one_turn_pass_together_and_the_next_turn_waits_for_all_of_them() -> None:
    gate = (
        RecordedGate()
        .enters("a1", 1.0, turn=0)
        .enters("a2", 1.0, turn=0)
        .enters("a3", 1.2, turn=0)
        .enters("b", 1.3, turn=1)
    )
    assert gate.run() == [(1.0, "a1"), (1.0, "a2"), (1.2, "a3"), (7.0, "b")]


def test_members_of_one_turn_that_have_waited_pass_together() -> None:
    gate = (
        RecordedGate()
        .enters("a", 0.0, turn=0)
        .enters("b1", 0.5, turn=1)
        .enters("b2", 0.6, turn=1)
        .enters("c", 0.7, turn=2)
    )
    assert gate.run() == [(0.0, "a"), (2.0, "b1"), (2.0, "b2"), (6.0, "c")]


def test_a_transfer_of_another_size_holds_the_gate_for_its_own_time() -> None:
    gate = RecordedGate().enters("a", 0.0, 0, holds=5.0).enters("b", 0.5, 1).enters("c", 0.6, 2, holds=0.5)
    assert gate.enters("d", 0.7, 3).run() == [(0.0, "a"), (5.0, "b"), (7.0, "c"), (7.5, "d")]
    together = RecordedGate().enters("a1", 0.0, 0).enters("a2", 0.1, 0, holds=5.0).enters("b", 0.2, 1)
    assert together.run() == [(0.0, "a1"), (0.1, "a2"), (7.0, "b")]


def test_a_transfer_that_leaves_the_queue_is_skipped() -> None:
    gate = RecordedGate().enters("a", 0.0, turn=0).enters("b", 0.5, turn=1).enters("c", 0.7, turn=2).leaves("b", 1.0)
    assert gate.run() == [(0.0, "a"), (2.0, "c")]


def test_the_gate_works_again_after_its_queue_was_emptied() -> None:
    gate = RecordedGate().enters("a", 0.0, turn=0).enters("b", 0.5, turn=1).leaves("b", 1.0).enters("c", 9.0, turn=2)
    assert gate.run() == [(0.0, "a"), (9.0, "c")]


@tries(50, 200)
@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=20))
def test_every_transfer_passes_once_in_order_and_apart(times: list[float]) -> None:
    gate = RecordedGate()
    for i, time in enumerate(sorted(times)):
        gate.enters(f"{i}", time, turn=i)
    passed = gate.run()
    assert [who for _, who in passed] == [f"{i}" for i in range(len(times))]
    for (before, _), (after, _) in pairwise(passed):
        assert after >= before + RecordedGate.HOLDS * (1 - 1e-12)
    for (at, _), came in zip(passed, sorted(times), strict=True):
        free = max((before + RecordedGate.HOLDS for before, _ in passed if before < at), default=0.0)
        assert at <= max(came, free) + 1e-9, "a transfer waited at a free gate"
