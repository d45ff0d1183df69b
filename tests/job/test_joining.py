"""Workers join, lose connections, fall silent and come back: which of them are members, and what each is told."""

from __future__ import annotations

import pytest

from job.conversation import Conversation, Obedient, kinds, only
from paceline.job import events, instructions
from paceline.observe.observer import Recorder
from paceline.observe.trace import Awaited, Event

LEASE = 30.0


# Joining


def test_the_job_begins_when_enough_workers_have_joined_and_one_has_sent_the_weights() -> None:
    talk = Conversation(workers=2, shards=2)
    assert talk.join(0) == [
        instructions.SendWelcome(1, 0, 1),
        instructions.OrderInitialWeights(0, 1),
        instructions.SendWeightsRequest(1),
    ]
    assert talk.tell(events.ShardInitialized(0, 0, 1)) == []
    assert talk.tell(events.ShardInitialized(1, 0, 1)) == [], "one more worker is needed"
    out = talk.join(1)
    assert kinds(out) == ["SendWelcome", "SendGrant", "SendGrant"]
    assert [grant.iteration for grant in only(instructions.SendGrant, out)] == [1, 1]


def test_watchers_learn_how_many_workers_the_job_waits_for() -> None:
    watched: list[tuple[object, ...]] = []
    talk = Conversation(workers=3)
    talk.state.ledger.watcher = Recorder(lambda event: watched.append(event[1:]))
    talk.join(0)
    talk.join(1)
    talk.tell(events.WorkerLeft(talk.connections[0]))
    assert watched == [(1, 2), (2, 1), (1, 2)]
    late: list[Event] = []
    talk.state.introduce(Recorder(late.append))
    assert late == [Awaited(talk.state._now, 1, 2)]


def test_a_job_that_has_begun_waits_for_no_worker() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    late: list[Event] = []
    talk.state.introduce(Recorder(late.append))
    assert talk.state.missing == 0
    assert not [event for event in late if isinstance(event, Awaited)]


def test_a_worker_that_joins_later_is_admitted_at_once() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    assert kinds(talk.join(5)) == ["SendWelcome", "SendGrant"]


def test_a_worker_without_a_number_gets_the_lowest_free_one() -> None:
    talk = Conversation("asp")
    talk.begin(2)
    assert talk.tell(events.WorkerJoined(9, None))[0] == instructions.SendWelcome(9, 2, 1)
    talk.hang_up(0)
    assert instructions.SendWelcome(10, 0, 2) in talk.tell(events.WorkerJoined(10, None)), "most likely the same worker"


def test_if_the_worker_that_sends_the_initial_weights_leaves_another_one_starts_over() -> None:
    talk = Conversation("asp", workers=2, shards=2)
    talk.join(0)
    talk.join(1)
    talk.tell(events.ShardInitialized(0, 0, 1))
    out = talk.tell(events.WorkerLeft(talk.connections[0]))
    assert only(instructions.OrderInitialWeights, out) == [instructions.OrderInitialWeights(1, 1)]
    assert only(instructions.SendWeightsRequest, out) == [instructions.SendWeightsRequest(talk.connections[1])]
    talk.tell(events.ShardInitialized(0, 0, 1))
    talk.tell(events.ShardInitialized(1, 0, 1))
    assert not talk.state.has_begun, "these weights are from the worker that left"
    talk.tell(events.ShardInitialized(0, 1, 1))
    assert not talk.state.has_begun
    talk.tell(events.ShardInitialized(1, 1, 1))
    assert talk.state.has_begun


@pytest.mark.parametrize("number", [-1, 1 << 31])
def test_a_number_out_of_range_is_refused(number: int) -> None:
    (refused,) = Conversation().tell(events.WorkerJoined(1, number))
    assert isinstance(refused, instructions.SendRefused)
    assert "number" in refused.reason


# A lost connection


def test_a_worker_that_lost_its_connection_stays_a_member_and_nothing_is_sent_to_it() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    assert talk.hang_up(0) == []
    assert talk.tick(LEASE / 2) == []
    assert 0 in talk.state.roster.training
    assert kinds(talk.resume(0)) == ["SendResumed", "SendGrant"]


