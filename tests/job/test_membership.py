"""The members of a job, their stages, and when the training is over."""

from __future__ import annotations

import pytest

from paceline.job.membership import ADMITTED, RUNNING, TRANSITIONS, Member, Roster, Stage, StageError, Transition


def member(worker: int, connected: bool = True) -> Member:
    made = Member(worker, 1, 7, 0.0)
    if not connected:
        made.connection = None
    return made


def enter(roster: Roster, *workers: int) -> list[Member]:
    """Add workers to the roster, and return the members."""
    members = [member(worker) for worker in workers]
    for each in members:
        roster.enter(each)
    return members


def after(*transitions: Transition) -> Member:
    """A member that has made these transitions."""
    made = member(0)
    for transition in transitions:
        made.step(transition)
    return made


def test_an_iteration_goes_from_stage_to_stage() -> None:
    a = after(
        Transition.ADMIT, Transition.GRANT, Transition.ANNOUNCE, Transition.TURN, Transition.ARRIVE, Transition.GRANT
    )
    assert a.stage is Stage.COMPUTING
    assert after(Transition.ADMIT, Transition.GRANT, Transition.ANNOUNCE, Transition.ARRIVE).stage is Stage.IDLE, (
        "a push needs no Turn"
    )
    assert after(Transition.ADMIT, Transition.GRANT, Transition.CANCEL, Transition.GRANT).stage is Stage.COMPUTING


@pytest.mark.parametrize("transition", Transition)
@pytest.mark.parametrize("stage", Stage)
def test_a_transition_that_is_not_in_the_table_raises_and_changes_nothing(stage: Stage, transition: Transition) -> None:
    made = member(0)
    made.stage = stage
    if transition in TRANSITIONS[stage]:
        made.step(transition)
        assert made.stage is TRANSITIONS[stage][transition]
    else:
        with pytest.raises(StageError, match=f"allows no {transition.name}"):
            made.step(transition)
        assert made.stage is stage


def test_every_stage_can_be_reached_and_every_stage_but_the_last_can_be_left() -> None:
    reached = {Stage.WAITING} | {stage for following in TRANSITIONS.values() for stage in following.values()}
    assert reached == set(Stage)
    assert [stage for stage in Stage if not TRANSITIONS[stage]] == [Stage.GONE]
    assert all(Transition.LEAVE in TRANSITIONS[stage] for stage in Stage if stage is not Stage.GONE)
    assert all(Transition.GRANT in TRANSITIONS[stage] for stage in ADMITTED - RUNNING)


def test_a_member_that_finishes_no_longer_trains_and_is_still_present() -> None:
    roster = Roster(2)
    a, b = enter(roster, 0, 1)
    roster.finish(a)
    assert list(roster.training) == [1]
    assert roster.find(0) is a
    assert not roster.training_is_over
    roster.leave(b, expected_back=False)
    assert roster.training_is_over
    assert roster.present() == [a]


def test_the_training_is_not_over_while_a_worker_is_expected_back() -> None:
    roster = Roster(2)
    (a,) = enter(roster, 0)
    roster.leave(a, expected_back=True)
    assert not roster.training_is_over
    assert not roster.awaits_only_unknown
    enter(roster, 0)
    assert roster.awaited == set()


def test_a_new_incarnation_replaces_the_old_one() -> None:
    roster = Roster(1)
    (old,) = enter(roster, 0)
    (new,) = enter(roster, 0)
    assert roster.find(0) is new is not old


def test_the_lowest_number_is_free_unless_a_connected_member_has_it() -> None:
    roster = Roster(3)
    assert roster.first_free_number() == 0
    enter(roster, 0, 2)
    assert roster.first_free_number() == 1
    roster.enter(member(1, connected=False))
    assert roster.first_free_number() == 1


def test_after_a_restore_the_workers_that_had_not_left_are_expected() -> None:
    roster = Roster(3, awaited=frozenset({0, 1}), restored=True)
    (a,) = enter(roster, 0)
    roster.finish(a)
    assert not roster.training_is_over, "worker 1 is still expected"
    (b,) = enter(roster, 1)
    roster.leave(b, expected_back=False)
    assert roster.training_is_over, "there never was a third worker"


def test_after_a_restore_without_known_workers_the_configured_number_is_expected() -> None:
    roster = Roster(2, restored=True)
    (a,) = enter(roster, 0)
    roster.finish(a)
    assert roster.awaits_only_unknown
    assert not roster.training_is_over
    roster.stop_expecting_unknown()
    assert roster.training_is_over


def test_a_new_job_expects_no_unknown_workers() -> None:
    roster = Roster(5)
    (a,) = enter(roster, 0)
    roster.leave(a, expected_back=False)
    assert roster.training_is_over


def test_the_next_generation_expects_all_workers_but_those_that_know_the_last_version() -> None:
    roster = Roster(3)
    a, b, c = enter(roster, 0, 1, 2)
    roster.finish(a)
    a.step(Transition.END)
    roster.finish(b)
    roster.leave(c, expected_back=True)
    assert roster.expected == {1, 2}
