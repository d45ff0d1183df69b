"""DSSP: algorithms 1 and 2 of the paper, and its three bounds: on the gap, on the staleness, and none."""

import pytest
from hypothesis import given

from paceline.policies import PolicyError
from paceline.policies.asp import ASP
from paceline.policies.dssp import DSSP
from paceline.policies.ssp import SSP
from policies.any_driver import AnyDriver
from policies.cluster import run, steady
from policies.conversation import Conversation, applied, granted, streamed, streams, turn
from policies.histories import STEPS, Step, act
from policies.specs import fresh
from tries import tries


def test_up_to_low_dssp_is_ssp() -> None:
    talk = Conversation(DSSP(low=1, high=3), workers="ab")
    talk.arrives("a", at=1.0).answers(applied("a"), granted("a"))
    talk.arrives("a", at=2.0).answers(applied("a"))  # the interval of b is unknown, so a waits, as under SSP
    talk.arrives("b", at=10.0).answers(applied("b"), granted("b"), granted("a"))


def test_beyond_low_the_fastest_worker_asks_the_controller() -> None:
    """a pushes at 2 and at 11, so the controller expects a at 11, 20 and 29, and b at 20, 30 and 40.

    One extra iteration of a ends when that of b does, so a gets one and not a second.
    """
    talk = Conversation(DSSP(low=1, high=3), workers="ab")
    talk.arrives("a", at=1.0)
    talk.arrives("a", at=2.0)
    talk.arrives("b", at=10.0).answers(applied("b"), granted("b"), granted("a"))
    talk.arrives("a", at=11.0).answers(applied("a"), granted("a"))
    talk.arrives("a", at=20.0).answers(applied("a"))


def test_extra_iterations_are_used_up_one_by_one() -> None:
    """b pushes every 10 s and a every 3 s. After three extra iterations a is at 19 s, the nearest to b's 20 s."""
    policy = DSSP(low=1, high=9)
    talk = Conversation(policy, workers="ab")
    talk.arrives("a", at=1.0)
    talk.arrives("a", at=7.0)
    talk.arrives("b", at=10.0).answers(applied("b"), granted("b"), granted("a"))
    talk.arrives("a", at=10.0).answers(applied("a"), granted("a"))
    extra = [policy.extra[0]]
    for at in (13.0, 16.0):
        talk.arrives("a", at=at).answers(applied("a"), granted("a"))
        extra.append(policy.extra[0])
    talk.arrives("a", at=20.0).answers(applied("a"))  # none is left; a asks again, and b is expected at this moment
    assert extra == [2, 1, 0]


def test_only_the_fastest_worker_asks_the_controller() -> None:
    talk = Conversation(DSSP(low=1, high=9), workers="abc")
    for worker in "ab":
        talk.arrives(worker, at=1.0)
    for worker in "ab":
        talk.arrives(worker, at=2.0)
    talk.arrives("c", at=10.0).answers(applied("c"), granted("c"), granted("a"), granted("b"))
    talk.arrives("a", at=11.0).answers(
        applied("a"), granted("a")
    )  # a has done three and c one; no worker has done more
    talk.arrives("a", at=12.0).answers(applied("a"), granted("a"))
    talk.arrives("b", at=12.5).answers(applied("b"))  # b has done three as well, but a has done four


def test_the_printed_algorithm_does_not_bound_the_gap_of_two_unequal_workers() -> None:
    """The cluster of table I: as printed, the faster GPU may ask again and again, so its lead has no bound."""
    unequal = {0: steady(1.0), 1: steady(10.7)}
    bounded = run(DSSP(low=3, high=15), unequal, updates=2000)
    printed = run(DSSP(low=3, high=15, bound="none"), unequal, updates=2000)
    assert max(bounded.gaps) <= 15
    assert max(printed.gaps) > 100
    assert printed.waited[0] < bounded.waited[0] / 10  # as fast as ASP


