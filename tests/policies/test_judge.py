"""The judge itself: policies that break a promise are caught, or the suite would prove nothing."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.policies import Apply, Cancel, Discard, Grant, Keep, Policy, Stream, Turn, Update, WakeAt
from paceline.policies.asp import ASP
from paceline.policies.bsp import BSP
from paceline.policies.contract import Decisions
from paceline.policies.r2sp import R2SP
from policies.anydriver import AnyDriver, Broken, Promise
from policies.conversation import streamed
from policies.promises import AppliesAtOnce, GapAtMost, NeverBlocks, RingOrder, StalenessWithin, TurnsApart


class Says(Policy):
    """Answers an arrival with whatever it was made with."""

    def __init__(self) -> None:
        self.say: Callable[[Update], Decisions] = lambda update: []

    def joined(self, worker: int, now: float) -> Decisions:
        return [Grant(worker)]

    def arrived(self, update: Update, now: float) -> Decisions:
        return self.say(update)

    def left(self, worker: int, now: float) -> Decisions:
        return []


def whole(update: Update) -> Apply:
    return Apply((update,), (1.0,))


WRONG: dict[str, Callable[[Update], Decisions]] = {
    "nobody runs and no wake is set": lambda update: [whole(update)],
    "no member": lambda update: [whole(update), Grant(7)],
    "a Grant already": lambda update: [whole(update), Grant(update.worker), Grant(update.worker)],
    "no such batch": lambda update: [whole(update), Grant(update.worker, 0)],
    "runs nothing": lambda update: [Cancel(update.worker), Grant(update.worker)],
    "did not ask": lambda update: [Turn(update.worker), Grant(update.worker)],
    "settled before": lambda update: [whole(update), Discard(update), Grant(update.worker)],
    "has not arrived": lambda update: [Discard(Update(0, 9, 0, 1, 1.0)), Grant(update.worker)],
    "an Apply of nothing": lambda update: [Apply((), ()), Grant(update.worker)],
    "one weight for each": lambda update: [Apply((update,), ()), Grant(update.worker)],
    "such weights cannot be": lambda update: [Apply((update,), (-1.0,)), Grant(update.worker)],
    "such a mix cannot be": lambda update: [Apply((update,), (1.0,), mix=2.0), Grant(update.worker)],
    r"WakeAt\(time=0": lambda update: [whole(update), Grant(update.worker), WakeAt(0.0)],
}


@pytest.mark.parametrize("message", WRONG)
def test_an_answer_that_cannot_be_is_caught(message: str) -> None:
    driver = AnyDriver(Says)
    driver.policy.say = WRONG[message]  # type: ignore[attr-defined]
    driver.joins(0)
    driver.time_passes(1.0)
    with pytest.raises(Broken, match=message):
        driver.answers(driver.running[0])


def test_a_kept_update_may_be_applied_again_but_not_after_it_was_replaced() -> None:
    driver = AnyDriver(Says)
    first: list[Update] = []

    def keep(update: Update) -> Decisions:
        first.append(update)
        return [Keep(update, 0), whole(first[0]), Grant(0)]

    driver.policy.say = keep  # type: ignore[attr-defined]
    driver.joins(0)
    driver.answers(driver.running[0])
    with pytest.raises(Broken, match="has not arrived, or was settled before"):
        driver.answers(driver.running[0])


def test_an_update_is_not_settled_in_the_name_of_another_incarnation() -> None:
    held: list[Update] = []

    def hold(update: Update) -> Decisions:
        held.append(update)
        return [Grant(0)]

    driver = AnyDriver(Says)
    driver.policy.say = hold  # type: ignore[attr-defined]
    driver.joins(0)
    driver.answers(driver.running[0])
    driver.leaves(0)
    driver.joins(0)
    driver.policy.say = lambda update: [whole(held[0]), whole(replace(update, incarnation=1))]  # type: ignore[attr-defined]
    with pytest.raises(Broken, match=r"incarnation=1.* was settled before"):
        driver.answers(driver.running[0])


def test_an_update_that_is_forgotten_is_found_when_all_have_left() -> None:
    driver = AnyDriver(Says)
    driver.policy.say = lambda update: [Grant(update.worker)]  # type: ignore[attr-defined]
    driver.joins(0)
    driver.answers(driver.running[0])
    with pytest.raises(Broken, match="never applied or discarded"):
        driver.everyone_leaves()


def test_one_who_waits_for_ever_is_found_by_a_calm_driver() -> None:
    class Forgets(ASP):
        def joined(self, worker: int, now: float) -> Decisions:
            return super().joined(worker, now) if worker == 0 else []

    driver = AnyDriver(Forgets)
    driver.joins(0)
    driver.joins(1)
    with pytest.raises(Broken, match="still not there"):
        driver.calms_down(1.0, lambda: driver.iterations[1] > 0, steps=100)


def test_a_policy_that_spins_is_caught() -> None:
    class Spins(ASP):
        def woke(self, now: float) -> Decisions:
            return [WakeAt(now + 1e-6)]

        def joined(self, worker: int, now: float) -> Decisions:
            return [*super().joined(worker, now), WakeAt(now + 1e-6)]

    driver = AnyDriver(Spins)
    driver.joins(0)
    with pytest.raises(Broken, match="over and over"):
        driver.time_passes(1.0)


def test_a_copy_that_goes_its_own_way_is_caught() -> None:
    driver = AnyDriver(lambda: BSP(backup=1))
    for worker in (0, 1):
        driver.joins(worker)
    driver.copies()
    driver.shadows[0].backup = 0  # type: ignore[attr-defined]
    with pytest.raises(Broken, match="a copy answered"):
        driver.answers(driver.running[0])


def test_a_policy_that_is_not_deterministic_is_caught() -> None:
    made = iter(range(9))
    driver = AnyDriver(lambda: BSP(backup=next(made)))
    for worker in (0, 1):
        driver.joins(worker)
    driver.answers(driver.running[0])
    with pytest.raises(Broken, match="replayed"):
        driver.replays()


def ring_of_three(promise: Promise) -> AnyDriver:
    driver = AnyDriver(R2SP, (promise,))
    for worker in range(3):
        driver.joins(worker)
    driver.calms_down(3.0, lambda: driver.version >= 6, steps=100)
    return driver


def test_a_policy_that_breaks_its_own_promise_is_caught() -> None:
    """ASP under the promises of others."""
    for promise, steps in (
        (GapAtMost(2), [0, 0, 0]),
        (StalenessWithin(), [0, 0, 1]),
    ):
        driver = AnyDriver(ASP, (promise,))
        driver.joins(0)
        driver.joins(1)
        with pytest.raises(Broken, match=r"ahead of the slowest|versions old"):
            for worker in steps:
                driver.answers(driver.running[worker])


def test_a_barrier_blocks_and_leaves_updates_lying() -> None:
    for promise in (NeverBlocks(), AppliesAtOnce()):
        driver = AnyDriver(BSP, (promise,))
        driver.joins(0)
        driver.joins(1)
        with pytest.raises(Broken, match=r"made to wait|left lying"):
            driver.answers(driver.running[0])


def test_turns_too_close_are_caught() -> None:
    class Hasty(R2SP):
        gap = 0.0

    driver = AnyDriver(Hasty, (TurnsApart(),))
    for worker in range(3):
        driver.joins(worker)
    with pytest.raises(Broken, match="two turns were"):
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
    with pytest.raises(Broken, match="order changed"):
        driver.wakes_for_no_reason()


def test_one_who_is_overtaken_is_noticed() -> None:
    driver = ring_of_three(RingOrder())
    before = driver.policy.woke

    def woke(now: float) -> Decisions:
        driver.policy.ring.pass_on()  # type: ignore[attr-defined]
        return before(now)

    driver.policy.woke = woke  # type: ignore[method-assign]
    with pytest.raises(Broken, match=r"was overtaken|had arrived"):
        driver.wakes_for_no_reason()


def test_one_given_up_too_early_is_noticed() -> None:
    class Impatient(R2SP):
        def _deadline(self, since: float) -> float | None:
            return since

    driver = AnyDriver(Impatient, (RingOrder(),))
    for worker in range(3):
        driver.joins(worker)
    driver.calms_down(3.0, lambda: driver.version >= 3, steps=100)
    latest = max(driver.running.values(), key=lambda task: task.granted_at)
    driver.time_passes(1.0)
    with pytest.raises(Broken, match="lost its turn after"):
        driver.answers(latest)  # it waits for the two others, who have taken a third of their time


# Streams


class Streams(ASP):
    """Says what it should and then, on being ready, whatever it was made with."""

    streamed = True

    def __init__(self) -> None:
        super().__init__()
        self.more: Callable[[Stream], Decisions] = lambda stream: [stream]

    def ready(self, worker: int, batch_size: int, now: float) -> Decisions:
        turn, stream = super().ready(worker, batch_size, now)
        assert isinstance(stream, Stream)
        return [turn, *self.more(stream)]


WRONG_STREAMS: dict[str, Callable[[Stream], Decisions]] = {
    "was not streamed": lambda stream: [],
    "streamed already": lambda stream: [stream, stream],
    "worker 1 is not ready": lambda stream: [replace(stream, workers=(0, 1), weights=(1.0, 1.0))],
    "worker 7 is not ready": lambda stream: [replace(stream, workers=(7,))],
    "one weight for each worker": lambda stream: [replace(stream, weights=())],
    "such weights cannot be": lambda stream: [replace(stream, weights=(0.0,))],
    "the weights of the Stream were": lambda stream: [replace(stream, weights=(0.5,))],
}


@pytest.mark.parametrize("message", WRONG_STREAMS)
def test_a_stream_that_cannot_be_is_caught(message: str) -> None:
    driver = AnyDriver(Streams)
    driver.policy.more = WRONG_STREAMS[message]  # type: ignore[attr-defined]
    driver.joins(0)
    driver.joins(1)
    with pytest.raises(Broken, match=message):
        driver.answers(driver.running[0])


def test_a_stream_is_caught_where_nothing_is_streamed() -> None:
    class Whole(Says):
        def ready(self, worker: int, batch_size: int, now: float) -> Decisions:
            return [Turn(worker), Stream((worker,), (1.0,))]

    driver = AnyDriver(Whole)
    driver.joins(0)
    with pytest.raises(Broken, match="applied whole"):
        driver.answers(driver.running[0])


def test_one_who_may_not_push_is_not_streamed() -> None:
    class TooEarly(R2SP):
        streamed = True

        def ready(self, worker: int, batch_size: int, now: float) -> Decisions:
            turn, *rest = super().ready(worker, batch_size, now)
            return [*rest, turn]

    driver = AnyDriver(TooEarly)
    driver.joins(0)
    with pytest.raises(Broken, match="may not push"):
        driver.answers(driver.running[0])


def test_what_was_streamed_must_not_be_discarded() -> None:
    class Drops(ASP):
        streamed = True

        def arrived(self, update: Update, now: float) -> Decisions:
            return [Discard(update), Grant(update.worker)]

    driver = AnyDriver(Drops)
    driver.joins(0)
    with pytest.raises(Broken, match="it was streamed"):
        driver.answers(driver.running[0])


def test_what_was_streamed_in_order_is_applied_in_order() -> None:
    class Overtakes(ASP):
        streamed = True

        def ready(self, worker: int, batch_size: int, now: float) -> Decisions:
            self.promised[worker] = 1.0
            return [Turn(worker), Stream((worker,), (1.0,))]

    driver = AnyDriver(Overtakes)
    for worker in (0, 1):
        driver.joins(worker)
        driver.computes(driver.running[worker])
    with pytest.raises(Broken, match=r"overtook what was streamed before, of workers \[0\]"):
        driver.pushes(driver.running[1])


def test_what_was_streamed_together_is_applied_together() -> None:
    class Splits(BSP):
        def _apply(self) -> Decisions:
            (apply,) = super()._apply()
            assert isinstance(apply, Apply)
            return [Apply((update,), (1.0,)) for update in apply.updates]

    driver = AnyDriver(lambda: Splits(pipeline=True))
    for worker in (0, 1):
        driver.joins(worker)
    for worker in (0, 1):
        driver.computes(driver.running[worker])
    driver.pushes(driver.running[0])
    with pytest.raises(Broken, match="not of those"):
        driver.pushes(driver.running[1])


def test_a_push_cancelled_too_early_is_noticed() -> None:
    driver = AnyDriver(lambda: streamed(R2SP()), (RingOrder(),))
    for worker in (0, 1):
        driver.joins(worker)
    driver.calms_down(3.0, lambda: driver.version >= 6, steps=100)
    while not (pushing := [task for task in driver.running.values() if task.turn]):
        driver.time_passes(1.0)
        for task in list(driver.running.values()):
            if task.computed_at is None:
                driver.computes(task)
    policy: Any = driver.policy
    before = driver.policy.woke

    def woke(now: float) -> Decisions:
        policy.pushes[0].since -= 100
        policy.waiting.add(-1)
        return before(now)

    policy.woke = woke
    assert pushing
    with pytest.raises(Broken, match="push was cancelled after"):
        driver.wakes_for_no_reason()