def test_a_worker_that_resumes_gets_the_messages_again_that_it_may_have_missed() -> None:
    """At every stage of an iteration, these are the last Grant, and its Turn or its cancellation."""
    talk = Conversation(Obedient())
    talk.begin(1)
    assert kinds(talk.resume(0)) == ["CloseConnection", "SendResumed", "SendGrant"], "the worker is computing"
    talk.ready(0, 1)
    assert kinds(talk.resume(0)) == ["CloseConnection", "SendResumed", "SendGrant"], "the push needs no Turn"
    out = talk.arrive(0, 1)
    (granted,) = only(instructions.SendGrant, out)
    again = only(instructions.SendGrant, talk.resume(0))
    assert [(each.iteration, each.version) for each in again] == [(granted.iteration, granted.version)]
    talk.tell(events.MetricReported(talk.connections[0], "cancel", 0.0))
    (cancelled,) = only(instructions.SendCancel, talk.resume(0))
    assert cancelled.iteration == 2
    talk.tell(events.MetricReported(talk.connections[0], "grant", 0.0))
    out = talk.resume(0)
    assert [grant.iteration for grant in only(instructions.SendGrant, out)] == [3]
    assert not only(instructions.SendCancel, out), "the next Grant shows that the iteration is over"


def test_a_turn_is_repeated() -> None:
    talk = Conversation("r2sp", workers=2, streams=True)
    talk.begin(2)
    assert only(instructions.SendPushNow, talk.ready(0, 1))
    out = talk.resume(0)
    assert kinds(out) == ["CloseConnection", "SendResumed", "SendGrant", "SendPushNow"]
    assert only(instructions.SendPushNow, out) == [instructions.SendPushNow(talk.connections[0], 1)]


def test_the_last_version_is_repeated() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    assert only(instructions.SendFinished, talk.tell(events.WorkerFinished(talk.connections[0])))
    assert only(instructions.SendFinished, talk.resume(0)) == [instructions.SendFinished(talk.connections[0], 0)]


def test_the_request_for_the_initial_weights_is_repeated() -> None:
    talk = Conversation("asp")
    talk.join(0)
    assert kinds(talk.resume(0)) == ["CloseConnection", "SendResumed", "SendWeightsRequest"]


def test_events_of_the_old_connection_do_not_count_for_the_new_one() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    old = talk.connections[0]
    talk.resume(0)
    assert talk.tell(events.ConnectionLost(old)) == []
    assert talk.state.roster.training[0].connection == talk.connections[0], "the new connection is not lost"
    assert kinds(talk.tell(events.WorkerAlive(old))) == ["SendExpelled"]


def test_a_worker_of_another_generation_is_not_a_member() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    talk.hang_up(0)
    (expelled,) = talk.resume(0, generation="another")
    assert isinstance(expelled, instructions.SendExpelled)
    assert talk.state.roster.training[0].connection is None


def test_a_worker_without_a_valid_ticket_is_refused_and_the_member_keeps_its_number() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    mine = talk.connections[0]
    (refused,) = talk.resume(0, genuine=False)
    assert isinstance(refused, instructions.SendRefused)
    assert talk.state.roster.training[0].connection == mine


def test_an_incarnation_that_was_given_up_cannot_resume() -> None:
    talk = Conversation("asp", workers=2)
    talk.begin(2)
    talk.hang_up(0)
    talk.heartbeat(1, 20.0)
    talk.tick(LEASE)
    assert kinds(talk.resume(0)) == ["SendExpelled"]


# Leases


def test_a_silent_worker_is_given_up_and_fenced_and_the_others_continue() -> None:
    talk = Conversation("bsp", workers=2)
    talk.begin(2)
    talk.push(1, 1)
    talk.heartbeat(1, 20.0)
    assert talk.tick(LEASE - 0.1) == []
    out = talk.tick(LEASE)
    assert only(instructions.SendExpelled, out)[0].to == talk.connections[0]
    assert only(instructions.OrderFence, out) == [instructions.OrderFence(0, 2)]
    assert only(instructions.OrderApply, out), "the barrier does not wait for the lost worker"
    assert [grant.to for grant in only(instructions.SendGrant, out)] == [talk.connections[1]]


def test_a_heartbeat_is_answered_and_renews_the_lease() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    for at in range(10, 200, 10):
        assert talk.heartbeat(0, float(at)) == [instructions.SendHeartbeat(talk.connections[0])]
        assert talk.tick(float(at)) == []


def test_after_a_stall_of_the_server_all_leases_are_extended() -> None:
    """The coordinator was blocked, so the heartbeats of the workers are still unread."""
    talk = Conversation("asp")
    talk.begin(1)
    talk.heartbeat(0, 10.0)
    assert talk.tick(100.0, due=11.0) == []
    talk.heartbeat(0, 100.0)
    assert talk.tick(101.0) == []
    assert kinds(talk.tick(100.0 + LEASE)) == ["SendExpelled", "OrderFence"], "then silence counts again"


