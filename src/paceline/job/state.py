"""The job as a pure state machine: events in, instructions out.

A policy decides which worker may proceed, and when. The job decides everything else: which incarnation of a worker is
a member, whose lease has run out, which worker trains on which samples, whether a checkpoint may be taken now, and
what a restored server continues with. It opens no socket, reads no clock, writes no file and knows no tensor. So the
same class runs on a real server and in a simulator with injected faults.

JobState is one object in six layers, each of which extends the one before: `core` (the shared state), `saving`
(checkpoints and the orders that wait for them), `decisions` (carries out the policy's decisions), `iterations`
(samples, gradients and updates), `weights` (the worker that provides the weights), and this module (membership and
time).

One JobState is one generation of a server. If a shard is lost, the generation fails, and a new one begins with the
snapshot of the last checkpoint (`restored`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.job import events, instructions
from paceline.job.accounting import Watcher
from paceline.job.config import JobConfig
from paceline.job.events import Event
from paceline.job.instructions import Instruction
from paceline.job.iterations import GIVEN_UP, Violation
from paceline.job.leases import SHARD_SILENCE
from paceline.job.membership import ADMITTED, Member, Stage, Transition
from paceline.job.weights import WeightsLayer
from paceline.policies import Policy

MAX_WORKERS = 1 << 31


class JobState(WeightsLayer):
    """The state of a job. Handlers of events are named after their event."""

    def __init__(
        self,
        policy: Policy,
        config: JobConfig,
        watcher: Watcher,
        restored: Mapping[str, Any] | None = None,
        now: float = 0.0,
        sees_pulls: bool = False,
    ) -> None:
        """restored: the snapshot of a checkpoint. sees_pulls: True if the driver reports pulls to the watcher."""
        super().__init__(policy, config, watcher, restored, now, sees_pulls)
        self.joined_ever = False  # True once a worker has been admitted to the policy
        self.is_done = False
        self._workers_wanted = 1 if restored else config.workers  # after a restart, some workers may not come back
        self._waiting: dict[int, Member] = {}  # worker → member that the policy does not know yet
        for worker in self.roster.awaited:
            self.leases.expect_back(worker, now)
        if restored:
            self._restore(restored)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Handle an event and return the instructions that answer it.

        An error of the policy or of the driver raises an exception. The state is then undefined.
        """
        out: list[Instruction] = []
        self._out = out
        self._now = now
        try:
            EVENT_HANDLERS[type(event)](self, event)
        except Violation as violation:
            connection = getattr(event, "connection", None)
            member = violation.member or self._members.get(connection or 0)
            self._send(member.connection if member else connection, instructions.SendRefused, str(violation))
            if member:
                self._remove(member)
        if self._claims:
            self._settle_claims()
        if self._offers:
            self._settle_offers()
        if self.roster.finishing:
            self._end_if_over()
        return out

    def lease_deadline(self) -> float | None:
        """Return the earliest time at which a member's lease can run out, or None without members."""
        return self.leases.deadline(self.roster.present())

    @property
    def missing(self) -> int:
        """The number of workers that must still join before the job begins."""
        awaited = len(self.roster.awaited) if self._awaits_all else 0
        return max(awaited, self._workers_wanted - len(self.roster.training), 0)

    def introduce(self, watcher: Watcher) -> None:
        """Report the present state of the job to a watcher that begins to watch now."""
        super().introduce(watcher)
        self._report_awaited(watcher)

    def _report_awaited(self, watcher: Watcher) -> None:
        """Report how many workers have joined, if the job has not begun. In a simulated cluster all join at once."""
        if not self.joined_ever and not self._sees_pulls:
            watcher.awaited(self._now, len(self.roster.training), self.missing)

    # Joining and resuming

    def _worker_joined(self, joined: events.WorkerJoined) -> None:
        worker = joined.worker
        if worker is None:
            worker = self.roster.first_free_number()
        if not 0 <= worker < MAX_WORKERS:
            raise Violation(f"A worker's number must be between 0 and {MAX_WORKERS - 1}; got {worker}.")
        before = self.roster.find(worker)
        if before and before.connection is not None and not self.leases.seems_dead(before, self._now):
            self._claims[joined.connection] = (worker, self._now)  # wait for the member's next heartbeat
        else:
            self._welcome(joined.connection, worker)

    def _welcome(self, connection: int, worker: int) -> None:
        """Make a worker a member, as a new incarnation. Remove its previous incarnation, if there is one."""
        before = self.roster.find(worker)
        if before:
            self._remove(before, given_up=True)
        incarnation = self.incarnations[worker] = self.incarnations.get(worker, 0) + 1
        member = Member(worker, incarnation, connection, self._now)
        self._members[connection] = self._waiting[worker] = member
        self.roster.enter(member)
        self._send(connection, instructions.SendWelcome, worker, incarnation)
        self._report_awaited(self.ledger.watcher)
        self._request_weights()
        self._admit_waiting()

    def _settle_claims(self) -> None:
        """Decide on workers that claim the number of a member: refuse them if the member proves to be alive."""
        for connection, (worker, since) in list(self._claims.items()):
            member = self.roster.find(worker)
            if member is None or member.connection is None or self.leases.seems_dead(member, self._now):
                del self._claims[connection]
                self._welcome(connection, worker)
            elif member.heard > since:
                del self._claims[connection]
                reason = f"There already is a worker {worker}, and it is alive; give each worker its own number."
                self._send(connection, instructions.SendRefused, reason)

    def _worker_resumed(self, resumed: events.WorkerResumed) -> None:
        """Accept the new connection of a member, and repeat the messages that it may have missed."""
        connection, member = resumed.connection, self.roster.find(resumed.worker)
        if resumed.generation != self.config.generation:
            reason = "The server belongs to another generation; join again."
            self._send(connection, instructions.SendExpelled, reason)
            return
        if not resumed.genuine:
            raise Violation(f"The ticket is not that of worker {resumed.worker}.")
        if member is None or member.incarnation != resumed.incarnation:
            self._send(connection, instructions.SendExpelled, GIVEN_UP)
            return
        if member.connection is not None:
            self._send(member.connection, instructions.CloseConnection)
            del self._members[member.connection]
        self._members[connection] = member
        member.connection, member.heard = connection, self._now
        self._out.append(instructions.LogLine(f"worker {member.worker} resumed on a new connection"))
        self._send(connection, instructions.SendResumed)
        if member is self._initializer and not self.has_begun:
            self._send(connection, instructions.SendWeightsRequest)
        if member.exclusion:
            self._send(connection, instructions.SendExcluded, member.exclusion)
        if member.stage is Stage.FINISHED:
            self._send(connection, instructions.SendFinished, member.final_version)
        elif member.iteration:
            self._send_grant(member)
            if member.stage is Stage.TURNED:
                self._send_turn(member)
                if self._visits:
                    self._send_visits(self._visits.under_way(member.worker))
            elif member.stage is Stage.CANCELLED:
                self._send(connection, instructions.SendCancel, member.iteration)

    def _shard_has_weights(self, event: events.ShardLoaded | events.ShardInitialized) -> None:
        """Record that a shard has its first weights, from a checkpoint or from the worker that was asked for them."""
        self.leases.shards_heard[event.shard] = self._now
        initializer = self._initializer
        if isinstance(event, events.ShardInitialized) and (
            initializer is None or (initializer.worker, initializer.incarnation) != (event.worker, event.incarnation)
        ):
            return
        self._shards_with_weights.add(event.shard)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Admit the waiting members to the policy, once the shards have weights and enough workers have joined."""
        if not self.has_begun or len(self.roster.training) < self._workers_wanted:
            return
        if self._awaits_all and self.roster.awaited:
            return
        self._awaits_all = False
        self._workers_wanted = 1  # from now on, workers are admitted one by one
        self._save_if_due()  # a checkpoint of the initial weights, so that there is always one to restore
        # In the order of their numbers, so that neighbours in a ring start to push to neighbouring shards.
        for worker in sorted(self._waiting):
            member = self._waiting.pop(worker)
            member.step(Transition.ADMIT)
            self.joined_ever = True
            self._carry_out(self.ledger.joined(worker, self._now, member.incarnation))
            self._notify_exclusion(worker)

    # Leaving

    def _worker_left(self, left: events.WorkerLeft) -> None:
        self._send(left.connection, instructions.SendLeave)
        if member := self._members.get(left.connection):
            self._remove(member, returns=left.returns)

    def _worker_misbehaved(self, misbehaved: events.WorkerMisbehaved) -> None:
        if member := self._members.get(misbehaved.connection):
            self._remove(member)

    def _worker_finished(self, finished: events.WorkerFinished) -> None:
        """Take a member out of the policy's order. It waits for the other workers and may still pull."""
        member = self._renew_lease(finished.connection)
        if member and member.worker in self.roster.training:
            was_admitted = member.stage in ADMITTED
            self._drop_current_update(member)
            self.roster.finish(member)
            self._continue_without(member, was_admitted)
            self._end_if_over()

    def _remove(self, member: Member, given_up: bool = False, returns: bool = False) -> None:
        """Remove a member. given_up, returns: the job waits for some time for the worker to join again."""
        was_training, was_admitted = member.worker in self.roster.training, member.stage in ADMITTED
        expected_back = (given_up or returns) and member.stage is not Stage.FINISHED
        if was_training:
            self._drop_current_update(member)
        self.roster.leave(member, expected_back)
        if member.connection is not None:
            del self._members[member.connection]
        if expected_back:
            self.leases.expect_back(member.worker, self._now)
        self._out.append(instructions.OrderFence(member.worker, member.incarnation + 1))
        if was_training:
            self._continue_without(member, was_admitted, lost=given_up)
        self._end_if_over()

    def _continue_without(self, member: Member, was_admitted: bool, lost: bool = False) -> None:
        """Clean up after a member that no longer trains, and tell the policy if it knew the member."""
        self._waiting.pop(member.worker, None)
        self._report_awaited(self.ledger.watcher)
        if self.clipping:
            self.clipping.forget(member.worker)
        self._departed_staleness[member.worker] = member.expected_staleness
        if member.applied_iteration:
            self._applied[member.worker, member.incarnation] = member.applied_iteration
        if self.samples:
            self.samples.abandoned(member.worker)
        self._request_weights()
        if was_admitted:
            self._carry_out(self.ledger.left(member.worker, self._now, lost=lost))

    def _end_if_over(self) -> None:
        """If the training is over, tell the last version to the members that wait for it.

        When all of them have left, end the job.
        """
        roster, is_over = self.roster, self.roster.training_is_over
        if roster.finishing and not roster.training and self.samples and self.samples.all_done:
            self.leases.work_is_done(self._now)
        awaits_rest = self.config.sends_rest and roster.training
        if is_over or (self.samples and self.samples.all_done and not awaits_rest):
            for member in roster.finishing.values():
                if member.stage is Stage.FINISHING:
                    member.step(Transition.END)
                    member.final_version = self.version
                    self._send(member.connection, instructions.SendFinished, self.version)
        if is_over and not roster.finishing and self.joined_ever and not self.is_done:
            if self._restored and self.samples and not self.samples.all_done:
                text = "the job ends with samples left to repeat: all workers had finished before the job was restored"
                self._out.append(instructions.LogLine(text, warns=True))
            self.is_done = True
            self._out.append(instructions.JobDone())
        if roster.awaits_only_unknown:
            self.leases.expect_unknown(self._now)

    # Time, heartbeats and connections

    def _time_passed(self, passed: events.TimePassed) -> None:
        """Give up members whose leases have run out. If the driver was blocked, extend all leases first."""
        now, blocked = self._now, self._now - passed.due
        if blocked > self.leases.tick_seconds:
            if self.leases.is_long(blocked):
                text = f"the coordinator was blocked for {blocked:.1f} s; all leases are extended"
                self._out.append(instructions.LogLine(text, warns=True))
            self.leases.extend(self.roster.present(), blocked, now)
        for member in self.roster.present():
            if self.leases.has_expired(member, now) and self.roster.find(member.worker) is member:
                text = f"worker {member.worker} sent nothing for {self.config.lease:.1f} s and is given up"
                self._out.append(instructions.LogLine(text, warns=True))
                reason = "This worker was silent for too long; it must join again."
                self._send(member.connection, instructions.SendExpelled, reason)
                self._remove(member, given_up=True)
        shard = self.leases.lost_shard(now)
        if shard is not None:
            reason = f"Shard {shard} has been silent for {SHARD_SILENCE:g} s."
            self._out.append(instructions.GiveUpShard(shard, reason))
        for worker in self.leases.pop_no_longer_expected(now):
            self.roster.awaited.discard(worker)
            self._request_weights()
            self._admit_waiting()
            self._end_if_over()
        if self.leases.stops_expecting_unknown(now):
            self.roster.stop_expecting_unknown()
            self._end_if_over()

    def _worker_alive(self, alive: events.WorkerAlive) -> None:
        if self._renew_lease(alive.connection):
            self._send(alive.connection, instructions.SendHeartbeat)

    def _shard_alive(self, alive: events.ShardAlive) -> None:
        self.leases.shards_heard[alive.shard] = self._now

    def _connection_lost(self, lost: events.ConnectionLost) -> None:
        self._claims.pop(lost.connection, None)
        member = self._members.pop(lost.connection, None)
        if member:
            member.connection = None

    def _timer_fired(self, _: events.TimerFired) -> None:
        self._carry_out(self.ledger.woke(self._now))


