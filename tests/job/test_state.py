"""Iterations, samples and the end of a job: the answer of a JobState to each event."""

from __future__ import annotations

from typing import Any

import pytest

from job.conversation import Conversation, Obedient, kinds, only
from paceline.job import Identity, events, instructions
from paceline.job.membership import Stage

LEASE = 30.0


# Iterations


def test_an_update_counts_when_its_gradient_is_announced_and_all_shards_have_received_it() -> None:
    talk = Conversation("asp", shards=2)
    talk.begin(1)
    assert not only(instructions.OrderApply, talk.arrive(0, 1, 0))
    assert not only(instructions.OrderApply, talk.ready(0, 1))
    (apply,) = only(instructions.OrderApply, talk.arrive(0, 1, 1))
    assert apply.version == 1


def test_the_update_that_a_worker_announced_is_the_one_that_the_shards_apply() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    talk.ready(0, 1)
    announced = talk.state.roster.training[0].update
    (apply,) = only(instructions.OrderApply, talk.arrive(0, 1))
    assert apply.decision.updates[0] is announced
    assert talk.state.roster.training[0].update is None


def test_a_repeated_event_counts_once() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    talk.ready(0, 1)
    assert talk.ready(0, 1) == []
    assert only(instructions.OrderApply, talk.arrive(0, 1))
    assert talk.ready(0, 1) == []
    assert kinds(talk.arrive(0, 1)) == ["OrderDrop"], "the shard received it again"
    assert talk.state.version == 1


def test_without_shards_an_update_counts_when_its_gradient_is_computed() -> None:
    talk = Conversation("asp", shards=0)
    talk.begin(1)
    assert kinds(talk.ready(0, 1)) == ["OrderApply", "SendGrant"]


def test_an_update_of_a_worker_that_left_is_dropped() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    talk.tell(events.WorkerLeft(talk.connections[0]))
    assert talk.arrive(0, 1) == [instructions.OrderDrop(Identity(0, 1, 1), 0)]


def test_an_update_of_a_cancelled_iteration_is_dropped_at_the_shard_that_has_it() -> None:
    talk = Conversation(Obedient(), shards=2)
    talk.begin(1)
    talk.arrive(0, 1, 1)
    out = talk.tell(events.MetricReported(talk.connections[0], "cancel", 0.0))
    assert out == [instructions.SendCancel(talk.connections[0], 1), instructions.OrderDrop(Identity(0, 1, 1), 1)]
    assert talk.arrive(0, 1, 0) == [instructions.OrderDrop(Identity(0, 1, 1), 0)]


@pytest.mark.parametrize(
    "wrong",
    [
        events.GradientComputed(1, 2, 0, 1, 0.1),
        events.GradientComputed(1, 0, 0, 1, 0.1),
        events.GradientComputed(1, 1, 0, 0, 0.1),
        events.GradientComputed(1, 1, 1, 1, 0.1),
        events.GradientComputed(1, 1, -1, 1, 0.1),
        events.GradientComputed(1, 1, 0, 1, -1.0),
        events.GradientComputed(1, 1, 0, 1, float("nan")),
        events.GradientBegun(1, 2, 0, 1),
        events.GradientBegun(1, 1, 1, 1),
        events.GradientBegun(1, 1, 0, 1 << 41),
        events.SamplesRequested(1, 1, 0, 8, 1),
        events.SamplesRequested(1, 1, 1, 0, 1),
        events.SamplesRequested(1, 1, 1, 8, -1),
        events.SamplesRequested(1, 1, 1, 8, 1, -1),
        events.WorkerMisbehaved(1),
    ],
    ids=str,
)
def test_a_worker_that_breaks_the_protocol_is_removed(wrong: events.Event) -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    out = talk.tell(wrong)
    assert instructions.OrderFence(0, 2) in out
    assert 0 not in talk.state.roster.training
    assert isinstance(wrong, events.WorkerMisbehaved) or [
        refused.to for refused in only(instructions.SendRefused, out)
    ] == [1]
    assert only(instructions.OrderApply, talk.push(1, 1)), "the other worker continues"


def test_a_worker_that_pushes_an_iteration_that_was_not_granted_is_refused() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    out = talk.arrive(0, 3)
    assert instructions.OrderDrop(Identity(0, 1, 3), 0) in out
    assert only(instructions.SendRefused, out)[0].to == talk.connections[0]


# Samples


