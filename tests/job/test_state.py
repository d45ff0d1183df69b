"""The job as a list of events: which workers take part, and what each is told."""

from __future__ import annotations

import pytest

from job.talk import Talk, kinds, of
from paceline.job import Identity, events, instructions
from paceline.job.membership import Stage
from paceline.policies.asp import ASP
from paceline.policies.contract import Cancel, Decisions, Grant, WorkerId

LEASE = 30.0


class Obedient(ASP):
    """Cancels and grants as it is told by what is measured."""

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        assert isinstance(subject, WorkerId)
        if kind == "grant":
            return [Grant(subject)]
        self.promised.pop(subject, None)
        return [Cancel(subject)]


# Joining


def test_the_job_begins_when_as_many_have_joined_as_were_wanted_and_one_has_given_the_weights() -> None:
    talk = Talk(workers=2, shards=2)
    assert talk.join(0) == [
        instructions.SendWelcome(1, 0, 1),
        instructions.OrderInitialWeights(0, 1),
        instructions.SendWeightsRequest(1),
    ]
    assert talk.tell(events.ShardInitialized(0, 0, 1)) == []
    assert talk.tell(events.ShardInitialized(1, 0, 1)) == [], "one more is wanted"
    out = talk.join(1)
    assert kinds(out) == ["SendWelcome", "SendGrant", "SendGrant"]
    assert [grant.iteration for grant in of(instructions.SendGrant, out)] == [1, 1]


def test_one_that_comes_later_is_admitted_at_once() -> None:
    talk = Talk("asp")
    talk.begin(1)
    assert kinds(talk.join(5)) == ["SendWelcome", "SendGrant"]


def test_a_worker_without_a_number_gets_the_first_that_is_free() -> None:
    talk = Talk("asp")
    talk.begin(2)
    assert talk.tell(events.WorkerJoined(9, None))[0] == instructions.SendWelcome(9, 2, 1)
    talk.hang_up(0)
    assert instructions.SendWelcome(10, 0, 2) in talk.tell(events.WorkerJoined(10, None)), "most likely its old self"


def test_if_the_giver_dies_another_gives_and_what_the_first_gave_does_not_count() -> None:
    talk = Talk("asp", workers=2, shards=2)
    talk.join(0)
    talk.join(1)
    talk.tell(events.ShardInitialized(0, 0, 1))
    out = talk.tell(events.WorkerLeft(talk.connections[0]))
    assert of(instructions.OrderInitialWeights, out) == [instructions.OrderInitialWeights(1, 1)]
    assert of(instructions.SendWeightsRequest, out) == [instructions.SendWeightsRequest(talk.connections[1])]
    talk.tell(events.ShardInitialized(0, 0, 1))
    talk.tell(events.ShardInitialized(1, 0, 1))
    assert not talk.state.has_begun, "of the one that has left"
    talk.tell(events.ShardInitialized(0, 1, 1))
    assert not talk.state.has_begun
    talk.tell(events.ShardInitialized(1, 1, 1))
    assert talk.state.has_begun


@pytest.mark.parametrize("number", [-1, 1 << 31])
def test_a_number_that_cannot_be_is_refused(number: int) -> None:
    (refused,) = Talk().tell(events.WorkerJoined(1, number))
    assert isinstance(refused, instructions.SendRefused)
    assert "number" in refused.reason


# A lost connection


def test_a_lost_connection_is_not_the_end_and_nothing_is_sent_into_it() -> None:
    talk = Talk("asp")
    talk.begin(1)
    assert talk.hang_up(0) == []
    assert talk.tick(LEASE / 2) == []
    assert 0 in talk.state.roster.training
    assert kinds(talk.resume(0)) == ["SendResumed", "SendGrant"]


