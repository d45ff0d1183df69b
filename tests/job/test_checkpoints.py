"""When a checkpoint is taken, which orders wait for it, and how a restored job continues."""

from __future__ import annotations

import json

import pytest

from job.conversation import Conversation, kinds, only
from paceline.job import events, instructions
from paceline.job.checkpoints import RETRY
from paceline.observe.observer import Recorder
from paceline.observe.trace import Described, Event, Saved


def write_parts(talk: Conversation, version: int, error: str = "") -> list[instructions.Instruction]:
    """Have all shards write their parts. Return the answer to the last event."""
    out: list[instructions.Instruction] = []
    for shard in talk.shards:
        out = talk.tell(events.ShardSaved(shard, version, error))
    return out


def store(talk: Conversation, version: int) -> None:
    """Have all shards write their parts, and the driver store the whole checkpoint."""
    assert write_parts(talk, version) == [instructions.StoreCheckpoint(version)]
    talk.tell(events.CheckpointStored(version))


def test_the_first_checkpoint_is_of_the_initial_weights_and_then_one_follows_every_two_versions() -> None:
    talk = Conversation("asp", save=2, shards=2)
    (first,) = only(instructions.OrderSave, talk.begin(1))
    assert first.version == 0
    assert write_parts(talk, 0) == [instructions.StoreCheckpoint(0)]
    assert talk.state.is_saving
    talk.tell(events.CheckpointStored(0))
    assert not talk.state.is_saving
    assert not only(instructions.OrderSave, talk.push(0, 1))
    (second,) = only(instructions.OrderSave, talk.push(0, 2, version=1))
    assert second.version == 2


def test_one_checkpoint_is_written_at_a_time() -> None:
    talk = Conversation("asp", save=1)
    talk.begin(1)
    assert not only(instructions.OrderSave, talk.push(0, 1)), "the first checkpoint is still being written"
    store(talk, 0)
    assert [save.version for save in only(instructions.OrderSave, talk.push(0, 2, version=1))] == [2]


def test_a_checkpoint_is_reported_when_all_of_it_is_written() -> None:
    talk = Conversation("asp", save=1, shards=2)
    talk.begin(1)
    write_parts(talk, 0)
    assert not [event for event in talk.trace if isinstance(event, Saved)], "the driver has not stored it yet"
    talk.tell(events.CheckpointStored(0), at=3.0)
    talk.push(0, 1)
    write_parts(talk, 1, "no space left on device")
    assert [event for event in talk.trace if isinstance(event, Saved)] == [Saved(3.0, 0, seconds=3.0)]


@pytest.mark.parametrize("restored", [False, True])
def test_the_model_is_reported_once_it_is_known(restored: bool) -> None:
    """A restored job knows it before the driver has reported that the run began."""
    first = Conversation("asp", save=1)
    talk = Conversation("asp", restored=first.state.snapshot() if restored else None)
    talk.tell(events.ModelDescribed(0.9, None, 1000, "SGD(lr=0.1)"))
    known = [Described(0.0, 1000, "SGD(lr=0.1)")]
    assert talk.trace == ([] if restored else known)
    present: list[Event] = []
    talk.state.introduce(Recorder(present.append))
    assert [event for event in present if isinstance(event, Described)] == known


def test_a_save_comes_after_its_applies_in_the_order_log() -> None:
    talk = Conversation("asp", save=1)
    talk.begin(1)
    store(talk, 0)
    names = kinds(talk.push(0, 1))
    assert names.index("OrderApply") < names.index("OrderSave")


def test_with_streaming_a_checkpoint_waits_for_updates_under_way_and_new_updates_wait_for_it() -> None:
    talk = Conversation("r2sp", workers=2, streams=True, save=1)
    talk.begin(2)
    store(talk, 0)
    talk.push(0, 1)  # worker 0 is alone in the ring, so this makes version 1 and a checkpoint of it
    store(talk, 1)
    talk.ready(1, 1, version=1)
    assert only(instructions.OrderStream, talk.ready(0, 2, version=1)), "both updates are under way"
    assert not only(instructions.OrderSave, talk.arrive(0, 2)), "the update of worker 1 is partly applied"
    assert kinds(talk.ready(0, 3, version=2)) == [], "its turn is postponed"
    out = talk.arrive(1, 1)
    names = kinds(out)
    assert [save.version for save in only(instructions.OrderSave, out)] == [3]
    assert names.index("OrderSave") < names.index("OrderStream")
    assert only(instructions.SendPushNow, out)[0].to == talk.connections[0]