@pytest.mark.parametrize("ratio", [1.4, 2.57, 10.7])
def test_bounded_staleness_keeps_the_speed_of_asp(ratio: float) -> None:
    """A bound on the gap costs as much as SSP. A bound on the staleness costs at most 3%, and bounds something."""
    unequal = {0: steady(1.0), 1: steady(ratio)}
    asp, gap, fresh_enough = (
        run(policy, unequal, updates=2000) for policy in (ASP(), DSSP(), DSSP(low=3, high=15, bound="staleness"))
    )
    assert gap.applied[-1][0] > 1.19 * asp.applied[-1][0]
    assert fresh_enough.applied[-1][0] < 1.03 * asp.applied[-1][0]
    assert max(fresh_enough.staleness) <= 16


def test_bounded_staleness_is_faster_than_the_printed_algorithm_with_more_workers() -> None:
    """As printed, a worker that is not the fastest waits until the slowest has caught up with its whole lead."""
    unequal = {0: steady(1.0), 1: steady(1.1), 2: steady(8.0), 3: steady(8.5)}
    printed = run(DSSP(low=3, high=15, bound="none"), unequal, updates=2000)
    fresh_enough = run(DSSP(low=3, high=15, bound="staleness"), unequal, updates=2000)
    assert fresh_enough.applied[-1][0] < 0.55 * printed.applied[-1][0]


def test_a_lead_counts_afresh_when_the_longest_iteration_ends() -> None:
    talk = Conversation(DSSP(low=0, high=1, bound="staleness"), workers="abc")
    talk.arrives("a", at=1.0).answers(applied("a"))  # b's interval is unknown, so a waits for its push
    talk.arrives("b", at=10.0).answers(applied("b"))  # b has pushed one while c runs; a may go on only after c
    talk.arrives("c", at=11.0).answers(applied("c"), granted("c"), granted("a"), granted("b"))


def test_a_worker_that_hangs_is_waited_for_and_one_that_leaves_is_not() -> None:
    talk = Conversation(DSSP(low=1, high=1, bound="staleness"), workers="ab")
    talk.arrives("a", at=1.0).answers(applied("a"), granted("a"))
    talk.arrives("a", at=2.0).answers(applied("a"))
    talk.leaves("b", at=50.0).answers(granted("a"))


def test_a_dynamic_threshold_saves_waiting() -> None:
    """If a small lead cannot bridge the slowest worker's iteration, DSSP waits less than SSP with staleness=low."""
    uneven = {0: steady(1.0), 1: steady(1.4)}
    assert run(DSSP(low=0, high=4), uneven, updates=400).waited[0] < run(SSP(0), uneven, updates=400).waited[0]


def test_high_must_not_be_below_low() -> None:
    with pytest.raises(PolicyError, match=r"high must be at least low \(4\); got 3"):
        DSSP(low=4, high=3)


@pytest.mark.parametrize("bound", ["gap", "none"])
@given(steps=STEPS)
@tries(20, 60)
def test_with_low_equal_to_high_dssp_decides_as_ssp(bound: str, steps: list[Step]) -> None:
    driver = AnyDriver(fresh("ssp:staleness=1"))
    driver.shadows.append(
        DSSP(low=1, high=1, bound=bound)  # type: ignore[arg-type]
    )  # it sees the same events and must make the same decisions
    for step in steps:
        act(driver, step)


def test_streamed_each_update_has_its_own_stream() -> None:
    talk = Conversation(streamed(DSSP(low=1, high=3)), workers="ab")
    talk.is_ready("a", at=1.0).answers(turn("a"), streams("a", (1.0,), in_order=False))
    talk.is_ready("b", at=1.5).answers(turn("b"), streams("b", (1.0,), in_order=False))
    talk.arrives("a", at=2.0).answers(applied("a"), granted("a"))
    talk.leaves("b", at=2.5).answers()
    talk.is_ready("a", at=3.0).answers(turn("a"), streams("a", (1.0,), in_order=False))
