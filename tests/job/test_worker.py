"""A worker's side of the protocol: it forgets no message, and repeats those that may have been lost."""

from __future__ import annotations

import pytest

from paceline.job import WorkerState, events, instructions
from paceline.job.worker import STEPS, Phase


def granted(iteration: int, version: int = 0) -> instructions.SendGrant:
    return instructions.SendGrant(1, iteration, version, None, True, None)


def ready(iteration: int, *taken: int) -> events.GradientComputed:
    return events.GradientComputed(1, iteration, 0, 1, 0.1, None, taken)


def at_work(iteration: int = 1) -> WorkerState:
    """A worker that computes its iteration."""
    worker = WorkerState()
    worker.heard(granted(iteration))
    worker.take_grant()
    return worker


def test_an_iteration() -> None:
    worker = WorkerState()
    assert not worker.is_granted
    worker.heard(granted(1))
    assert worker.is_granted
    assert worker.take_grant().iteration == 1
    assert not worker.is_granted
    assert worker.tell_ready(ready(1)) == [ready(1)]
    assert worker.turn(1) == "later"
    worker.heard(instructions.SendPushNow(1, 1))
    assert worker.turn(1) == "now"
    worker.heard(granted(2))
    assert worker.take_grant().iteration == 2


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_out_of_turn_is_a_mistake(step: str, phase: Phase) -> None:
    worker = WorkerState()
    worker.phase = phase
    allowed, then = STEPS[step]
    if phase in allowed:
        worker._step(step)
        assert worker.phase is then
    else:
        with pytest.raises(RuntimeError, match=f"at {phase.name} cannot {step}"):
            worker._step(step)


# A server that is stopped for seconds


def test_a_worker_that_waits_for_its_turn_hears_that_it_was_cancelled_and_granted_anew() -> None:
    """The server wakes up: it tells of the Turn and of its end into a dead connection, and grants the next iteration.

    On the new connection it repeats only the last Grant. A worker that threw it away would wait for ever.
    """
    worker = at_work()
    worker.tell_ready(ready(1))
    assert worker.turn(1) == "later"
    worker.reconnected()
    worker.heard(granted(2))
    assert worker.turn(1) == "never"
    assert worker.take_grant().iteration == 2


def test_or_that_it_was_cancelled_and_nothing_else() -> None:
    worker = at_work()
    worker.tell_ready(ready(1))
    worker.reconnected()
    worker.heard(granted(1))
    worker.heard(instructions.SendCancel(1, 1))
    assert worker.turn(1) == "never"
    assert not worker.is_granted


def test_a_turn_of_an_iteration_that_is_over_does_not_bring_it_back() -> None:
    worker = at_work()
    worker.tell_ready(ready(1))
    worker.heard(granted(2))
    worker.heard(instructions.SendPushNow(1, 1))
    assert worker.turn(1) == "never"


def test_a_grant_that_was_heard_before_does_not_count_again() -> None:
    worker = at_work(2)
    worker.heard(granted(1))
    worker.heard(granted(2))
    assert not worker.is_granted
    assert worker.newest.iteration == 2


# What is said again


def test_what_was_not_answered_is_said_again_in_the_order_in_which_it_makes_sense() -> None:
    worker = at_work()
    want = events.SamplesRequested(1, 1, 2, 8, 1)
    worker.request(want)
    worker.tell_ready(ready(1))
    assert worker.reconnected() == [want, ready(1)]
    worker.heard(instructions.SendSamples(1, 1, 0, 0, 2))
    assert worker.reconnected() == [ready(1)]
    worker.heard(granted(2))
    assert worker.reconnected() == []
    worker.take_grant()
    worker.finish(events.WorkerFinished(1))
    assert worker.reconnected() == [events.WorkerFinished(1)]
    worker.heard(instructions.SendFinished(1, 3))
    assert worker.last_version == 3
    assert worker.reconnected() == []
    worker.leave(events.WorkerLeft(1))
    assert worker.reconnected() == [events.WorkerLeft(1)]
    worker.heard(instructions.SendLeave(1))
    assert worker.has_parted
    assert worker.reconnected() == []


def test_an_announcement_is_said_again_until_its_turn() -> None:
    worker = at_work()
    soon = events.GradientBegun(1, 1, 0, 4)
    worker.announce(soon)
    assert worker.reconnected() == [soon]
    worker.heard(instructions.SendPushNow(1, 1))
    assert worker.reconnected() == []


def test_samples_of_a_cancelled_iteration_are_told_of_until_something_later_is_answered() -> None:
    """The job does not answer this Ready. If it was lost, no worker would train on its samples."""
    worker = at_work()
    worker.heard(instructions.SendCancel(1, 1))
    worker.tell_ready(ready(1, 7))
    assert worker.reconnected() == [ready(1, 7)]
    worker.beat(events.WorkerAlive(1))
    worker.reconnected()
    worker.heard(instructions.SendHeartbeat(1))
    assert worker.reconnected() == [ready(1, 7)], "that Beat was said on the old connection, before the Ready"
    worker.beat(events.WorkerAlive(1))
    worker.heard(instructions.SendHeartbeat(1))
    assert worker.reconnected() == []


def test_an_answer_is_taken_once_and_by_its_number() -> None:
    worker = at_work()
    worker.request(events.SamplesRequested(1, 1, 2, 8, 1))
    worker.request(events.SamplesRequested(1, 2, 2, 8, 1))
    worker.heard(instructions.SendSamples(1, 2, 0, 2, 4))
    assert worker.take_given(1) is None
    assert worker.take_given(2) == instructions.SendSamples(1, 2, 0, 2, 4)
    assert worker.take_given(2) is None
    worker.heard(instructions.SendSamples(1, 2, 0, 2, 4))
    assert worker.take_given(2) is None, "said twice"


def test_why_it_is_not_granted_holds_until_it_is() -> None:
    worker = at_work()
    worker.heard(instructions.SendExcluded(1, "its updates differ"))
    assert worker.exclusion == "its updates differ"
    worker.heard(granted(2))
    assert worker.exclusion == ""