@pytest.mark.parametrize("seconds", [2.0, 9.0, 11.0, 90.0])
def test_only_a_long_stall_of_the_server_is_reported(seconds: float) -> None:
    talk = Conversation("asp", lease=30.0)
    talk.begin(1)
    talk.heartbeat(0, 100.0 - seconds)
    talk.tick(100.0, due=100.0 - seconds)
    assert [each.text for each in only(instructions.LogLine, talk.unfiltered)] == (
        [f"the coordinator was blocked for {seconds:.1f} s; all leases are extended"] if seconds > 10 else []
    )


def test_the_lease_of_a_worker_that_was_heard_after_the_stall_is_not_extended() -> None:
    """The worker's process is restarted just then. Its number must not be kept for the old process."""
    talk = Conversation("asp")
    talk.begin(1)
    talk.heartbeat(0, 100.0)  # the server wakes up and reads this first
    assert talk.tick(100.0, due=11.0) == []
    assert talk.tell(events.WorkerJoined(8, 0), 100.0) == [], "it is not known yet whether the old process is alive"
    later = 100.0 + LEASE / 2
    assert instructions.SendWelcome(8, 0, 2) in talk.tell(events.TimePassed(later), later), "the old process is dead"


def test_a_short_delay_extends_no_lease() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    out = talk.tick(LEASE, due=LEASE - 0.5)
    assert only(instructions.SendExpelled, out)


def test_a_silent_shard_fails_the_generation_unless_the_server_itself_was_blocked() -> None:
    talk = Conversation("asp", lease=1000.0)
    talk.begin(1)
    talk.tell(events.ShardAlive(0), 10.0)
    assert talk.tell(events.TimePassed(29.0), 29.0) == []
    assert talk.tell(events.TimePassed(30.0), 100.0) == [], "the server was blocked"
    assert kinds(talk.tell(events.TimePassed(101.0), 101.0)) == ["GiveUpShard"]


# Two processes with the same number


def test_a_live_worker_keeps_its_number() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    mine = talk.connections[0]
    assert talk.tell(events.WorkerJoined(8, 0), 1.0) == [], "it is not known yet whether the member is alive"
    out = talk.tell(events.WorkerAlive(mine), 2.0)
    assert kinds(out) == ["SendHeartbeat", "SendRefused"]
    assert only(instructions.SendRefused, out)[0].to == 8


def test_a_restarted_worker_replaces_its_silent_incarnation() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    assert talk.tell(events.WorkerJoined(8, 0), 1.0) == []
    assert talk.tick(LEASE / 2 - 0.1) == []
    out = talk.tell(events.TimePassed(LEASE / 2), LEASE / 2)
    assert instructions.OrderFence(0, 2) in out
    assert instructions.SendWelcome(8, 0, 2) in out
    assert kinds(out)[-1] == "SendGrant"


def test_a_restarted_worker_replaces_an_incarnation_without_a_connection_at_once() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    talk.tell(events.WorkerJoined(8, 0), 1.0)
    out = talk.hang_up(0)
    assert instructions.SendWelcome(8, 0, 2) in out


def test_a_claim_ends_with_its_connection() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    talk.tell(events.WorkerJoined(8, 0), 1.0)
    talk.tell(events.ConnectionLost(8))
    assert not only(instructions.SendWelcome, talk.hang_up(0))


def test_the_first_of_two_claims_wins() -> None:
    talk = Conversation("asp")
    talk.begin(1)
    talk.tell(events.WorkerJoined(8, 0), 1.0)
    talk.tell(events.WorkerJoined(9, 0), 1.0)
    out = talk.hang_up(0)
    assert [welcome.to for welcome in only(instructions.SendWelcome, out)] == [8]
    out = talk.tell(events.WorkerAlive(8), 2.0)
    assert only(instructions.SendRefused, out)[0].to == 9, "the first one is alive"


def test_updates_of_two_incarnations_with_the_same_iteration_both_count() -> None:
    """A barrier holds the first update. The second one differs only in its incarnation."""
    talk = Conversation("bsp", workers=2)
    talk.begin(2)
    talk.push(0, 1)
    talk.hang_up(0)
    talk.join(0)
    talk.push(0, 1)
    (apply,) = only(instructions.OrderApply, talk.push(1, 1))
    workers = [(update.worker, update.incarnation) for update in apply.decision.updates]
    assert sorted(workers) == [(0, 1), (0, 2), (1, 1)]
