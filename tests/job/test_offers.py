"""Weights that a worker loads after it has pulled: which of them the job takes, and how it begins again."""

from __future__ import annotations

from typing import Any

from job.conversation import Conversation, kinds, only
from paceline.job import events, instructions

LEASE = 30.0


def offer(talk: Conversation, worker: int, replace: bool = False) -> list[instructions.Instruction]:
    return talk.tell(events.WeightsOffered(talk.connections[worker], replace))


def begun_again(snapshot: Any, provider: int, awaited: set[int], **more: Any) -> Conversation:
    """Return the job that begins again after `BeginAgain`."""
    return Conversation("bsp", restored=snapshot, provider=provider, awaited=frozenset(awaited), **more)


def test_the_job_begins_again_with_the_weights_of_the_main_worker() -> None:
    talk = Conversation("bsp", workers=2)
    talk.begin(2)
    (again,) = offer(talk, 0)
    assert isinstance(again, instructions.BeginAgain) and again.provider == 0
    assert again.snapshot["version"] == 0


def test_another_worker_waits_for_the_main_worker() -> None:
    talk = Conversation("bsp", workers=2)
    talk.begin(2)
    assert offer(talk, 1) == []
    assert kinds(offer(talk, 0)) == ["BeginAgain"]


def test_if_the_main_worker_trains_the_others_take_its_weights() -> None:
    talk = Conversation("bsp", workers=2)
    talk.begin(2)
    assert offer(talk, 1) == []
    out = talk.tell(events.GradientComputed(talk.connections[0], 1, 0, 8, 0.1))
    assert only(instructions.SendWeightsKept, out) == [instructions.SendWeightsKept(talk.connections[1], 0)]
    assert only(instructions.SendWeightsKept, offer(talk, 1)), "the answer was lost, so the worker asks again"


def test_if_the_main_worker_leaves_the_next_one_counts() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    assert offer(talk, 1) == []
    out = talk.tell(events.WorkerLeft(talk.connections[0]))
    assert [again.provider for again in only(instructions.BeginAgain, out)] == [1]


def test_a_worker_does_not_wait_longer_than_its_lease() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    offer(talk, 1)
    talk.now = LEASE / 2
    talk.tell(events.WorkerAlive(talk.connections[0]))
    talk.tell(events.WorkerAlive(talk.connections[1]))
    out = talk.tell(events.WorkerAlive(talk.connections[1]), at=LEASE + 1)
    assert only(instructions.SendWeightsKept, out) == [instructions.SendWeightsKept(talk.connections[1], 0)]


def test_after_its_first_update_the_main_worker_must_ask_to_replace_the_model() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    talk.push(0, 1)
    assert kinds(offer(talk, 0)) == ["SendWeightsKept"]
    assert kinds(offer(talk, 1, replace=True)) == ["SendWeightsKept"], "only the main worker may replace it"
    assert kinds(offer(talk, 0, replace=True)) == ["BeginAgain"]


def test_a_worker_0_that_comes_later_does_not_replace_the_model() -> None:
    talk = Conversation("asp", workers=1)
    talk.join(1)
    talk.tell(events.ShardInitialized(0, 1, 1))
    talk.push(1, 1)
    talk.join(0)
    assert kinds(offer(talk, 0)) == ["SendWeightsKept"]


def test_samples_that_were_trained_on_before_the_first_load_are_not_done() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    talk.request(1, 1)
    talk.push(1, 1, 1)
    assert talk.state.samples is not None and talk.state.samples.trained == 2
    (again,) = only(instructions.BeginAgain, offer(talk, 0))
    assert again.snapshot["samples"] is None and again.snapshot["version"] == 1


def test_the_new_generation_asks_the_provider_alone_and_waits_for_all_workers() -> None:
    talk = Conversation("bsp", workers=2)
    talk.begin(2)
    (again,) = only(instructions.BeginAgain, offer(talk, 0))
    after = begun_again(again.snapshot, 0, {0, 1})
    assert kinds(after.join(1)) == ["SendWelcome"]
    assert only(instructions.SendWeightsRequest, after.join(0)) == [
        instructions.SendWeightsRequest(after.connections[0])
    ]
    out = after.tell(events.ShardInitialized(0, 0, after.incarnations[0]))
    assert kinds(out) == ["SendGrant", "SendGrant"]


def test_the_new_generation_goes_on_without_a_worker_that_does_not_return() -> None:
    talk = Conversation("bsp", workers=2)
    talk.begin(2)
    (again,) = only(instructions.BeginAgain, offer(talk, 0))
    after = begun_again(again.snapshot, 0, {0, 1})
    after.join(0)
    assert after.tell(events.ShardInitialized(0, 0, after.incarnations[0])) == []
    granted: list[Any] = []
    for second in range(1, 70):
        after.tell(events.ShardAlive(0), at=float(second))
        after.tell(events.WorkerAlive(after.connections[0]))
        granted += only(instructions.SendGrant, after.tell(events.TimePassed(float(second))))
    assert len(granted) == 1


def test_loaded_weights_that_are_lost_with_their_worker_fail_the_generation() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    talk.push(0, 1)
    (again,) = only(instructions.BeginAgain, offer(talk, 0, replace=True))
    after = begun_again(again.snapshot, 0, {0, 1})
    after.join(1)
    after.join(0)
    out = after.tell(events.WorkerLeft(after.connections[0]))
    assert [fail.reason for fail in only(instructions.FailGeneration, out)] == [
        "Worker 0 left before it had provided the weights that it loaded."
    ]


def test_a_job_that_begins_again_saves_its_new_weights_at_once() -> None:
    talk = Conversation("asp", save=1000)
    talk.begin(1)
    talk.push(0, 1)
    (again,) = only(instructions.BeginAgain, offer(talk, 0, replace=True))
    after = begun_again(again.snapshot, 0, {0}, save=1000)
    after.join(0)
    out = after.tell(events.ShardInitialized(0, 0, after.incarnations[0]))
    assert [save.version for save in only(instructions.OrderSave, out)] == [1]
