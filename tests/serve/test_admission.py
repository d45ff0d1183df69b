"""Admission: transfers in the order of their requests, past stuck ones, and as many at a time as fill the link."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paceline.serve.shard.admission import FIRST_PROBE, STUCK_SECONDS, WINDOW, Admission, AdmittedTransfer, _SlotTuner

PATIENCE = 20.0  # seconds to wait for what must happen
SIZE = 1000  # bytes of a transfer


class Gate:
    """An admission whose clock the test sets, and threads that ask it for slots."""

    def __init__(self) -> None:
        self.time = 0.0
        self.admission = Admission(clock=lambda: self.time)
        self.entered: list[str] = []
        self.transfers: dict[str, AdmittedTransfer] = {}
        self.threads: list[threading.Thread] = []

    def request(self, name: str) -> None:
        """Start a thread that asks for a slot. Return when it has one, or waits behind all earlier threads."""
        before = len(self.admission._queue) + len(self.entered)

        def enter() -> None:
            self.transfers[name] = self.admission.enter()
            self.entered.append(name)

        self.threads.append(threading.Thread(target=enter, daemon=True))
        self.threads[-1].start()
        until(lambda: len(self.admission._queue) + len(self.entered) > before)

    def assert_entered(self, *names: str) -> None:
        """Assert that these have been admitted so far, in this order, and that nobody else is for a while."""
        until(lambda: len(self.entered) >= len(names))
        time.sleep(STUCK_SECONDS / 2)  # twice the pause after which a waiting thread looks again
        assert self.entered == list(names)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.001)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    end = time.monotonic() + PATIENCE
    while any(thread.is_alive() for thread in gate.threads):
        assert time.monotonic() < end, "a thread waits for ever"
        gate.time += 2 * STUCK_SECONDS  # transfers that have a slot count as stuck
        time.sleep(0.01)
    for thread in gate.threads:
        thread.join()


def test_first_come_first_served(gate: Gate) -> None:
    for name in "abc":
        gate.request(name)
    gate.assert_entered("a")
    gate.transfers["a"].leave()
    gate.assert_entered("a", "b")
    gate.transfers["b"].leave()
    gate.assert_entered("a", "b", "c")


def test_leaving_twice_admits_one_transfer(gate: Gate) -> None:
    for name in "abc":
        gate.request(name)
    gate.assert_entered("a")
    gate.transfers["a"].leave()
    gate.transfers["a"].leave()
    gate.assert_entered("a", "b")


def test_a_stuck_transfer_loses_its_slot(gate: Gate) -> None:
    for name in "abc":
        gate.request(name)
    gate.assert_entered("a")
    gate.time += 1.1 * STUCK_SECONDS
    gate.assert_entered("a", "b")
    gate.transfers["a"].moved(1)
    gate.transfers["a"].leave()  # it is no longer stuck, but b has the slot
    gate.assert_entered("a", "b")
    gate.transfers["b"].leave()
    gate.assert_entered("a", "b", "c")


def test_a_slow_transfer_is_not_stuck(gate: Gate) -> None:
    gate.request("a")
    gate.assert_entered("a")
    gate.request("b")
    for _ in range(6):
        gate.time += 0.9 * STUCK_SECONDS
        gate.transfers["a"].moved(1)
    gate.assert_entered("a")


def test_a_free_slot_is_given_at_once() -> None:
    admission = Admission(slots=2)
    began = time.monotonic()
    transfers = [admission.enter() for _ in range(2)]
    for transfer in transfers:
        transfer.leave()
    for _ in range(100):
        admission.enter().leave()
    assert time.monotonic() - began < 1.0
    assert admission.slots == 2


def slots_over(transfers: int, rate: Callable[[int], float], crowded: bool = True) -> list[int]:
    """Return the number of slots after each transfer. rate: the throughput of the link for a number of slots."""
    tuner, slots, now, seen = _SlotTuner(), 1, 0.0, []
    for _ in range(transfers):
        tuner.crowded(now)
        now += SIZE / rate(slots)
        tuner.moved += SIZE
        slots = tuner.after(slots, now, crowded)
        seen.append(slots)
    return seen


@pytest.mark.parametrize("fills", [2, 3, 5])
def test_as_many_transfers_are_admitted_as_fill_the_link(fills: int) -> None:
    seen = slots_over(60 * WINDOW * FIRST_PROBE, lambda slots: 100.0 * min(slots, fills))
    assert max(seen) <= fills + 1
    late = seen[len(seen) // 2 :]
    assert late.count(fills) > 0.8 * len(late)


def test_where_one_transfer_fills_the_link_a_second_is_tried_less_and_less_often() -> None:
    seen = slots_over(64 * WINDOW * FIRST_PROBE, lambda slots: 100.0)
    assert set(seen) == {1, 2}
    tries = [number for number, (before, after) in enumerate(itertools.pairwise(seen)) if after > before]
    assert seen.count(2) == WINDOW * len(tries), "each try lasts one window"
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert all(after > 1.5 * before for before, after in itertools.pairwise(pauses))


def test_a_slot_that_gains_too_little_is_not_kept() -> None:
    seen = slots_over(64 * WINDOW * FIRST_PROBE, lambda slots: 100.0 + 10.0 * (slots - 1))
    assert seen.count(2) < 0.1 * len(seen)


def test_the_link_is_not_measured_while_nobody_waits() -> None:
    assert set(slots_over(500, lambda slots: 100.0 * slots, crowded=False)) == {1}
