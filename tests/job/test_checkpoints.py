"""Checkpoints as lists of events: their moments, the orders that wait for them, and the job after a restart."""

from __future__ import annotations

import json

import pytest

from job.talk import Talk, kinds, of
from paceline.job import events, instructions
from paceline.job.checkpoints import RETRY


def saved(talk: Talk, version: int, error: str = "") -> list[instructions.Instruction]:
    """All shards have written their parts."""
    out: list[instructions.Instruction] = []
    for shard in talk.shards:
        out = talk.tell(events.ShardSaved(shard, version, error))
    return out


def stored(talk: Talk, version: int) -> None:
    """All shards have written, and the whole is on the disk."""
    assert saved(talk, version) == [instructions.StoreCheckpoint(version)]
    talk.tell(events.CheckpointStored(version))


def test_there_is_one_before_anything_has_changed_and_then_one_every_so_many_versions() -> None:
    talk = Talk("asp", save=2, shards=2)
    (first,) = of(instructions.OrderSave, talk.begin(1))
    assert first.version == 0
    assert saved(talk, 0) == [instructions.StoreCheckpoint(0)]
    assert talk.state.is_saving
    talk.tell(events.CheckpointStored(0))
    assert not talk.state.is_saving
    assert not of(instructions.OrderSave, talk.push(0, 1))
    (second,) = of(instructions.OrderSave, talk.push(0, 2, version=1))
    assert second.version == 2


def test_one_at_a_time() -> None:
    talk = Talk("asp", save=1)
    talk.begin(1)
    assert not of(instructions.OrderSave, talk.push(0, 1)), "the first is not written yet"
    stored(talk, 0)
    assert [save.version for save in of(instructions.OrderSave, talk.push(0, 2, version=1))] == [2]


def test_a_save_stands_in_the_order_log_behind_what_it_holds() -> None:
    talk = Talk("asp", save=1)
    talk.begin(1)
    stored(talk, 0)
    names = kinds(talk.push(0, 1))
    assert names.index("OrderApply") < names.index("OrderSave")


def test_streamed_it_waits_for_updates_under_way_and_what_would_begin_waits_for_it() -> None:
    talk = Talk("r2sp", workers=2, streams=True, save=1)
    talk.begin(2)
    stored(talk, 0)
    talk.push(0, 1)  # alone in the ring, so there is a version 1, and a Save of it
    stored(talk, 1)
    talk.ready(1, 1, version=1)
    assert of(instructions.OrderStream, talk.ready(0, 2, version=1)), "0 and 1 are under way"
    assert not of(instructions.OrderSave, talk.arrive(0, 2)), "1 is half applied"
    assert kinds(talk.ready(0, 3, version=2)) == [], "its turn is put off"
    out = talk.arrive(1, 1)
    names = kinds(out)
    assert [save.version for save in of(instructions.OrderSave, out)] == [3]
    assert names.index("OrderSave") < names.index("OrderStream")
    assert of(instructions.SendPushNow, out)[0].to == talk.connections[0]


def test_an_update_that_will_never_be_whole_is_not_waited_for() -> None:
    talk = Talk("r2sp", workers=2, streams=True, save=1)
    talk.begin(2)
    stored(talk, 0)
    talk.push(0, 1)
    stored(talk, 1)
    talk.ready(1, 1, version=1)
    talk.ready(0, 2, version=1)
    talk.arrive(0, 2)
    out = talk.tell(events.WorkerLeft(talk.connections[1]))
    names = kinds(out)
    assert names.index("OrderDrop") < names.index("OrderSave")


def test_a_checkpoint_can_be_asked_for() -> None:
    talk = Talk("asp", save=1000)
    talk.begin(1)
    stored(talk, 0)
    assert talk.tell(events.SaveRequested()) == [], "nothing has changed"
    talk.push(0, 1)
    assert [save.version for save in of(instructions.OrderSave, talk.tell(events.SaveRequested()))] == [1]


