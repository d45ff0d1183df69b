"""Virtual time."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.simulate.clock import Clock
from tries import tries


def test_calls_run_in_order_of_time() -> None:
    clock = Clock()
    seen: list[Any] = []
    for time in (3.0, 1.0, 2.0):
        clock.at(time, lambda name: seen.append((clock.now, name)), f"at {time:g}")
    assert not clock.run(10)
    assert seen == [(1.0, "at 1"), (2.0, "at 2"), (3.0, "at 3")]


def test_calls_at_equal_times_run_in_the_order_in_which_they_were_scheduled() -> None:
    clock = Clock()
    seen: list[Any] = []
    for name in "abcde":
        clock.at(1.0, seen.append, name)
    clock.run(10)
    assert seen == list("abcde")


def test_a_call_can_schedule_further_calls() -> None:
    clock = Clock()
    seen: list[Any] = []

    def again(left: int) -> None:
        seen.append(clock.now)
        if left:
            clock.at(clock.now + 0.5, again, left - 1)

    clock.at(1.0, again, 3)
    assert not clock.run(10)
    assert seen == [1.0, 1.5, 2.0, 2.5]


def test_it_runs_at_most_the_given_number_of_calls_and_counts_them() -> None:
    clock = Clock()
    seen: list[Any] = []
    for i in range(5):
        clock.at(i, seen.append, i)
    assert clock.run(2)
    assert (seen, clock.pops) == ([0, 1], 2)
    assert not clock.run(100)
    assert (seen, clock.pops) == ([0, 1, 2, 3, 4], 5)


def test_it_stops_when_running_is_cleared() -> None:
    clock = Clock()
    seen: list[Any] = []

    def stop(_: None) -> None:
        clock.running = False

    clock.at(1.0, seen.append, "before")
    clock.at(2.0, stop)
    clock.at(3.0, seen.append, "after")
    assert not clock.run(10)
    assert (seen, clock.now, clock.pops) == (["before"], 2.0, 2)


@tries(50, 200)
@given(st.lists(st.floats(0.0, 100.0), max_size=50))
def test_time_never_goes_backwards(times: list[float]) -> None:
    clock = Clock()
    seen: list[Any] = []
    for time in times:
        clock.at(time, lambda _: seen.append(clock.now))
    while clock.run(7):
        pass
    assert seen == sorted(times)
