"""The judge itself: it catches policies that break a promise. Otherwise the property tests would prove nothing."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.policies import Apply, Cancel, Discard, Grant, Keep, Policy, Turn, Update, WakeAt
from paceline.policies.asp import ASP
from paceline.policies.bsp import BSP
from paceline.policies.contract import Decisions
from paceline.policies.r2sp import R2SP
from policies.any_driver import AnyDriver
from policies.promise import Promise
from policies.promises import AppliesAtOnce, GapAtMost, NeverBlocks, RingOrder, StalenessWithin, TurnsApart


class Scripted(Policy):
    """Answers an arrival with the decisions that the test chooses."""

    def __init__(self) -> None:
        self.script: Callable[[Update], Decisions] = lambda update: []

    def joined(self, worker: int, now: float) -> Decisions:
        return [Grant(worker)]

    def arrived(self, update: Update, now: float) -> Decisions:
        return self.script(update)

    def left(self, worker: int, now: float) -> Decisions:
        return []


def whole(update: Update) -> Apply:
    return Apply((update,), (1.0,))


WRONG: dict[str, Callable[[Update], Decisions]] = {
    "none runs and no WakeAt is set": lambda update: [whole(update)],
    "no member": lambda update: [whole(update), Grant(7)],
    "already has a Grant": lambda update: [whole(update), Grant(update.worker), Grant(update.worker)],
    "invalid batch size": lambda update: [whole(update), Grant(update.worker, 0)],
    "runs no iteration": lambda update: [Cancel(update.worker), Grant(update.worker)],
    "did not ask for one": lambda update: [Turn(update.worker), Grant(update.worker)],
    "settled already": lambda update: [whole(update), Discard(update), Grant(update.worker)],
    "has not arrived": lambda update: [Discard(Update(0, 9, 0, 1, 1.0)), Grant(update.worker)],
    "an Apply without updates": lambda update: [Apply((), ()), Grant(update.worker)],
    "each update needs one weight": lambda update: [Apply((update,), ()), Grant(update.worker)],
    "invalid weights": lambda update: [Apply((update,), (-1.0,)), Grant(update.worker)],
    "invalid mix": lambda update: [Apply((update,), (1.0,), mix=2.0), Grant(update.worker)],
    r"WakeAt\(time=0": lambda update: [whole(update), Grant(update.worker), WakeAt(0.0)],
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_decision_is_caught(message: str) -> None:
    driver = AnyDriver(Scripted)
    driver.policy.script = WRONG[message]  # type: ignore[attr-defined]
    driver.joins(0)
    driver.time_passes(1.0)
    with pytest.raises(AssertionError, match=message):
        driver.answers(driver.running[0])


def test_a_kept_update_may_be_applied_again_but_not_after_it_was_replaced() -> None:
    driver = AnyDriver(Scripted)
    first: list[Update] = []

    def keep(update: Update) -> Decisions:
        first.append(update)
        return [Keep(update, 0), whole(first[0]), Grant(0)]

    driver.policy.script = keep  # type: ignore[attr-defined]
    driver.joins(0)
    driver.answers(driver.running[0])
    with pytest.raises(AssertionError, match="has not arrived or is settled already"):
        driver.answers(driver.running[0])


def test_an_update_cannot_be_settled_as_that_of_another_incarnation() -> None:
    held: list[Update] = []

    def hold(update: Update) -> Decisions:
        held.append(update)
        return [Grant(0)]

    driver = AnyDriver(Scripted)
    driver.policy.script = hold  # type: ignore[attr-defined]
    driver.joins(0)
    driver.answers(driver.running[0])
    driver.leaves(0)
    driver.joins(0)
    driver.policy.script = lambda update: [whole(held[0]), whole(replace(update, incarnation=1))]  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match=r"incarnation=1.* is settled already"):
        driver.answers(driver.running[0])


def test_a_forgotten_update_is_caught_when_all_members_have_left() -> None:
    driver = AnyDriver(Scripted)
    driver.policy.script = lambda update: [Grant(update.worker)]  # type: ignore[attr-defined]
    driver.joins(0)
    driver.answers(driver.running[0])
    with pytest.raises(AssertionError, match="never applied or discarded"):
        driver.everyone_leaves()


def test_a_worker_that_waits_forever_is_caught() -> None:
    class Forgets(ASP):
        def joined(self, worker: int, now: float) -> Decisions:
            return super().joined(worker, now) if worker == 0 else []

    driver = AnyDriver(Forgets)
    driver.joins(0)
    driver.joins(1)
    with pytest.raises(AssertionError, match="not done after"):
        driver.calms_down(1.0, lambda: driver.iterations[1] > 0, steps=100)


def test_a_policy_that_spins_is_caught() -> None:
    class Spins(ASP):
        def woke(self, now: float) -> Decisions:
            return [WakeAt(now + 1e-6)]

        def joined(self, worker: int, now: float) -> Decisions:
            return [*super().joined(worker, now), WakeAt(now + 1e-6)]

    driver = AnyDriver(Spins)
    driver.joins(0)
    with pytest.raises(AssertionError, match="again and again"):
        driver.time_passes(1.0)


def test_a_copy_that_decides_otherwise_is_caught() -> None:
    driver = AnyDriver(lambda: BSP(backup=1))
    for worker in (0, 1):
        driver.joins(worker)
    driver.copies()
    driver.shadows[0].backup = 0  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="a copy answered"):
        driver.answers(driver.running[0])


def test_a_policy_that_is_not_deterministic_is_caught() -> None:
    made = iter(range(9))
    driver = AnyDriver(lambda: BSP(backup=next(made)))
    for worker in (0, 1):
        driver.joins(worker)
    driver.answers(driver.running[0])
    with pytest.raises(AssertionError, match="replaying"):
        driver.replays()


def ring_of_three(promise: Promise) -> AnyDriver:
    driver = AnyDriver(R2SP, (promise,))
    for worker in range(3):
        driver.joins(worker)
    driver.calms_down(3.0, lambda: driver.version >= 6, steps=100)
    return driver


def test_a_gap_or_a_staleness_beyond_the_bound_is_caught() -> None:
    """ASP breaks the promises of other policies."""
    for promise, steps in (
        (GapAtMost(2), [0, 0, 0]),
        (StalenessWithin(), [0, 0, 1]),
    ):
        driver = AnyDriver(ASP, (promise,))
        driver.joins(0)
        driver.joins(1)
        with pytest.raises(AssertionError, match=r"ahead of the slowest|versions old"):
            for worker in steps:
                driver.answers(driver.running[worker])


def test_a_barrier_breaks_the_promises_never_to_block_and_to_apply_at_once() -> None:
    for promise in (NeverBlocks(), AppliesAtOnce()):
        driver = AnyDriver(BSP, (promise,))
        driver.joins(0)
        driver.joins(1)
        with pytest.raises(AssertionError, match=r"made to wait|left undecided"):
            driver.answers(driver.running[0])


def test_turns_that_are_too_close_are_caught() -> None:
    class Hasty(R2SP):
        gap = 0.0

    driver = AnyDriver(Hasty, (TurnsApart(),))
    for worker in range(3):
        driver.joins(worker)
    with pytest.raises(AssertionError, match="two turns were"):
        driver.calms_down(3.0, lambda: driver.version >= 6, steps=100)


def test_a_ring_whose_order_changes_is_caught() -> None:
    driver = ring_of_three(RingOrder())
    ring = driver.policy.ring  # type: ignore[attr-defined]
    turned = copy.copy(ring)
    turned._after, turned._before = ring._before, ring._after
    before = driver.policy.woke

    def woke(now: float) -> Decisions:
        driver.policy.ring = turned  # type: ignore[attr-defined]
        return before(now)

    driver.policy.woke = woke  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="order changed"):
        driver.wakes_for_no_reason()


def test_a_worker_that_is_overtaken_is_caught() -> None:
    driver = ring_of_three(RingOrder())
    before = driver.policy.woke

    def woke(now: float) -> Decisions:
        driver.policy.ring.pass_on()  # type: ignore[attr-defined]
        return before(now)

    driver.policy.woke = woke  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"was overtaken|had arrived"):
        driver.wakes_for_no_reason()


def test_a_turn_that_is_lost_too_early_is_caught() -> None:
    class Impatient(R2SP):
        def _deadline(self, since: float) -> float | None:
            return since

    driver = AnyDriver(Impatient, (RingOrder(),))
    for worker in range(3):
        driver.joins(worker)
    driver.calms_down(3.0, lambda: driver.version >= 3, steps=100)
    latest = max(driver.running.values(), key=lambda task: task.granted_at)
    driver.time_passes(1.0)
    with pytest.raises(AssertionError, match="lost its turn after"):
        driver.answers(latest)  # it waits for the two others, which have used a third of their time