def test_a_worker_that_comes_back_is_told_again_what_it_may_have_missed() -> None:
    """At every stage of an iteration: the last Grant, and its Turn or its end."""
    talk = Talk(Obedient())
    talk.begin(1)
    assert kinds(talk.resume(0)) == ["HangUp", "SendResumed", "SendGrant"], "it computes"
    talk.ready(0, 1)
    assert kinds(talk.resume(0)) == ["HangUp", "SendResumed", "SendGrant"], "it pushes freely"
    out = talk.arrive(0, 1)
    (granted,) = of(instructions.SendGrant, out)
    again = of(instructions.SendGrant, talk.resume(0))
    assert [(each.iteration, each.version) for each in again] == [(granted.iteration, granted.version)]
    talk.tell(events.MetricReported(talk.connections[0], "cancel", 0.0))
    (cancelled,) = of(instructions.SendCancel, talk.resume(0))
    assert cancelled.iteration == 2
    talk.tell(events.MetricReported(talk.connections[0], "grant", 0.0))
    out = talk.resume(0)
    assert [grant.iteration for grant in of(instructions.SendGrant, out)] == [3]
    assert not of(instructions.SendCancel, out), "of an iteration that is over, the next Grant tells"


def test_a_turn_is_told_again() -> None:
    talk = Talk("r2sp", workers=2, streams=True)
    talk.begin(2)
    assert of(instructions.SendPushNow, talk.ready(0, 1))
    out = talk.resume(0)
    assert kinds(out) == ["HangUp", "SendResumed", "SendGrant", "SendPushNow"]
    assert of(instructions.SendPushNow, out) == [instructions.SendPushNow(talk.connections[0], 1)]


def test_one_that_waits_for_the_last_model_is_told_of_it_again() -> None:
    talk = Talk("asp")
    talk.begin(1)
    assert of(instructions.SendFinished, talk.tell(events.WorkerFinished(talk.connections[0])))
    assert of(instructions.SendFinished, talk.resume(0)) == [instructions.SendFinished(talk.connections[0], 0)]


def test_the_one_that_gives_the_weights_is_asked_again() -> None:
    talk = Talk("asp")
    talk.join(0)
    assert kinds(talk.resume(0)) == ["HangUp", "SendResumed", "SendWeightsRequest"]


def test_what_was_said_over_the_old_connection_does_not_count_for_the_new_one() -> None:
    talk = Talk("asp")
    talk.begin(1)
    old = talk.connections[0]
    talk.resume(0)
    assert talk.tell(events.ConnectionLost(old)) == []
    assert talk.state.roster.training[0].connection == talk.connections[0], "the old one's end is not the new one's"
    assert kinds(talk.tell(events.WorkerAlive(old))) == ["SendExpelled"]


def test_a_worker_of_another_generation_is_not_a_member() -> None:
    talk = Talk("asp")
    talk.begin(1)
    talk.hang_up(0)
    (expelled,) = talk.resume(0, generation="another")
    assert isinstance(expelled, instructions.SendExpelled)
    assert talk.state.roster.training[0].connection is None


def test_one_that_does_not_have_its_ticket_is_refused_and_the_member_keeps_its_place() -> None:
    talk = Talk("asp")
    talk.begin(1)
    mine = talk.connections[0]
    (refused,) = talk.resume(0, genuine=False)
    assert isinstance(refused, instructions.SendRefused)
    assert talk.state.roster.training[0].connection == mine


def test_an_incarnation_that_was_given_up_may_not_go_on() -> None:
    talk = Talk("asp", workers=2)
    talk.begin(2)
    talk.hang_up(0)
    talk.beat(1, 20.0)
    talk.tick(LEASE)
    assert kinds(talk.resume(0)) == ["SendExpelled"]


# Silence


def test_a_silent_worker_is_given_up_and_fenced_and_the_others_go_on() -> None:
    talk = Talk("bsp", workers=2)
    talk.begin(2)
    talk.push(1, 1)
    talk.beat(1, 20.0)
    assert talk.tick(LEASE - 0.1) == []
    out = talk.tick(LEASE)
    assert of(instructions.SendExpelled, out)[0].to == talk.connections[0]
    assert of(instructions.OrderFence, out) == [instructions.OrderFence(0, 2)]
    assert of(instructions.OrderApply, out), "the barrier does not wait for the one that is gone"
    assert [grant.to for grant in of(instructions.SendGrant, out)] == [talk.connections[1]]