def test_a_checkpoint_does_not_wait_for_the_update_of_a_worker_that_left() -> None:
    talk = Conversation("r2sp", workers=2, streams=True, save=1)
    talk.begin(2)
    store(talk, 0)
    talk.push(0, 1)
    store(talk, 1)
    talk.ready(1, 1, version=1)
    talk.ready(0, 2, version=1)
    talk.arrive(0, 2)
    out = talk.tell(events.WorkerLeft(talk.connections[1]))
    names = kinds(out)
    assert names.index("OrderDrop") < names.index("OrderSave")


def test_a_checkpoint_can_be_requested() -> None:
    talk = Conversation("asp", save=1000)
    talk.begin(1)
    store(talk, 0)
    assert talk.tell(events.SaveRequested()) == [], "nothing has changed"
    talk.push(0, 1)
    assert [save.version for save in only(instructions.OrderSave, talk.tell(events.SaveRequested()))] == [1]


@pytest.mark.parametrize("by", ["shard", "server"])
def test_a_failed_checkpoint_is_removed_and_another_is_tried_later(by: str) -> None:
    talk = Conversation("asp", save=1)
    talk.begin(1)
    store(talk, 0)
    talk.push(0, 1)
    if by == "shard":
        out = write_parts(talk, 1, error="the disk is full")
    else:
        write_parts(talk, 1)
        out = talk.tell(events.CheckpointStored(1, error="the disk is full"))
    assert out == [instructions.ForgetCheckpoint(1)]
    assert not only(instructions.OrderSave, talk.push(0, 2, version=1)), "the next attempt comes later"
    talk.now += RETRY
    assert [save.version for save in only(instructions.OrderSave, talk.push(0, 3, version=2))] == [3]


def test_a_spoiled_model_is_not_saved_and_the_log_says_what_to_do() -> None:
    talk = Conversation("asp", save=1)
    talk.begin(1)
    store(talk, 0)
    talk.push(0, 1)
    assert talk.tell(events.ShardSaved(0, 1, "the model holds a NaN in 0/weights", is_spoiled=True)) == [
        instructions.ForgetCheckpoint(1)
    ]
    (line,) = only(instructions.LogLine, talk.unfiltered)
    assert "Version 1 is not saved: the model holds a NaN" in line.text
    assert "Lower the learning rate" in line.text
    checkpoints = talk.state.checkpoints
    assert checkpoints is not None
    assert checkpoints.is_spoiled
    talk.now += RETRY
    talk.push(0, 2, version=1)
    store(talk, 2)
    assert not checkpoints.is_spoiled


def test_a_failed_checkpoint_is_logged_once_for_each_reason_and_so_is_its_end() -> None:
    talk = Conversation("asp", save=1)
    talk.begin(1)
    store(talk, 0)
    logged: list[str] = []
    for version, error in ((1, "the disk is full"), (2, "the disk is full"), (3, "it is read-only"), (4, ""), (5, "")):
        talk.push(0, version, version=version - 1)
        talk.tell(events.ShardSaved(0, version, error))
        out = [] if error else talk.state.handle(events.CheckpointStored(version), talk.now)
        logged += [line.text for line in only(instructions.LogLine, talk.unfiltered + out) if line.warns]
        talk.now += RETRY
    assert logged == [
        "The checkpoint of version 1 could not be written: the disk is full. The next attempt is in 10 s; free space, "
        "or repair the folder.",
        "The checkpoint of version 3 could not be written: it is read-only. The next attempt is in 10 s; free space, "
        "or repair the folder.",
        "The checkpoint of version 4 was written; checkpoints work again.",
    ]


def with_two_workers(save: int = 1) -> Conversation:
    """A job with two workers that hold their first samples, and a stored checkpoint of version 0."""
    talk = Conversation("asp", workers=2, save=save)
    talk.begin(2)
    store(talk, 0)
    talk.request(0, 1)
    talk.request(1, 1)
    return talk