def test_a_repeated_request_gets_the_same_samples() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    first = talk.request(0, 1)
    assert first == [instructions.SendSamples(talk.connections[0], 1, 0, 0, 2)]
    talk.resume(0)
    assert talk.request(0, 1) == [instructions.SendSamples(talk.connections[0], 1, 0, 0, 2)]
    assert talk.request(0, 2) == [instructions.SendSamples(talk.connections[0], 2, 0, 2, 4)]


def test_the_samples_of_a_worker_that_leaves_are_handed_out_again_except_those_of_an_arrived_update() -> None:
    talk = Conversation("bsp", workers=2)
    talk.begin(2)
    for number in (1, 2):
        talk.request(0, number)
    talk.push(0, 1, 1)
    talk.tell(events.WorkerLeft(talk.connections[0]))
    given = [only(instructions.SendSamples, talk.request(1, number))[0] for number in range(1, 5)]
    assert [(each.start, each.stop) for each in given] == [(2, 4), (4, 6), (6, 8), (0, 0)]


def test_the_samples_of_a_cancelled_iteration_are_handed_out_again_once_its_worker_names_them() -> None:
    talk = Conversation(Obedient())
    talk.begin(1)
    talk.request(0, 1, count=8)
    talk.tell(events.MetricReported(talk.connections[0], "cancel", 0.0))
    assert only(instructions.SendSamples, talk.request(0, 2))[0].stop == 0, "the worker still holds them"
    talk.ready(0, 1, 1)
    assert only(instructions.SendSamples, talk.request(0, 3))[0].stop == 2


def test_all_workers_must_train_on_data_of_the_same_size() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    talk.request(0, 1, size=8)
    assert "same data" in only(instructions.SendRefused, talk.request(1, 1, size=9))[0].reason


# The end


def test_the_job_is_done_when_all_workers_have_left() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    assert talk.tell(events.WorkerLeft(talk.connections[0]))[0] == instructions.SendLeave(talk.connections[0])
    assert kinds(talk.tell(events.WorkerLeft(talk.connections[1])))[-1] == "JobDone"


def test_a_worker_that_has_finished_waits_for_the_others_even_if_they_were_given_up() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    assert not only(instructions.SendFinished, talk.tell(events.WorkerFinished(talk.connections[0])))
    talk.heartbeat(0, 20.0)
    assert not only(instructions.SendFinished, talk.tick(LEASE)), "worker 1 may come back"
    assert talk.state.roster.training == {}
    for at in range(31, 90):
        talk.heartbeat(0, float(at))
        assert not only(instructions.SendFinished, talk.tick(float(at)))
    talk.heartbeat(0, 90.0)
    assert only(instructions.SendFinished, talk.tick(LEASE + 60.0)) == [
        instructions.SendFinished(talk.connections[0], 0)
    ]


def test_the_training_is_over_when_every_sample_is_done() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    talk.request(0, 1, count=8)
    talk.push(0, 1, 1)
    out = talk.tell(events.WorkerFinished(talk.connections[0]))
    assert only(instructions.SendFinished, out) == [instructions.SendFinished(talk.connections[0], 1)]


def test_the_last_model_has_the_rests_of_all_workers() -> None:
    """Every sample is done, and worker 1 still pushes what it has not sent yet."""
    talk = Conversation("asp", workers=2, sends_rest=True)
    talk.begin(2)
    talk.request(0, 1, count=8)
    talk.push(0, 1, 1)
    assert not only(instructions.SendFinished, talk.tell(events.WorkerFinished(talk.connections[0])))
    talk.push(1, 1)
    assert only(instructions.SendFinished, talk.tell(events.WorkerFinished(talk.connections[1]))) == [
        instructions.SendFinished(talk.connections[worker], 2) for worker in (0, 1)
    ]


def test_the_last_model_does_not_wait_for_a_worker_that_is_lost() -> None:
    talk = Conversation("asp", workers=2, sends_rest=True)
    talk.begin(2)
    talk.request(0, 1, count=8)
    talk.push(0, 1, 1)
    talk.tell(events.WorkerFinished(talk.connections[0]))
    talk.heartbeat(0, 20.0)
    assert only(instructions.SendFinished, talk.tick(LEASE)) == [instructions.SendFinished(talk.connections[0], 1)]


def test_a_decision_that_is_impossible_at_this_stage_raises() -> None:
    talk = Conversation(Obedient())
    talk.begin(1)
    talk.tell(events.MetricReported(talk.connections[0], "cancel", 0.0))
    with pytest.raises(RuntimeError, match="stage CANCELLED, which allows no CANCEL"):
        talk.tell(events.MetricReported(talk.connections[0], "cancel", 0.0))


