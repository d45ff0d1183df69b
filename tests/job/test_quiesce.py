"""Quiescence begins once no update is under way, and no new update begins before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.job import Identity
from paceline.job.quiesce import Quiesce
from tries import tries


def update(number: int) -> Identity:
    return Identity(number, 1, 1)


def test_it_is_quiet_at_once_if_no_update_is_under_way() -> None:
    quiesce: Quiesce[int] = Quiesce()
    assert not quiesce.is_quiet
    quiesce.await_quiet()
    assert quiesce.is_quiet
    assert quiesce.resume() == []
    assert not quiesce.is_awaited


@tries(60, 200)
@given(st.lists(st.tuples(st.sampled_from(["begin", "settle", "await"]), st.integers(0, 4)), max_size=40))
def test_postponed_orders_follow_in_their_order(steps: list[tuple[str, int]]) -> None:
    quiesce: Quiesce[int] = Quiesce()
    asked: list[int] = []
    begun: list[int] = []

    def begin(number: int) -> None:
        begun.append(number)
        quiesce.begun([update(number)])

    def if_quiet() -> None:
        while quiesce.is_quiet:
            for order in quiesce.resume():
                begin(order)

    for step, number in steps:
        if step == "begin":
            asked.append(number)
            if quiesce.is_awaited:
                quiesce.postpone(number)
            else:
                begin(number)
        elif step == "settle":
            quiesce.settled(update(number))
            if_quiet()
        elif not quiesce.is_awaited:
            quiesce.await_quiet()
            if_quiet()
        assert quiesce.is_awaited or begun == asked, "the postponed orders must follow"
        assert begun == asked[: len(begun)]
        assert not quiesce.is_awaited or quiesce.under_way, "quiescence was missed"
    for number in range(5):
        quiesce.settled(update(number))
    if_quiet()
    assert begun == asked