def restored(snapshot: object, **more: object) -> Conversation:
    """A new generation that starts from the snapshot, after a round trip through JSON."""
    return Conversation("asp", workers=2, restored=json.loads(json.dumps(snapshot)), **more)  # type: ignore[arg-type]


def test_a_restored_job_continues_at_its_version_with_the_samples_that_were_not_done() -> None:
    talk = with_two_workers()
    (save,) = only(instructions.OrderSave, talk.push(0, 1, 1))
    again = restored(save.snapshot)
    assert again.state.version == 1
    assert again.tell(events.ShardLoaded(0)) == []
    assert again.join(1)[0] == instructions.SendWelcome(1, 1, 2), "a new incarnation"
    given = [only(instructions.SendSamples, again.request(1, number))[0] for number in (1, 2, 3, 4)]
    assert [(each.start, each.stop) for each in given] == [(2, 4), (4, 6), (6, 8), (0, 0)]
    (apply,) = only(instructions.OrderApply, again.push(1, 1, 1, 2, 3, version=1))
    assert apply.version == 2
    assert again.state.samples is not None
    assert again.state.samples.all_done


def test_a_restored_job_continues_with_one_worker() -> None:
    talk = with_two_workers()
    (save,) = only(instructions.OrderSave, talk.push(0, 1, 1))
    again = restored(save.snapshot)
    again.tell(events.ShardLoaded(0))
    assert kinds(again.join(0)) == ["SendWelcome", "SendGrant"]


def test_no_incarnation_is_used_twice_even_if_the_checkpoint_is_older() -> None:
    talk = with_two_workers()
    (save,) = only(instructions.OrderSave, talk.push(0, 1, 1))
    talk.hang_up(0)
    talk.join(0)
    again = restored(save.snapshot, incarnations=talk.state.incarnations)
    again.tell(events.ShardLoaded(0))
    assert instructions.SendWelcome(1, 0, 3) in again.join(0)


def test_a_restored_job_waits_for_the_workers_that_had_not_left() -> None:
    talk = with_two_workers()
    (save,) = only(instructions.OrderSave, talk.push(0, 1, 1))
    again = restored(save.snapshot, awaited=frozenset({0, 1}))
    again.tell(events.ShardLoaded(0))
    again.join(0)
    assert not only(instructions.SendFinished, again.tell(events.WorkerFinished(again.connections[0])))
    again.join(1)
    again.request(1, 1, count=8)
    again.tell(events.WorkerFinished(again.connections[1]))
    assert again.state.roster.training == {}
    assert all(member.final_version >= 0 for member in again.state.roster.finishing.values())


def test_a_restored_job_waits_one_lease_for_workers_that_it_does_not_know() -> None:
    talk = with_two_workers()
    (save,) = only(instructions.OrderSave, talk.push(0, 1, 1))
    again = restored(save.snapshot)
    again.tell(events.ShardLoaded(0))
    again.join(0)
    assert not only(instructions.SendFinished, again.tell(events.WorkerFinished(again.connections[0])))
    again.heartbeat(0, 20.0)
    assert not only(instructions.SendFinished, again.tick(29.0))
    assert only(instructions.SendFinished, again.tick(30.0))


def test_another_policy_ignores_the_saved_memory() -> None:
    talk = with_two_workers()
    (save,) = only(instructions.OrderSave, talk.push(0, 1, 1))
    other = Conversation("bsp", workers=2, restored=json.loads(json.dumps(save.snapshot)))
    assert other.state.version == 1


def test_a_checkpoint_whose_policy_did_not_name_its_weights_keeps_its_memory() -> None:
    blacklist = {"blacklist": {"1": [0.1, 0.2, 0.1, 0.0, 0.1]}}
    talk = Conversation("filtered:policy=asp", workers=2)
    snapshot = json.loads(json.dumps(talk.state.snapshot() | {"memory": blacklist}))
    for policy, recalled in (
        ("filtered:policy=asp", True),
        ("filtered:policy=(asp:weights=mean)", True),
        ("filtered:policy=(asp:weights=sum)", False),
        ("filtered:policy=(ssp:weights=mean)", False),
    ):
        again = Conversation(policy, workers=2, restored=snapshot)
        assert (again.state.ledger.policy.memory() == blacklist) is recalled