def test_a_beat_is_answered_and_keeps_a_worker() -> None:
    talk = Talk("asp")
    talk.begin(1)
    for at in range(10, 200, 10):
        assert talk.beat(0, float(at)) == [instructions.SendHeartbeat(talk.connections[0])]
        assert talk.tick(float(at)) == []


def test_after_a_stall_of_the_server_everybody_gets_that_time_again() -> None:
    """It was the coordinator that did not listen. What they said meanwhile is still unread."""
    talk = Talk("asp")
    talk.begin(1)
    talk.beat(0, 10.0)
    assert talk.tick(100.0, due=11.0) == []
    talk.beat(0, 100.0)
    assert talk.tick(101.0) == []
    assert kinds(talk.tick(100.0 + LEASE)) == ["SendExpelled", "OrderFence"], "from then on silence counts again"


def test_one_that_was_heard_since_the_stall_is_not_given_more_time() -> None:
    """Its process is started again just then. Its place must not be kept for the old one."""
    talk = Talk("asp")
    talk.begin(1)
    talk.beat(0, 100.0)  # the server wakes up, and hears this first
    assert talk.tick(100.0, due=11.0) == []
    assert talk.tell(events.WorkerJoined(8, 0), 100.0) == [], "is the member alive?"
    later = 100.0 + LEASE / 2
    assert instructions.SendWelcome(8, 0, 2) in talk.tell(events.TimePassed(later), later), "it is not"


def test_a_short_delay_extends_nothing() -> None:
    talk = Talk("asp")
    talk.begin(1)
    out = talk.tick(LEASE, due=LEASE - 0.5)
    assert of(instructions.SendExpelled, out)


def test_a_silent_shard_is_a_failure_unless_the_server_itself_was_held_up() -> None:
    talk = Talk("asp", lease=1000.0)
    talk.begin(1)
    talk.tell(events.ShardAlive(0), 10.0)
    assert talk.tell(events.TimePassed(29.0), 29.0) == []
    assert talk.tell(events.TimePassed(30.0), 100.0) == [], "that was the server"
    assert kinds(talk.tell(events.TimePassed(101.0), 101.0)) == ["FailGeneration"]


# Twins


def test_a_live_worker_keeps_its_place() -> None:
    talk = Talk("asp")
    talk.begin(1)
    mine = talk.connections[0]
    assert talk.tell(events.WorkerJoined(8, 0), 1.0) == [], "it is not known yet whether the member is alive"
    out = talk.tell(events.WorkerAlive(mine), 2.0)
    assert kinds(out) == ["SendHeartbeat", "SendRefused"]
    assert of(instructions.SendRefused, out)[0].to == 8


def test_a_worker_started_again_takes_the_place_of_its_silent_self() -> None:
    talk = Talk("asp")
    talk.begin(1)
    assert talk.tell(events.WorkerJoined(8, 0), 1.0) == []
    assert talk.tick(LEASE / 2 - 0.1) == []
    out = talk.tell(events.TimePassed(LEASE / 2), LEASE / 2)
    assert instructions.OrderFence(0, 2) in out
    assert instructions.SendWelcome(8, 0, 2) in out
    assert kinds(out)[-1] == "SendGrant"


def test_or_at_once_when_the_connection_of_its_old_self_is_closed() -> None:
    talk = Talk("asp")
    talk.begin(1)
    talk.tell(events.WorkerJoined(8, 0), 1.0)
    out = talk.hang_up(0)
    assert instructions.SendWelcome(8, 0, 2) in out


def test_a_caller_that_goes_is_forgotten() -> None:
    talk = Talk("asp")
    talk.begin(1)
    talk.tell(events.WorkerJoined(8, 0), 1.0)
    talk.tell(events.ConnectionLost(8))
    assert not of(instructions.SendWelcome, talk.hang_up(0))


