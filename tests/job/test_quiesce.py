"""A lull: what is awaited happens once nothing is under way, and nothing new begins before."""

from __future__ import annotations

import asyncio
import time

import pytest

pytest.importorskip("msgspec")

from hypothesis import given, settings
from hypothesis import strategies as st
from paceline.serve.lull import Lull

from paceline.serve.alarm import Alarm
from paceline.serve.messages import Identity


def update(number: int) -> Identity:
    return Identity(number, 1, 1)


def test_without_anything_under_way_it_is_at_once() -> None:
    done: list[str] = []
    lull = Lull()
    lull.once(lambda: done.append("saved"))
    assert done == ["saved"]
    assert not lull.is_awaited


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(["begin", "settle", "once"]), st.integers(0, 4)), max_size=40))
def test_what_is_awaited_comes_when_nothing_is_under_way_and_before_what_was_put_off(
    steps: list[tuple[str, int]],
) -> None:
    lull, under_way = Lull(), set[int]()
    asked, begun, saved = 0, 0, 0

    def begin(number: int) -> None:
        nonlocal begun
        begun += 1
        lull.begun([update(number)])
        under_way.add(number)

    def save() -> None:
        nonlocal saved
        assert not under_way
        saved += 1

    def begin_later(number: int) -> None:
        lull.unless_awaited(lambda: begin(number))

    wanted = 0
    for what, number in steps:
        if what == "begin":
            asked += 1
            begin_later(number)
        elif what == "settle":
            under_way.discard(number)
            lull.settled(update(number))
        elif not lull.is_awaited:
            wanted += 1
            lull.once(save)
        assert lull.is_awaited == (saved < wanted)
        if not lull.is_awaited:
            assert begun == asked, "what was put off must follow"
    for number in range(5):
        under_way.discard(number)
        lull.settled(update(number))
    assert (saved, begun) == (wanted, asked)


def test_an_alarm_rings_once_at_the_moment_that_was_set_last_and_never_before() -> None:
    async def rings() -> list[float]:
        heard: list[float] = []
        alarm = Alarm(asyncio.get_running_loop(), lambda: heard.append(time.monotonic()))
        moments = []
        for pause in (0.0123, 0.0004, -1.0):
            alarm.set(time.monotonic() + 100)
            moments.append(time.monotonic() + pause)
            alarm.set(moments[-1])
            await asyncio.sleep(0.05)
        alarm.set(time.monotonic() + 0.01)
        alarm.cancel()
        await asyncio.sleep(0.03)
        assert len(heard) == len(moments)
        return [rang - moment for rang, moment in zip(heard, moments, strict=True)]

    assert min(asyncio.run(rings())) >= 0
