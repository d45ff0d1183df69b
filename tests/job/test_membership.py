"""Which workers take part, at which stage each of them is, and when nobody may train any more."""

from __future__ import annotations

import pytest

from paceline.job.membership import IN_ORDER, RUNNING, TRANSITIONS, Member, Roster, Stage, StageError, Transition


def member(worker: int, connected: bool = True) -> Member:
    made = Member(worker, 1, 7, 0.0)
    if not connected:
        made.connection = None
    return made


def entered(roster: Roster, *workers: int) -> list[Member]:
    members = [member(worker) for worker in workers]
    for each in members:
        roster.enter(each)
    return members


def walked(*steps: Transition) -> Member:
    made = member(0)
    for step in steps:
        made.step(step)
    return made


def test_an_iteration_goes_from_stage_to_stage() -> None:
    a = walked(
        Transition.ADMIT, Transition.GRANT, Transition.ANNOUNCE, Transition.TURN, Transition.ARRIVE, Transition.GRANT
    )
    assert a.stage is Stage.COMPUTING
    assert walked(Transition.ADMIT, Transition.GRANT, Transition.ANNOUNCE, Transition.ARRIVE).stage is Stage.IDLE, (
        "a push need not be gated"
    )
    assert walked(Transition.ADMIT, Transition.GRANT, Transition.CANCEL, Transition.GRANT).stage is Stage.COMPUTING


@pytest.mark.parametrize("step", Transition)
@pytest.mark.parametrize("stage", Stage)
def test_a_step_that_is_not_in_the_table_is_refused_and_changes_nothing(stage: Stage, step: Transition) -> None:
    made = member(0)
    made.stage = stage
    if step in TRANSITIONS[stage]:
        made.step(step)
        assert made.stage is TRANSITIONS[stage][step]
    else:
        with pytest.raises(StageError, match=f"cannot {step.name}"):
            made.step(step)
        assert made.stage is stage


def test_every_stage_can_be_reached_and_left_but_the_last() -> None:
    reached = {Stage.WAITING} | {then for steps in TRANSITIONS.values() for then in steps.values()}
    assert reached == set(Stage)
    assert [stage for stage in Stage if not TRANSITIONS[stage]] == [Stage.GONE]
    assert all(Transition.LEAVE in TRANSITIONS[stage] for stage in Stage if stage is not Stage.GONE)
    assert all(Transition.GRANT in TRANSITIONS[stage] for stage in IN_ORDER - RUNNING)


def test_whoever_finishes_is_out_of_the_order_and_still_there() -> None:
    roster = Roster(2)
    a, b = entered(roster, 0, 1)
    roster.finish(a)
    assert list(roster.training) == [1]
    assert roster.find(0) is a
    assert not roster.nobody_trains
    roster.leave(b, expected_back=False)
    assert roster.nobody_trains
    assert roster.present() == [a]


def test_one_who_is_expected_back_may_still_train() -> None:
    roster = Roster(2)
    (a,) = entered(roster, 0)
    roster.leave(a, expected_back=True)
    assert not roster.nobody_trains
    assert not roster.may_yet_come
    entered(roster, 0)
    assert roster.awaited == set()


def test_an_old_self_takes_no_part_any_more() -> None:
    roster = Roster(1)
    (old,) = entered(roster, 0)
    (new,) = entered(roster, 0)
    assert roster.find(0) is new is not old


def test_numbers_are_filled_from_below_and_a_closed_connection_leaves_its_own_free() -> None:
    roster = Roster(3)
    assert roster.free_number() == 0
    entered(roster, 0, 2)
    assert roster.free_number() == 1
    roster.enter(member(1, connected=False))
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
    assert roster.may_yet_come
    assert not roster.nobody_trains
    roster.expect_no_more()
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
    a.step(Transition.END)
    roster.finish(b)
    roster.leave(c, expected_back=True)
    assert roster.expected == {1, 2}
