"""The job as a pure state machine: events in, instructions out.

A policy decides which worker may go, and when. The job decides which workers there are: which incarnation of a worker
is a member, whose lease has run out, which samples are whose, whether a checkpoint may be taken now, and what a
restored server goes on with. It opens no socket, reads no clock, writes no file and knows no tensor, so the same object
runs on a real server and in a simulator, under any fault.

It is built in layers, each on the one before: `books` (what is known), `saving` (checkpoints, and orders that wait for
them), `decisions` (the policy's, carried out), `iterations` (what members say of their work), and here membership.

One JobState is one generation of a server. When a shard is lost the generation has failed, and a new one begins with
the snapshot of the last checkpoint (`restored`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.job import events, instructions
from paceline.job.accounting import Watcher
from paceline.job.config import JobConfig
from paceline.job.events import Event
from paceline.job.instructions import Instruction
from paceline.job.iterations import GIVEN_UP, Iterations, Violation
from paceline.job.leases import SHARD_SILENCE
from paceline.job.membership import Member, Stage, Transition
from paceline.policies import Policy

MAX_WORKERS = 1 << 31


class JobState(Iterations):
    """All that a job's coordinator knows and decides."""

    def __init__(
        self,
        policy: Policy,
        config: JobConfig,
        watcher: Watcher,
        restored: Mapping[str, Any] | None = None,
        now: float = 0.0,
        sees_pulls: bool = False,
    ) -> None:
        """restored: the snapshot of a checkpoint. sees_pulls: does the driver itself tell the watcher of pulls?"""
        super().__init__(policy, config, watcher, restored, now, sees_pulls)
        self.joined_ever = False  # has the policy been told of any worker?
        self.is_done = False
        self._restored = restored is not None
        self._workers_wanted = 1 if restored else config.workers  # after a restart not all may come back
        self._waiting: dict[int, Member] = {}  # worker → member that the policy does not know of yet
        self._giver: Member | None = None  # gives the weights that the model begins with
        for worker in self.roster.awaited:
            self.leases.expect_back(worker, now)
        if restored:
            self._restore(restored)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Answer an event. A mistake of the policy or of the driver raises; then the state cannot be relied on."""
        out: list[Instruction] = []
        self._out = out
        self._now = now
        try:
            HANDLERS[type(event)](self, event)
        except Violation as violation:
            connection = getattr(event, "connection", None)
            member = violation.member or self._members.get(connection or 0)
            self._send(member.connection if member else connection, instructions.SendRefused, str(violation))
            if member:
                self._leave(member)
        if self._callers:
            self._let_callers_in()
        if self.roster.finishing:
            self._settle()
        return out

    def lease_deadline(self) -> float | None:
        """The earliest time at which a member's lease could run out, as things stand."""
        return self.leases.deadline(self.roster.present())

    # Joining, coming back, leaving

    def _join(self, join: events.WorkerJoined) -> None:
        worker = join.worker
        if worker is None:
            worker = self.roster.free_number()
        if not 0 <= worker < MAX_WORKERS:
            raise Violation(f"A worker's number is from 0 to {MAX_WORKERS - 1}, not {worker}.")
        before = self.roster.find(worker)
        if before and before.connection is not None and not self.leases.seems_dead(before, self._now):
            self._callers[join.connection] = (worker, self._now)  # the member gets time to show that it is alive
        else:
            self._welcome(join.connection, worker)

    def _welcome(self, connection: int, worker: int) -> None:
        before = self.roster.find(worker)
        if before:
            self._leave(before, given_up=True)  # it comes back before its lease has run out
        incarnation = self.incarnations[worker] = self.incarnations.get(worker, 0) + 1
        member = Member(worker, incarnation, connection, self._now)
        self._members[connection] = self._waiting[worker] = member
        self.roster.enter(member)
        self._send(connection, instructions.SendWelcome, worker, incarnation)
        self._ask_for_weights()
        self._admit_waiting()

    def _let_callers_in(self) -> None:
        """Decide on those who want a place that is taken: its member is alive, or it is not."""
        for connection, (worker, asked) in list(self._callers.items()):
            member = self.roster.find(worker)
            if member is None or member.connection is None or self.leases.seems_dead(member, self._now):
                del self._callers[connection]
                self._welcome(connection, worker)
            elif member.heard > asked:
                del self._callers[connection]
                reason = f"There is a worker {worker} already, and it is alive; give every worker a number of its own."
                self._send(connection, instructions.SendRefused, reason)

    def _resume(self, resume: events.WorkerResumed) -> None:
        """A worker whose connection was lost is back: repeat what it may have missed."""
        connection, member = resume.connection, self.roster.find(resume.worker)
        if resume.generation != self.config.generation:
            self._send(connection, instructions.SendExpelled, "The server is of another generation; join again.")
            return
        if not resume.genuine:
            raise Violation(f"This is not worker {resume.worker}: it does not have its ticket.")
        if member is None or member.incarnation != resume.incarnation:
            self._send(connection, instructions.SendExpelled, GIVEN_UP)
            return
        if member.connection is not None:
            self._send(member.connection, instructions.HangUp)
            del self._members[member.connection]
        self._members[connection] = member
        member.connection, member.heard = connection, self._now
        self._out.append(instructions.LogLine(f"worker {member.worker} is back on a new connection"))
        self._send(connection, instructions.SendResumed)
        if member is self._giver and not self.has_begun:
            self._send(connection, instructions.SendWeightsRequest)
        if member.exclusion:
            self._send(connection, instructions.SendExcluded, member.exclusion)
        if member.stage is Stage.FINISHED:
            self._send(connection, instructions.SendFinished, member.told_version)
        elif member.iteration:
            self._send_grant(member)
            if member.stage is Stage.TURNED:
                self._send(connection, instructions.SendPushNow, member.iteration)
            elif member.stage is Stage.CANCELLED:
                self._send(connection, instructions.SendCancel, member.iteration)

    def _weights_are_in(self, event: events.ShardLoaded | events.ShardInitialized) -> None:
        """A shard has weights to begin with, loaded from a checkpoint or given by a worker."""
        self.leases.shards_heard[event.shard] = self._now
        giver = self._giver
        if isinstance(event, events.ShardInitialized) and (
            giver is None or (giver.worker, giver.incarnation) != (event.worker, event.incarnation)
        ):
            return
        self._begun.add(event.shard)
        self._admit_waiting()

    def _ask_for_weights(self) -> None:
        """One member gives the weights that the model begins with. If it dies over that, another does."""
        if self._restored or self.has_begun or not self.roster.training:
            return
        if self._giver is None or self.roster.training.get(self._giver.worker) is not self._giver:
            self._begun.clear()
            giver = self._giver = next(iter(self.roster.training.values()))
            self._out.append(instructions.OrderInitialWeights(giver.worker, giver.incarnation))
            self._send(giver.connection, instructions.SendWeightsRequest)

    def _admit_waiting(self) -> None:
        """Tell the policy of members that wait, once there is a model to train and there are enough to train it."""
        if not self.has_begun or len(self.roster.training) < self._workers_wanted:
            return
        self._workers_wanted = 1  # from now on workers are admitted one by one
        self._save_if_due()  # a first checkpoint before anything has changed: there is always one to go back to
        # In the order of their numbers: a ring's neighbours then begin at neighbouring shards.
        for worker in sorted(self._waiting):
            member = self._waiting.pop(worker)
            member.step(Transition.ADMIT)
            self.joined_ever = True
            self._carry_out(self.ledger.joined(worker, self._now, member.incarnation))
            self._tell_if_excluded(worker)

    def _leave_willingly(self, leave: events.WorkerLeft) -> None:
        self._send(leave.connection, instructions.SendLeave)
        if member := self._members.get(leave.connection):
            self._leave(member)

    def _misbehaved(self, event: events.WorkerMisbehaved) -> None:
        if member := self._members.get(event.connection):
            self._leave(member)

    def _leave(self, member: Member, given_up: bool = False) -> None:
        """A member takes no part any more. One that was given up is expected back for a while."""
        in_order = member.worker in self.roster.training
        admitted = in_order and member.stage is not Stage.WAITING
        expected_back = given_up and member.stage is not Stage.FINISHED
        if in_order:
            self._drop_parts(member)
        self.roster.leave(member, expected_back)
        if member.connection is not None:
            del self._members[member.connection]
        if expected_back:
            self.leases.expect_back(member.worker, self._now)
        self._out.append(instructions.OrderFence(member.worker, member.incarnation + 1))
        if in_order:
            self._go_on_without(member, admitted, lost=given_up)
        self._settle()

    def _finish(self, finish: events.WorkerFinished) -> None:
        """A member has no more to train on, and waits for the others. It may still pull."""
        member = self._heard(finish.connection)
        if member and member.worker in self.roster.training:
            admitted = member.stage is not Stage.WAITING
            self._drop_parts(member)
            self.roster.finish(member)
            self._go_on_without(member, admitted)
            self._settle()

    def _go_on_without(self, member: Member, admitted: bool, lost: bool = False) -> None:
        """A member that was in the order is not any more."""
        self._waiting.pop(member.worker, None)
        self._expected[member.worker] = member.expected
        if member.applied:
            self._applied[member.worker, member.incarnation] = member.applied
        if self.samples:
            self.samples.abandoned(member.worker)
        self._ask_for_weights()
        if admitted:
            self._carry_out(self.ledger.left(member.worker, self._now, lost=lost))

    def _settle(self) -> None:
        """Tell those who wait for the last model, if it is the last; and when all have left, the job is done."""
        roster, over = self.roster, self.roster.nobody_trains
        if over or (self.samples and self.samples.all_done):
            for member in roster.finishing.values():
                if member.stage is Stage.FINISHING:
                    member.step(Transition.END)
                    member.told_version = self.version
                    self._send(member.connection, instructions.SendFinished, self.version)
        if over and not roster.finishing and self.joined_ever and not self.is_done:
            if self._restored and self.samples and not self.samples.all_done:
                text = "the job ends before all samples are done again: everybody had finished when it went back"
                self._out.append(instructions.LogLine(text, warns=True))
            self.is_done = True
            self._out.append(instructions.JobDone())
        if roster.may_yet_come:
            self.leases.expect_unknown(self._now)

    # Time

    def _tick(self, tick: events.TimePassed) -> None:
        """Give up members that are silent for too long. If the driver was held up, everybody gets that time again."""
        now, away = self._now, self._now - tick.due
        if away > self.leases.tick_seconds:
            text = f"the coordinator itself was held up for {away:.1f} s; leases are extended"
            self._out.append(instructions.LogLine(text, warns=True))
            self.leases.extend(self.roster.present(), away, now)
        for member in self.roster.present():
            if self.leases.is_silent(member, now) and self.roster.find(member.worker) is member:
                text = f"worker {member.worker} was silent for {self.config.lease:.1f} s and is given up"
                self._out.append(instructions.LogLine(text, warns=True))
                reason = "This worker was silent for too long; it must join again."
                self._send(member.connection, instructions.SendExpelled, reason)
                self._leave(member, given_up=True)
        shard = self.leases.lost_shard(now)
        if shard is not None:
            self._out.append(instructions.FailGeneration(f"Shard {shard} has been silent for {SHARD_SILENCE:g} s."))
        for worker in self.leases.no_longer_expected(now):
            self.roster.awaited.discard(worker)
            self._settle()
        if self.leases.unknown_are_over(now):
            self.roster.expect_no_more()
            self._settle()

    def _beat(self, beat: events.WorkerAlive) -> None:
        if self._heard(beat.connection):
            self._send(beat.connection, instructions.SendHeartbeat)

    def _disconnected(self, event: events.ConnectionLost) -> None:
        self._callers.pop(event.connection, None)
        member = self._members.pop(event.connection, None)
        if member:
            member.connection = None

    def _shard_beat(self, beat: events.ShardAlive) -> None:
        self.leases.shards_heard[beat.shard] = self._now

    def _woke(self, _: events.TimerFired) -> None:
        self._carry_out(self.ledger.woke(self._now))


#: How each kind of event is handled.
HANDLERS: dict[type, Callable[[JobState, Any], None]] = {
    events.WorkerJoined: JobState._join,
    events.WorkerResumed: JobState._resume,
    events.SamplesRequested: JobState._want,
    events.GradientBegun: JobState._soon,
    events.GradientComputed: JobState._ready,
    events.MetricReported: JobState._measured,
    events.WorkerFinished: JobState._finish,
    events.WorkerAlive: JobState._beat,
    events.WorkerLeft: JobState._leave_willingly,
    events.WorkerMisbehaved: JobState._misbehaved,
    events.ConnectionLost: JobState._disconnected,
    events.ShardAlive: JobState._shard_beat,
    events.ShardLoaded: JobState._weights_are_in,
    events.ShardInitialized: JobState._weights_are_in,
    events.UpdateArrived: JobState._arrived,
    events.UpdatesCompared: JobState._compared,
    events.ShardSaved: JobState._saved,
    events.ModelDescribed: JobState._described,
    events.CheckpointStored: JobState._stored,
    events.SaveRequested: JobState._save_now,
    events.WorkersPardoned: JobState._pardon,
    events.TimePassed: JobState._tick,
    events.TimerFired: JobState._woke,
}
