"""The judge of Streams: wrong Streams, and Applies that do not follow them, are caught."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.policies import Apply, Discard, Grant, Stream, Turn, Update
from paceline.policies.asp import ASP
from paceline.policies.bsp import BSP
from paceline.policies.contract import Decisions
from paceline.policies.r2sp import R2SP
from policies.any_driver import AnyDriver
from policies.conversation import streamed
from policies.promises import RingOrder


class Streams(ASP):
    """Streams as ASP does, but the test changes the Streams."""

    streamed = True

    def __init__(self) -> None:
        super().__init__()
        self.change: Callable[[Stream], Decisions] = lambda stream: [stream]

    def ready(self, worker: int, batch_size: int, now: float) -> Decisions:
        turn, stream = super().ready(worker, batch_size, now)
        assert isinstance(stream, Stream)
        return [turn, *self.change(stream)]


WRONG_STREAMS: dict[str, Callable[[Stream], Decisions]] = {
    "was not streamed": lambda stream: [],
    "already streamed": lambda stream: [stream, stream],
    "worker 1 is not ready": lambda stream: [replace(stream, workers=(0, 1), weights=(1.0, 1.0))],
    "worker 7 is not ready": lambda stream: [replace(stream, workers=(7,))],
    "each worker needs one weight": lambda stream: [replace(stream, weights=())],
    "invalid weights": lambda stream: [replace(stream, weights=(0.0,))],
    "the weights of the Stream were": lambda stream: [replace(stream, weights=(0.5,))],
}


@pytest.mark.parametrize("message", WRONG_STREAMS)
def test_a_wrong_stream_is_caught(message: str) -> None:
    driver = AnyDriver(Streams)
    driver.policy.change = WRONG_STREAMS[message]  # type: ignore[attr-defined]
    driver.joins(0)
    driver.joins(1)
    with pytest.raises(AssertionError, match=message):
        driver.answers(driver.running[0])


def test_a_stream_of_a_policy_that_is_not_streamed_is_caught() -> None:
    class Whole(ASP):
        def ready(self, worker: int, batch_size: int, now: float) -> Decisions:
            return [Turn(worker), Stream((worker,), (1.0,))]

    driver = AnyDriver(Whole)
    driver.joins(0)
    with pytest.raises(AssertionError, match="applied whole"):
        driver.answers(driver.running[0])


def test_a_stream_before_its_turn_is_caught() -> None:
    class TooEarly(R2SP):
        streamed = True

        def ready(self, worker: int, batch_size: int, now: float) -> Decisions:
            turn, *rest = super().ready(worker, batch_size, now)
            return [*rest, turn]

    driver = AnyDriver(TooEarly)
    driver.joins(0)
    with pytest.raises(AssertionError, match="may not push"):
        driver.answers(driver.running[0])


def test_discarding_a_streamed_update_is_caught() -> None:
    class Drops(ASP):
        streamed = True

        def arrived(self, update: Update, now: float) -> Decisions:
            return [Discard(update), Grant(update.worker)]

    driver = AnyDriver(Drops)
    driver.joins(0)
    with pytest.raises(AssertionError, match="it was streamed"):
        driver.answers(driver.running[0])


def test_an_apply_out_of_the_order_of_streams_is_caught() -> None:
    class Overtakes(ASP):
        streamed = True

        def ready(self, worker: int, batch_size: int, now: float) -> Decisions:
            self.promised[worker] = 1.0
            return [Turn(worker), Stream((worker,), (1.0,))]

    driver = AnyDriver(Overtakes)
    for worker in (0, 1):
        driver.joins(worker)
        driver.computes(driver.running[worker])
    with pytest.raises(AssertionError, match=r"overtook earlier Streams, of workers \[0\]"):
        driver.pushes(driver.running[1])


def test_an_apply_of_a_part_of_a_stream_is_caught() -> None:
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
    with pytest.raises(AssertionError, match="does not name the remaining updates"):
        driver.pushes(driver.running[1])


def test_a_push_that_is_cancelled_too_early_is_caught() -> None:
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
        policy.streaming.pushes[0].since -= 100
        policy.waiting.add(-1)
        return before(now)

    policy.woke = woke
    assert pushing
    with pytest.raises(AssertionError, match="push was cancelled after"):
        driver.wakes_for_no_reason()