def test_two_callers_for_one_place() -> None:
    talk = Talk("asp")
    talk.begin(1)
    talk.tell(events.WorkerJoined(8, 0), 1.0)
    talk.tell(events.WorkerJoined(9, 0), 1.0)
    out = talk.hang_up(0)
    assert [welcome.to for welcome in of(instructions.SendWelcome, out)] == [8]
    out = talk.tell(events.WorkerAlive(8), 2.0)
    assert of(instructions.SendRefused, out)[0].to == 9, "the first of them is alive"


def test_an_update_of_the_old_self_counts_once_and_one_of_the_new_self_too() -> None:
    """A barrier holds the first; the second has the same worker and iteration, and another incarnation."""
    talk = Talk("bsp", workers=2)
    talk.begin(2)
    talk.push(0, 1)
    talk.hang_up(0)
    talk.join(0)
    talk.push(0, 1)
    (apply,) = of(instructions.OrderApply, talk.push(1, 1))
    who = [(update.worker, update.incarnation) for update in apply.decision.updates]
    assert sorted(who) == [(0, 1), (0, 2), (1, 1)]


# Iterations


def test_an_update_counts_when_its_worker_has_told_of_it_and_all_shards_have_it() -> None:
    talk = Talk("asp", shards=2)
    talk.begin(1)
    assert not of(instructions.OrderApply, talk.arrive(0, 1, 0))
    assert not of(instructions.OrderApply, talk.ready(0, 1))
    (apply,) = of(instructions.OrderApply, talk.arrive(0, 1, 1))
    assert apply.version == 1


def test_what_is_said_twice_counts_once() -> None:
    talk = Talk("asp")
    talk.begin(1)
    talk.ready(0, 1)
    assert talk.ready(0, 1) == []
    assert of(instructions.OrderApply, talk.arrive(0, 1))
    assert talk.ready(0, 1) == []
    assert kinds(talk.arrive(0, 1)) == ["OrderDrop"], "the shard sent it again"
    assert talk.state.version == 1


def test_without_shards_an_update_counts_when_it_is_ready() -> None:
    talk = Talk("asp", shards=0)
    talk.begin(1)
    assert kinds(talk.ready(0, 1)) == ["OrderApply", "SendGrant"]


def test_an_update_of_one_that_has_left_is_dropped() -> None:
    talk = Talk("asp", workers=2)
    talk.begin(2)
    talk.tell(events.WorkerLeft(talk.connections[0]))
    assert talk.arrive(0, 1) == [instructions.OrderDrop(Identity(0, 1, 1), 0)]


def test_an_update_of_a_cancelled_iteration_is_dropped_at_the_shard_that_has_it() -> None:
    talk = Talk(Obedient(), shards=2)
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
        events.WorkerMisbehaved(1),
    ],
    ids=str,
)
def test_one_that_breaks_the_protocol_takes_no_part_any_more(wrong: events.Event) -> None:
    talk = Talk("asp", workers=2)
    talk.begin(2)
    out = talk.tell(wrong)
    assert instructions.OrderFence(0, 2) in out
    assert 0 not in talk.state.roster.training
    assert isinstance(wrong, events.WorkerMisbehaved) or [
        refused.to for refused in of(instructions.SendRefused, out)
    ] == [1]
    assert of(instructions.OrderApply, talk.push(1, 1)), "the other goes on"


def test_a_shard_that_has_what_was_not_granted_shows_that_its_worker_lies() -> None:
    talk = Talk("asp", workers=2)
    talk.begin(2)
    out = talk.arrive(0, 3)
    assert instructions.OrderDrop(Identity(0, 1, 3), 0) in out
    assert of(instructions.SendRefused, out)[0].to == talk.connections[0]


# Samples


def test_a_request_that_is_repeated_gets_the_same_samples() -> None:
    talk = Talk("asp")
    talk.begin(1)
    first = talk.want(0, 1)
    assert first == [instructions.SendSamples(talk.connections[0], 1, 0, 0, 2)]
    talk.resume(0)
    assert talk.want(0, 1) == [instructions.SendSamples(talk.connections[0], 1, 0, 0, 2)]
    assert talk.want(0, 2) == [instructions.SendSamples(talk.connections[0], 2, 0, 2, 4)]