def test_a_new_watcher_receives_the_stage_of_every_member() -> None:
    from paceline.observe.observer import Recorder
    from paceline.observe.trace import Computed, Granted, Joined, Pulled, Turned

    talk = Conversation("r2sp", workers=3, streams=True)
    talk.begin(3)
    talk.ready(0, 1)
    assert talk.state.roster.training[0].stage is Stage.TURNED
    trace: list[object] = []
    talk.state.introduce(Recorder(trace.append))
    assert trace[:5] == [
        Joined(0.0, 0, 1),
        Granted(0.0, 0, None, 0),
        Pulled(0.0, 0, 0),
        Computed(0.0, 0, None),
        Turned(0.0, 0),
    ]
    assert [type(each).__name__ for each in trace[5:]] == ["Joined", "Joined"], "the others wait for a Grant"


def heard_of_held(talk: Conversation) -> list[int]:
    """Record the workers whose updates the policy is told to be held."""
    heard: list[int] = []
    measured = talk.state.ledger.policy.measured

    def listen(kind: str, subject: object, value: float, now: float) -> Any:
        if kind == "held":
            assert isinstance(subject, int)
            heard.append(subject)
        return measured(kind, subject, value, now)

    talk.state.ledger.policy.measured = listen  # type: ignore[method-assign]
    return heard


def test_the_policy_is_told_of_an_update_that_all_shards_have_and_one_holds() -> None:
    talk = Conversation("r2sp:groups=2", workers=1, streams=True, shards=3)
    talk.begin(1)
    heard = heard_of_held(talk)
    talk.ready(0, 1)
    talk.tell(events.UpdateHeldBack(0, 0, 1, 1))
    talk.arrive(0, 1, 1)  # the second shard has applied its part
    talk.tell(events.UpdateHeldBack(0, 0, 1, 1))  # said again
    assert heard == []
    talk.tell(events.UpdateHeldBack(2, 0, 1, 1))
    assert heard == [0]


@pytest.mark.parametrize(
    "held",
    [
        events.UpdateHeldBack(0, 0, 1, 2),
        events.UpdateHeldBack(0, 0, 2, 1),
        events.UpdateHeldBack(0, 7, 1, 1),
    ],
    ids=["another iteration", "another incarnation", "no member"],
)
def test_a_held_update_that_is_not_expected_is_ignored(held: events.UpdateHeldBack) -> None:
    talk = Conversation("r2sp:groups=2", workers=1, streams=True)
    talk.begin(1)
    heard = heard_of_held(talk)
    talk.ready(0, 1)
    assert talk.tell(held) == []
    assert heard == []
    talk.arrive(0, 1)
    talk.tell(events.UpdateHeldBack(0, 0, 1, 1))  # too late
    assert heard == []


def test_the_job_waits_for_a_worker_whose_machine_is_taken_away() -> None:
    talk = Conversation("asp", absence=300.0)
    talk.begin(1)
    assert kinds(talk.tell(events.WorkerLeft(talk.connections[0], returns=True)))[-1] != "JobDone"
    assert talk.state.roster.awaited == {0}
    assert not only(instructions.JobDone, talk.tick(299.0))
    assert only(instructions.JobDone, talk.tick(300.0))


def test_an_update_that_arrived_before_its_worker_left_counts_in_the_round() -> None:
    talk = Conversation("bsp", workers=2)
    talk.begin(2)
    talk.push(0, 1)
    talk.tell(events.WorkerLeft(talk.connections[0], returns=True))
    applied = only(instructions.OrderApply, talk.push(1, 1))
    assert [each.worker for each in applied[0].decision.updates] == [0, 1]


def test_when_the_work_is_done_the_job_does_not_wait_long_for_a_worker_that_is_away() -> None:
    talk = Conversation("asp", workers=2, absence=3600.0)
    talk.begin(2)
    talk.tell(events.WorkerLeft(talk.connections[1], returns=True))
    talk.request(0, 1, count=8)
    talk.push(0, 1, 1)
    talk.tell(events.WorkerFinished(talk.connections[0]))
    talk.tell(events.WorkerLeft(talk.connections[0]))
    assert not only(instructions.JobDone, talk.tick(59.0))
    assert only(instructions.JobDone, talk.tick(60.0))
