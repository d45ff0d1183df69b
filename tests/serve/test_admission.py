"""Transfers one after the other: in the order in which they came, past whoever is stuck, as many as fill the link."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.serve.shard.admission import FIRST_PROBE, STUCK, WINDOW, Admission, AdmittedTransfer, _Pace

PATIENCE = 20.0
SIZE = 1000  # bytes of a transfer


class Gate:
    """A turnstile whose time stands still unless it is told otherwise, and threads that want through."""

    def __init__(self) -> None:
        self.time = 0.0
        self.admission = Admission(clock=lambda: self.time)
        self.entered: list[str] = []
        self.passes: dict[str, AdmittedTransfer] = {}
        self.threads: list[threading.Thread] = []

    def comes(self, name: str) -> None:
        """Somebody comes. It returns when it is inside, or waits behind all who came before."""
        before = len(self.admission._queue) + len(self.entered)

        def enter() -> None:
            self.passes[name] = self.admission.enter()
            self.entered.append(name)

        self.threads.append(threading.Thread(target=enter, daemon=True))
        self.threads[-1].start()
        until(lambda: len(self.admission._queue) + len(self.entered) > before)

    def are_in(self, *names: str) -> None:
        """These have been let in so far, in this order, and for a while nobody else is."""
        until(lambda: len(self.entered) >= len(names))
        time.sleep(STUCK / 2)  # twice as long as whoever waits sleeps before it looks again
        assert self.entered == list(names)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.001)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    end = time.monotonic() + PATIENCE
    while any(thread.is_alive() for thread in gate.threads):
        assert time.monotonic() < end, "somebody waits for ever"
        gate.time += 2 * STUCK  # whoever is inside is taken to be stuck
        time.sleep(0.01)
    for thread in gate.threads:
        thread.join()


def test_first_come_first_served(gate: Gate) -> None:
    for name in "abc":
        gate.comes(name)
    gate.are_in("a")
    gate.passes["a"].leave()
    gate.are_in("a", "b")
    gate.passes["b"].leave()
    gate.are_in("a", "b", "c")


def test_to_leave_twice_lets_in_one(gate: Gate) -> None:
    for name in "abc":
        gate.comes(name)
    gate.are_in("a")
    gate.passes["a"].leave()
    gate.passes["a"].leave()
    gate.are_in("a", "b")


def test_who_is_stuck_delays_nobody_for_long_and_counts_no_more(gate: Gate) -> None:
    for name in "abc":
        gate.comes(name)
    gate.are_in("a")
    gate.time += 1.1 * STUCK
    gate.are_in("a", "b")
    gate.passes["a"].moved(1)
    gate.passes["a"].leave()  # it has come to life again; but the slot is b's
    gate.are_in("a", "b")
    gate.passes["b"].leave()
    gate.are_in("a", "b", "c")


def test_who_moves_is_not_stuck_however_long_it_takes(gate: Gate) -> None:
    gate.comes("a")
    gate.are_in("a")
    gate.comes("b")
    for _ in range(6):
        gate.time += 0.9 * STUCK
        gate.passes["a"].moved(1)
    gate.are_in("a")


def test_nobody_waits_at_an_empty_one() -> None:
    admission = Admission(slots=2)
    began = time.monotonic()
    passes = [admission.enter() for _ in range(2)]
    for each in passes:
        each.leave()
    for _ in range(100):
        admission.enter().leave()
    assert time.monotonic() - began < 1.0
    assert admission.slots == 2


def slots_over(transfers: int, rate: Callable[[int], float], crowded: bool = True) -> list[int]:
    """How many slots there are, transfer by transfer, on a link over which so much gets through with so many."""
    pace, slots, now, seen = _Pace(), 1, 0.0, []
    for _ in range(transfers):
        pace.crowd(now)
        now += SIZE / rate(slots)
        pace.moved += SIZE
        slots = pace.after(slots, now, crowded)
        seen.append(slots)
    return seen


@pytest.mark.parametrize("fills", [2, 3, 5])
def test_as_many_are_let_in_as_it_takes_to_fill_the_link(fills: int) -> None:
    seen = slots_over(60 * WINDOW * FIRST_PROBE, lambda slots: 100.0 * min(slots, fills))
    assert max(seen) <= fills + 1
    late = seen[len(seen) // 2 :]
    assert late.count(fills) > 0.8 * len(late)


def test_where_one_fills_the_link_another_is_tried_less_and_less_often() -> None:
    seen = slots_over(64 * WINDOW * FIRST_PROBE, lambda slots: 100.0)
    assert set(seen) == {1, 2}
    tries = [number for number, (before, after) in enumerate(itertools.pairwise(seen)) if after > before]
    assert seen.count(2) == WINDOW * len(tries), "each is over after one look"
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert all(after > 1.5 * before for before, after in itertools.pairwise(pauses))


def test_what_gains_too_little_is_not_kept() -> None:
    seen = slots_over(64 * WINDOW * FIRST_PROBE, lambda slots: 100.0 + 10.0 * (slots - 1))
    assert seen.count(2) < 0.1 * len(seen)


def test_a_link_that_nobody_waits_for_is_not_measured() -> None:
    assert set(slots_over(500, lambda slots: 100.0 * slots, crowded=False)) == {1}