@pytest.mark.parametrize("by", ["shard", "server"])
def test_one_that_cannot_be_written_is_forgotten_and_another_is_tried_later(by: str) -> None:
    talk = Talk("asp", save=1)
    talk.begin(1)
    stored(talk, 0)
    talk.push(0, 1)
    if by == "shard":
        out = saved(talk, 1, error="the disk is full")
    else:
        saved(talk, 1)
        out = talk.tell(events.CheckpointStored(1, error="the disk is full"))
    assert out == [instructions.ForgetCheckpoint(1)]
    assert not of(instructions.OrderSave, talk.push(0, 2, version=1)), "not at once"
    talk.now += RETRY
    assert [save.version for save in of(instructions.OrderSave, talk.push(0, 3, version=2))] == [3]


def trained(save: int = 1) -> Talk:
    """Two workers; worker 0's first samples are done, worker 1's are not. A Save of that is on its way."""
    talk = Talk("asp", workers=2, save=save)
    talk.begin(2)
    stored(talk, 0)
    talk.want(0, 1)
    talk.want(1, 1)
    return talk


def restored(talk: Talk, snapshot: object, **more: object) -> Talk:
    """A new generation that begins with the snapshot, which went through a file."""
    return Talk("asp", workers=2, restored=json.loads(json.dumps(snapshot)), **more)  # type: ignore[arg-type]


def test_a_restored_job_goes_on_at_its_version_with_the_samples_that_were_not_done() -> None:
    talk = trained()
    (save,) = of(instructions.OrderSave, talk.push(0, 1, 1))
    again = restored(talk, save.snapshot)
    assert again.state.version == 1
    assert again.tell(events.ShardLoaded(0)) == []
    assert again.join(1)[0] == instructions.SendWelcome(1, 1, 2), "another incarnation than before"
    given = [of(instructions.SendSamples, again.want(1, number))[0] for number in (1, 2, 3, 4)]
    assert [(each.start, each.stop) for each in given] == [(2, 4), (4, 6), (6, 8), (0, 0)]
    (apply,) = of(instructions.OrderApply, again.push(1, 1, 1, 2, 3, version=1))
    assert apply.version == 2
    assert again.state.samples is not None
    assert again.state.samples.all_done


def test_after_a_restoration_one_worker_is_enough_to_go_on() -> None:
    talk = trained()
    (save,) = of(instructions.OrderSave, talk.push(0, 1, 1))
    again = restored(talk, save.snapshot)
    again.tell(events.ShardLoaded(0))
    assert kinds(again.join(0)) == ["SendWelcome", "SendGrant"]


def test_no_incarnation_is_used_twice_even_if_the_checkpoint_is_older() -> None:
    talk = trained()
    (save,) = of(instructions.OrderSave, talk.push(0, 1, 1))
    talk.hang_up(0)
    talk.join(0)
    again = restored(talk, save.snapshot, incarnations=talk.state.incarnations)
    again.tell(events.ShardLoaded(0))
    assert instructions.SendWelcome(1, 0, 3) in again.join(0)


def test_a_restored_job_is_not_over_before_those_are_back_who_had_not_left() -> None:
    talk = trained()
    (save,) = of(instructions.OrderSave, talk.push(0, 1, 1))
    again = restored(talk, save.snapshot, awaited=frozenset({0, 1}))
    again.tell(events.ShardLoaded(0))
    again.join(0)
    assert not of(instructions.SendFinished, again.tell(events.WorkerFinished(again.connections[0])))
    again.join(1)
    again.want(1, 1, count=8)
    again.tell(events.WorkerFinished(again.connections[1]))
    assert again.state.roster.training == {}
    assert all(member.told_version >= 0 for member in again.state.roster.finishing.values())


def test_where_nobody_knows_who_may_come_they_are_waited_for_during_a_lease() -> None:
    talk = trained()
    (save,) = of(instructions.OrderSave, talk.push(0, 1, 1))
    again = restored(talk, save.snapshot)
    again.tell(events.ShardLoaded(0))
    again.join(0)
    assert not of(instructions.SendFinished, again.tell(events.WorkerFinished(again.connections[0])))
    again.beat(0, 20.0)
    assert not of(instructions.SendFinished, again.tick(29.0))
    assert of(instructions.SendFinished, again.tick(30.0))


def test_a_policy_remembers_only_what_is_its_own() -> None:
    talk = trained()
    (save,) = of(instructions.OrderSave, talk.push(0, 1, 1))
    other = Talk("bsp", workers=2, restored=json.loads(json.dumps(save.snapshot)))
    assert other.state.version == 1