#: The method that handles each kind of event.
EVENT_HANDLERS: dict[type, Callable[[JobState, Any], None]] = {
    events.WorkerJoined: JobState._worker_joined,
    events.WorkerResumed: JobState._worker_resumed,
    events.WeightsOffered: JobState._weights_offered,
    events.SamplesRequested: JobState._samples_requested,
    events.GradientBegun: JobState._gradient_begun,
    events.GradientComputed: JobState._gradient_computed,
    events.VisitEnded: JobState._visit_ended,
    events.MetricReported: JobState._metric_reported,
    events.WorkerFinished: JobState._worker_finished,
    events.WorkerAlive: JobState._worker_alive,
    events.WorkerLeft: JobState._worker_left,
    events.WorkerMisbehaved: JobState._worker_misbehaved,
    events.ConnectionLost: JobState._connection_lost,
    events.ShardAlive: JobState._shard_alive,
    events.ShardLoaded: JobState._shard_has_weights,
    events.ShardInitialized: JobState._shard_has_weights,
    events.UpdateArrived: JobState._update_arrived,
    events.UpdateHeldBack: JobState._update_held_back,
    events.UpdatesCompared: JobState._updates_compared,
    events.ShardSaved: JobState._shard_saved,
    events.ModelDescribed: JobState._model_described,
    events.CheckpointStored: JobState._checkpoint_stored,
    events.SaveRequested: JobState._save_requested,
    events.WorkersPardoned: JobState._workers_pardoned,
    events.TimePassed: JobState._time_passed,
    events.TimerFired: JobState._timer_fired,
}