def test_samples_of_one_that_leaves_are_given_to_another_but_not_those_of_an_update_that_is_in() -> None:
    talk = Talk("bsp", workers=2)
    talk.begin(2)
    for number in (1, 2):
        talk.want(0, number)
    talk.push(0, 1, 1)
    talk.tell(events.WorkerLeft(talk.connections[0]))
    given = [of(instructions.SendSamples, talk.want(1, number))[0] for number in range(1, 5)]
    assert [(each.start, each.stop) for each in given] == [(2, 4), (4, 6), (6, 8), (0, 0)]


def test_samples_of_a_cancelled_iteration_come_back_when_its_worker_tells_of_them() -> None:
    talk = Talk(Obedient())
    talk.begin(1)
    talk.want(0, 1, count=8)
    talk.tell(events.MetricReported(talk.connections[0], "cancel", 0.0))
    assert of(instructions.SendSamples, talk.want(0, 2))[0].stop == 0, "they are still out"
    talk.ready(0, 1, 1)
    assert of(instructions.SendSamples, talk.want(0, 3))[0].stop == 2


def test_all_must_train_on_data_of_one_size() -> None:
    talk = Talk("asp", workers=2)
    talk.begin(2)
    talk.want(0, 1, size=8)
    assert "same data" in of(instructions.SendRefused, talk.want(1, 1, size=9))[0].reason


# The end


def test_the_job_is_done_when_all_have_left_of_their_own_accord() -> None:
    talk = Talk("asp", workers=2)
    talk.begin(2)
    assert talk.tell(events.WorkerLeft(talk.connections[0]))[0] == instructions.SendLeave(talk.connections[0])
    assert kinds(talk.tell(events.WorkerLeft(talk.connections[1])))[-1] == "JobDone"


def test_those_who_have_finished_wait_for_the_others_and_for_one_that_was_given_up() -> None:
    talk = Talk("asp", workers=2)
    talk.begin(2)
    assert not of(instructions.SendFinished, talk.tell(events.WorkerFinished(talk.connections[0])))
    talk.beat(0, 20.0)
    assert not of(instructions.SendFinished, talk.tick(LEASE)), "worker 1 may come back"
    assert talk.state.roster.training == {}
    for at in range(31, 90):
        talk.beat(0, float(at))
        assert not of(instructions.SendFinished, talk.tick(float(at)))
    talk.beat(0, 90.0)
    assert of(instructions.SendFinished, talk.tick(LEASE + 60.0)) == [instructions.SendFinished(talk.connections[0], 0)]


def test_when_every_sample_is_done_nobody_is_waited_for() -> None:
    talk = Talk("asp", workers=2)
    talk.begin(2)
    talk.want(0, 1, count=8)
    talk.push(0, 1, 1)
    out = talk.tell(events.WorkerFinished(talk.connections[0]))
    assert of(instructions.SendFinished, out) == [instructions.SendFinished(talk.connections[0], 1)]


def test_a_policy_that_does_what_cannot_be_done_raises() -> None:
    talk = Talk(Obedient())
    talk.begin(1)
    talk.tell(events.MetricReported(talk.connections[0], "cancel", 0.0))
    with pytest.raises(RuntimeError, match="cannot CANCEL now: it is at CANCELLED"):
        talk.tell(events.MetricReported(talk.connections[0], "cancel", 0.0))


def test_one_that_begins_to_watch_is_told_how_things_stand() -> None:
    from paceline.observe.observer import Recorder
    from paceline.observe.trace import Computed, Granted, Joined, Pulled, Turned

    talk = Talk("r2sp", workers=3, streams=True)
    talk.begin(3)
    talk.ready(0, 1)
    assert talk.state.roster.training[0].stage is Stage.TURNED
    told: list[object] = []
    talk.state.introduce(Recorder(told.append))
    assert told[:5] == [
        Joined(0.0, 0, 1),
        Granted(0.0, 0, None, 0),
        Pulled(0.0, 0, 0),
        Computed(0.0, 0, None),
        Turned(0.0, 0),
    ]
    assert [type(each).__name__ for each in told[5:]] == ["Joined", "Joined"], "those wait for a Grant"
