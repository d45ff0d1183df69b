"""One iteration of a worker, as its messages tell it: samples, an announcement, an update that is whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.job import events, instructions
from paceline.job.accounting import Watcher
from paceline.job.config import JobConfig
from paceline.job.decisions import Decisions
from paceline.job.identity import Identity
from paceline.job.membership import RUNNING, Member, Stage, Transition
from paceline.job.samples import Samples
from paceline.policies import Policy, Update

MAX_SAMPLES = 1 << 40  # in an update
MAX_TAKEN = 1 << 14  # ranges of samples that a worker may hold at a time
# A member of an enum takes ten times as long to look up as a name of this module, and these are needed all the time.
COMPUTING, ANNOUNCE, ARRIVE = Stage.COMPUTING, Transition.ANNOUNCE, Transition.ARRIVE
GIVEN_UP = "This worker has been given up; it must join again."


class Violation(ValueError):
    """A worker has broken the protocol; one sentence says how. member: that worker, if no event of its own shows it."""

    def __init__(self, reason: str, member: Member | None = None) -> None:
        super().__init__(reason)
        self.member = member


class Iterations(Decisions):
    """Hears what members say of their iterations."""

    def __init__(
        self,
        policy: Policy,
        config: JobConfig,
        watcher: Watcher,
        restored: Mapping[str, Any] | None,
        now: float,
        sees_pulls: bool,
    ) -> None:
        super().__init__(policy, config, watcher, restored, now)
        self._sees_pulls = sees_pulls
        self._members: dict[int, Member] = {}  # by connection
        self._callers: dict[int, tuple[int, float]] = {}  # connection → the place it waits for, and since when

    def _heard(self, connection: int) -> Member | None:
        """The member at this connection, which is alive. None, and it is told so, if it takes no part any more."""
        member = self._members.get(connection)
        if member is None:
            if connection not in self._callers:
                self._send(connection, instructions.SendExpelled, GIVEN_UP)
            return None
        member.heard = self._now
        return member

    def _want(self, want: events.SamplesRequested) -> None:
        member = self._heard(want.connection)
        if member is None:
            return
        if want.size < 1 or want.epochs < 0 or want.count < 1:
            raise Violation(f"There are no {want.count} samples in a dataset of {want.size} for {want.epochs} epochs.")
        if self.samples is None:
            self.samples = Samples(want.size, want.epochs)
        elif self.samples.size != want.size:
            raise Violation(
                f"All workers must train on the same data: {self.samples.size} samples here, and {want.size} there."
            )
        if self.samples.held_by(member.worker) >= MAX_TAKEN:
            raise Violation(f"A worker may hold {MAX_TAKEN} ranges of samples, and this one wants more.")
        given = self.samples.take(member.worker, want.number, want.count, want.epochs)
        self._send(want.connection, instructions.SendSamples, want.number, *(given or ()))

    def _soon(self, soon: events.GradientBegun) -> None:
        """A member will be ready, and can begin to push."""
        member = self._heard(soon.connection)
        if member is None:
            return
        if not 1 <= soon.iteration <= member.iteration or not 1 <= soon.batch_size <= MAX_SAMPLES:
            raise Violation(f"Iteration {soon.iteration} of {soon.batch_size} samples was not granted to this worker.")
        if soon.iteration == member.iteration and member.stage is Stage.COMPUTING:
            if not 0 <= soon.base_version <= self.version:
                raise Violation("An update must be of a version that there was.")
            self._announce(member, soon.base_version, soon.batch_size, None)

    def _announce(self, member: Member, base_version: int, batch_size: int, seconds: float | None) -> None:
        member.step(ANNOUNCE)
        if self._sees_pulls:
            seconds = None  # then the driver saw it begin to compute, too
        else:
            self.ledger.watcher.pulled(self._now, member.worker, base_version)
        if self.ledger.pushes_freely:
            self.ledger.turned(member.worker, self._now, seconds)
        else:
            self._carry_out(self.ledger.ready(member.worker, batch_size, self._now, seconds))

    def _ready(self, ready: events.GradientComputed) -> None:
        member = self._heard(ready.connection)
        if member is None:
            return
        iteration, stage = ready.iteration, member.stage
        if iteration != member.iteration or stage not in RUNNING:
            self._not_expected(member, ready)
            return
        if member.ready:
            return  # it came back, and says again what was heard
        if not 1 <= ready.batch_size <= MAX_SAMPLES or not 0 <= ready.base_version <= self.ledger.version:
            raise Violation(f"An update must be of 1 to {MAX_SAMPLES} samples, and of a version that there was.")
        if not 0 <= ready.compute_seconds < math.inf:
            raise Violation(f"Computing took {ready.compute_seconds} s, says this worker, and that cannot be.")
        member.ready = ready
        if stage is COMPUTING:
            self._announce(member, ready.base_version, ready.batch_size, ready.compute_seconds)
        if member.parts or not self.config.shards:
            self._if_whole(member, ready)

    def _not_expected(self, member: Member, ready: events.GradientComputed) -> None:
        """A member is ready with an iteration that it was not granted, or that is over or cancelled."""
        if not 1 <= ready.iteration <= member.iteration:
            raise Violation(f"Iteration {ready.iteration} was not granted to this worker.")
        over = ready.iteration < member.iteration or member.stage is Stage.CANCELLED
        if over and self.samples:
            self.samples.returned(member.worker, ready.taken)

    def _arrived(self, arrived: events.UpdateArrived) -> None:
        shard, iteration = arrived.shard, arrived.iteration
        self.leases.shards_heard[shard] = self._now
        member = self.roster.training.get(arrived.worker)
        if member is None or member.incarnation != arrived.incarnation:
            self._drop(arrived)  # its worker has left
        elif iteration == member.iteration and member.stage in RUNNING:
            member.parts |= 1 << shard
            if member.ready:
                self._if_whole(member, member.ready)
        elif iteration != member.iteration or member.stage is Stage.CANCELLED:
            self._drop(arrived)
            if not 1 <= iteration <= member.iteration:
                raise Violation(f"Iteration {iteration} was not granted to this worker.", member)

    def _drop(self, arrived: events.UpdateArrived) -> None:
        update = Identity(arrived.worker, arrived.incarnation, arrived.iteration)
        self._out.append(instructions.OrderDrop(update, arrived.shard))

    def _if_whole(self, member: Member, ready: events.GradientComputed) -> None:
        """An update counts when its worker has told of it and all shards have it."""
        if member.parts.bit_count() < self.config.shards or member.stage not in RUNNING:
            return
        member.step(ARRIVE)
        member.ready = None
        member.parts = 0
        loss = ready.loss if ready.loss is not None and math.isfinite(ready.loss) else None
        update = Update(
            member.worker,
            ready.iteration,
            ready.base_version,
            ready.batch_size,
            ready.compute_seconds,
            loss,
            member.incarnation,
        )
        if self.samples:
            self.samples.arrived(member.worker, ready.taken, member.identity)
        self._carry_out(self.ledger.arrived(update, self._now))

    # What is measured

    def _measured(self, measured: events.MetricReported) -> None:
        member = self._heard(measured.connection)
        if member and member.stage is not Stage.WAITING:
            kind = measured.kind[:80]
            self._carry_out(self.ledger.measured(kind, member.worker, measured.value, self._now))

    def _described(self, event: events.ModelDescribed) -> None:
        """Nobody has joined, so there is nothing to decide; nor to save, since shards have nothing yet."""
        policy = self.ledger.policy
        if policy.hears_loss and not policy.mixes:
            self.ledger.measured("momentum", None, event.momentum, self._now)

    def _compared(self, compared: events.UpdatesCompared) -> None:
        for update, cosine in zip(compared.updates, compared.cosines, strict=True):
            self._carry_out(self.ledger.measured("cosine", update, cosine, self._now))
        for update in compared.updates:
            self._tell_if_excluded(update.worker)

    def _tell_if_excluded(self, worker: int) -> None:
        """Tell a member that it is not granted any more, once: it would wait without a word."""
        member = self.roster.training.get(worker)
        if member:
            before, member.exclusion = member.exclusion, self.ledger.policy.exclusion(worker)
            if member.exclusion and not before:
                self._send(member.connection, instructions.SendExcluded, member.exclusion)

    def introduce(self, watcher: Watcher) -> None:
        """Tell one that begins to watch only now which members there are, and what each of them does."""
        for worker, member in self.roster.training.items():
            if member.stage is Stage.WAITING:
                continue
            watcher.joined(self._now, worker, member.incarnation)
            if member.stage in RUNNING:
                watcher.granted(self._now, worker, member.batch_size, self.ledger.gap(worker))
            if member.stage in (Stage.ANNOUNCED, Stage.TURNED):
                version = member.ready.base_version if member.ready else member.granted_version
                watcher.pulled(self._now, worker, version)
                watcher.computed(self._now, worker)
            if member.stage is Stage.TURNED:
                watcher.turned(self._now, worker)

    def blacklist(self) -> dict[int, tuple[float, ...]]:
        """The workers that the policy leaves out, and the cosines for which it does."""
        found = self.ledger.policy.memory().get("blacklist", {})
        return {int(client): tuple(cosines) for client, cosines in found.items()}

    def _pardon(self, pardon: events.WorkersPardoned) -> None:
        if pardon.workers:
            self._carry_out(self.ledger.measured("pardon", pardon.workers, 1.0, self._now))
            for worker in pardon.workers:
                self._tell_if_excluded(worker)
