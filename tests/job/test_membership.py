"""Who takes part, and when nobody may train any more."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("msgspec")

from paceline.serve.roster import Member, Roster

from paceline.serve.messages import Finished


class Line:
    """A connection that may be closed."""

    def __init__(self, is_open: bool = True) -> None:
        self.is_open = is_open


def member(worker: int, is_open: bool = True) -> Member:
    peer: Any = Line(is_open)
    return Member(worker, 1, peer, 0.0)


def entered(roster: Roster, *workers: int) -> list[Member]:
    members = [member(worker) for worker in workers]
    for each in members:
        roster.enter(each)
    return members


def test_whoever_finishes_is_out_of_the_order_and_still_there() -> None:
    roster = Roster(2)
    a, b = entered(roster, 0, 1)
    roster.finish(a)
    assert list(roster.members) == [1]
    assert roster.takes_part(a)
    assert not roster.nobody_trains
    roster.leave(b, expected_back=False)
    assert roster.nobody_trains
    assert roster.present() == [a]


def test_one_who_is_expected_back_may_still_train() -> None:
    roster = Roster(2)
    (a,) = entered(roster, 0)
    roster.leave(a, expected_back=True)
    assert not roster.nobody_trains
    assert not roster.only_strangers_are_missing
    entered(roster, 0)
    assert roster.awaited == set()


def test_an_old_self_takes_no_part_any_more() -> None:
    roster = Roster(1)
    (old,) = entered(roster, 0)
    (new,) = entered(roster, 0)
    assert not roster.takes_part(old)
    assert roster.takes_part(new)


def test_numbers_are_filled_from_below_and_a_closed_connection_leaves_its_own_free() -> None:
    roster = Roster(3)
    assert roster.free_number() == 0
    entered(roster, 0, 2)
    assert roster.free_number() == 1
    roster.enter(member(1, is_open=False))
    assert roster.free_number() == 1


def test_after_a_restoration_those_who_had_not_left_are_waited_for() -> None:
    roster = Roster(3, awaited=frozenset({0, 1}), restored=True)
    (a,) = entered(roster, 0)
    roster.finish(a)
    assert not roster.nobody_trains, "1 is still on its way"
    (b,) = entered(roster, 1)
    roster.leave(b, expected_back=False)
    assert roster.nobody_trains, "a third was never there"


def test_where_nobody_knows_who_took_part_as_many_as_were_wanted_may_come() -> None:
    roster = Roster(2, restored=True)
    (a,) = entered(roster, 0)
    roster.finish(a)
    assert roster.only_strangers_are_missing
    assert not roster.nobody_trains
    roster.expect_no_strangers()
    assert roster.nobody_trains


def test_a_job_that_begins_anew_waits_for_no_strangers() -> None:
    roster = Roster(5)
    (a,) = entered(roster, 0)
    roster.leave(a, expected_back=False)
    assert roster.nobody_trains


def test_another_generation_expects_all_but_those_who_were_told_the_end() -> None:
    roster = Roster(3)
    a, b, c = entered(roster, 0, 1, 2)
    roster.finish(a)
    a.finished = Finished(7)
    roster.finish(b)
    roster.leave(c, expected_back=True)
    assert roster.expected == {1, 2}
