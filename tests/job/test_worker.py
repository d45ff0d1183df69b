"""The worker's side of the protocol: it loses no message, and repeats those that may have been lost."""

from __future__ import annotations

import pytest

from paceline.job import WorkerState, events, instructions
from paceline.job.worker import STEPS, Phase


def granted(iteration: int, version: int = 0) -> instructions.SendGrant:
    return instructions.SendGrant(1, iteration, version, None, True, None)


def ready(iteration: int, *taken: int) -> events.GradientComputed:
    return events.GradientComputed(1, iteration, 0, 1, 0.1, None, taken)


def computing(iteration: int = 1) -> WorkerState:
    """A worker that computes this iteration."""
    worker = WorkerState()
    worker.heard(granted(iteration))
    worker.take_grant()
    return worker


def test_one_iteration() -> None:
    worker = WorkerState()
    assert not worker.is_granted
    worker.heard(granted(1))
    assert worker.is_granted
    assert worker.take_grant().iteration == 1
    assert not worker.is_granted
    assert worker.announce_ready(ready(1)) == [ready(1)]
    assert worker.turn(1) == "later"
    worker.heard(instructions.SendPushNow(1, 1))
    assert worker.turn(1) == "now"
    worker.heard(granted(2))
    assert worker.take_grant().iteration == 2


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_the_phase_does_not_allow_raises(step: str, phase: Phase) -> None:
    worker = WorkerState()
    worker.phase = phase
    allowed, following = STEPS[step]
    if phase in allowed:
        worker._step(step)
        assert worker.phase is following
    else:
        with pytest.raises(RuntimeError, match=f"in phase {phase.name} cannot {step}"):
            worker._step(step)


# A server that was blocked for seconds


def test_a_worker_that_waits_for_its_turn_receives_the_next_grant() -> None:
    """The server wakes up, sends the Turn and its cancellation on a dead connection, and grants the next iteration.

    On the new connection it repeats only the last Grant. A worker that dropped this Grant would wait forever.
    """
    worker = computing()
    worker.announce_ready(ready(1))
    assert worker.turn(1) == "later"
    worker.reconnected()
    worker.heard(granted(2))
    assert worker.turn(1) == "never"
    assert worker.take_grant().iteration == 2


def test_a_worker_that_waits_for_its_turn_receives_the_cancellation() -> None:
    worker = computing()
    worker.announce_ready(ready(1))
    worker.reconnected()
    worker.heard(granted(1))
    worker.heard(instructions.SendCancel(1, 1))
    assert worker.turn(1) == "never"
    assert not worker.is_granted


def test_a_turn_does_not_revive_an_iteration_that_is_over() -> None:
    worker = computing()
    worker.announce_ready(ready(1))
    worker.heard(granted(2))
    worker.heard(instructions.SendPushNow(1, 1))
    assert worker.turn(1) == "never"


def test_a_repeated_grant_changes_nothing() -> None:
    worker = computing(2)
    worker.heard(granted(1))
    worker.heard(granted(2))
    assert not worker.is_granted
    assert worker.newest.iteration == 2


# Repeated messages


def test_messages_without_an_answer_are_repeated_in_order() -> None:
    worker = computing()
    request = events.SamplesRequested(1, 1, 2, 8, 1)
    worker.request(request)
    worker.announce_ready(ready(1))
    assert worker.reconnected() == [request, ready(1)]
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
    assert worker.leave_confirmed
    assert worker.reconnected() == []


def test_an_announcement_is_repeated_until_its_turn() -> None:
    worker = computing()
    begun = events.GradientBegun(1, 1, 0, 4)
    worker.announce(begun)
    assert worker.reconnected() == [begun]
    worker.heard(instructions.SendPushNow(1, 1))
    assert worker.reconnected() == []


def test_the_gradient_of_a_cancelled_iteration_is_announced_until_a_later_message_is_answered() -> None:
    """The job does not answer this announcement. If it were lost, no worker would train on its samples."""
    worker = computing()
    worker.heard(instructions.SendCancel(1, 1))
    worker.announce_ready(ready(1, 7))
    assert worker.reconnected() == [ready(1, 7)]
    worker.beat(events.WorkerAlive(1))
    worker.reconnected()
    worker.heard(instructions.SendHeartbeat(1))
    assert worker.reconnected() == [ready(1, 7)], (
        "that heartbeat was sent on the old connection, before the announcement"
    )
    worker.beat(events.WorkerAlive(1))
    worker.heard(instructions.SendHeartbeat(1))
    assert worker.reconnected() == []


def test_samples_are_taken_once_and_by_the_number_of_their_request() -> None:
    worker = computing()
    worker.request(events.SamplesRequested(1, 1, 2, 8, 1))
    worker.request(events.SamplesRequested(1, 2, 2, 8, 1))
    worker.heard(instructions.SendSamples(1, 2, 0, 2, 4))
    assert worker.take_samples(1) is None
    assert worker.take_samples(2) == instructions.SendSamples(1, 2, 0, 2, 4)
    assert worker.take_samples(2) is None
    worker.heard(instructions.SendSamples(1, 2, 0, 2, 4))
    assert worker.take_samples(2) is None, "the answer was repeated"


def test_an_exclusion_holds_until_the_next_grant() -> None:
    worker = computing()
    worker.heard(instructions.SendExcluded(1, "its updates differ"))
    assert worker.exclusion == "its updates differ"
    worker.heard(granted(2))
    assert worker.exclusion == ""


def test_a_worker_hears_that_it_must_send_the_initial_weights() -> None:
    worker = WorkerState()
    assert not worker.must_send_weights
    worker.heard(instructions.SendWeightsRequest(1))
    assert worker.must_send_weights
