"""The fourth layer of a JobState: samples, gradients and updates of the members, and measured values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from paceline.job import events, instructions
from paceline.job.accounting import Watcher
from paceline.job.clipping import NOT_CLIPPED, Clipping, Size
from paceline.job.config import JobConfig
from paceline.job.decisions import DecisionLayer
from paceline.job.identity import Identity
from paceline.job.limits import (
    MAX_EPOCHS,
    MAX_SAMPLES,
    MAX_SECONDS,
    MAX_TAKEN,
    loss_of,
    metric_of,
    seconds_of,
)
from paceline.job.membership import RUNNING, Member, Stage, Transition
from paceline.job.samples import Samples
from paceline.job.visits import Visit, Visits
from paceline.policies import Policy, Update
from paceline.policies.contract import DRIVER_KINDS

# Looking up an enum's member takes ten times as long as a module-level name, and these are used for every update.
COMPUTING, ANNOUNCE, ARRIVE = Stage.COMPUTING, Transition.ANNOUNCE, Transition.ARRIVE
#: A worker that computes other batches than it was granted, so many times in a row, does not follow the policy.
IGNORED = 5
GIVEN_UP = "This worker has been given up; it must join again."


class Violation(ValueError):
    """A worker has broken the protocol. The message is one sentence that says how.

    member: the worker that broke it, if the current event did not come from that worker itself.
    """

    def __init__(self, reason: str, member: Member | None = None) -> None:
        super().__init__(reason)
        self.member = member


class IterationLayer(DecisionLayer):
    """Handles the events of an iteration. Each handler is named after its event."""

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
        self._restored = restored is not None
        self._described: events.ModelDescribed | None = None
        self._warned_of_batches = False
        self._largest_given = 1  # samples in the largest update so far whose samples the job had handed out
        self._claims: dict[int, tuple[int, float]] = {}  # connection → the taken number that it claims, and since when

    def _renew_lease(self, connection: int) -> Member | None:
        """Return the member at this connection after renewing its lease.

        If there is none, tell the worker that it has been given up, and return None.
        """
        member = self._members.get(connection)
        if member is None:
            if connection not in self._claims:
                self._send(connection, instructions.SendExpelled, GIVEN_UP)
            return None
        member.heard = self._now
        return member

    # Samples

    def _samples_requested(self, request: events.SamplesRequested) -> None:
        member = self._renew_lease(request.connection)
        if member is None:
            return
        count, size, epochs, planned = request.count, request.size, request.epochs, request.planned or 0
        if not (1 <= size <= MAX_SAMPLES and count >= 1 and 0 <= epochs <= MAX_EPOCHS and 0 <= planned <= MAX_EPOCHS):
            raise Violation(f"A request for {count} of {size} samples for {epochs} epochs makes no sense.")
        if self.samples is None:
            self.samples = Samples(size, epochs)
        elif self.samples.size != size:
            raise Violation(
                f"All workers must train on the same data: this worker has {size} samples, "
                f"and the job has {self.samples.size}."
            )
        if self.samples.held_by(member.worker) >= MAX_TAKEN:
            raise Violation(f"A worker may hold {MAX_TAKEN} ranges of samples, and this one wants more.")
        self.samples.plan(request.planned)
        if request.ends and member.worker == 0:
            self.samples.end()
        taken = self.samples.take(member.worker, request.number, count, epochs)
        self._send(request.connection, instructions.SendSamples, request.number, *(taken or ()))

    # Gradients and updates

    def _gradient_begun(self, begun: events.GradientBegun) -> None:
        member = self._renew_lease(begun.connection)
        if member is None:
            return
        iteration, batch_size = begun.iteration, begun.batch_size
        if not 1 <= iteration <= member.iteration or not 1 <= batch_size <= MAX_SAMPLES:
            raise Violation(f"Iteration {iteration} with {batch_size} samples was not granted to this worker.")
        if iteration == member.iteration and member.stage is Stage.COMPUTING:
            if not 0 <= begun.base_version <= self.version:
                raise Violation(f"There is no version {begun.base_version} to compute an update from.")
            self._report_own_batch(member, begun.taken)
            self._announce(member, begun.base_version, self._counted(member, batch_size, begun.taken or None), None)

    def _gradient_computed(self, computed: events.GradientComputed) -> None:
        """Build the Update that is handed on from here: to the policy, its decisions, and the orders to the shards."""
        member = self._renew_lease(computed.connection)
        if member is None:
            return
        iteration, stage = computed.iteration, member.stage
        if iteration != member.iteration or stage not in RUNNING:
            self._return_samples(member, computed)
            return
        if member.update is not None:
            return  # the worker has reconnected and repeats a message that had arrived
        batch_size, base_version, seconds = (
            computed.batch_size,
            computed.base_version,
            seconds_of(computed.compute_seconds),
        )
        if not 1 <= batch_size <= MAX_SAMPLES:
            raise Violation(f"An update must be computed from 1 to {MAX_SAMPLES} samples, not {batch_size}.")
        if not 0 <= base_version <= self.ledger.version:
            raise Violation(f"There is no version {base_version} to compute an update from.")
        if seconds is None:
            raise Violation(f"A gradient takes 0 to {MAX_SECONDS:.0f} s to compute, not {computed.compute_seconds}.")
        self._report_own_batch(member, computed.taken)
        self._check_batch(member, batch_size, computed.taken)
        batch_size, loss = self._counted(member, batch_size, computed.taken), loss_of(computed.loss)
        update = Update(member.worker, iteration, base_version, batch_size, seconds, loss, member.incarnation)
        member.update, member.taken = update, computed.taken
        if stage is COMPUTING:
            self._announce(member, base_version, batch_size, seconds)
        if member.parts or not self.config.shards:
            self._count_if_whole(member, update)

    def _visit_ended(self, ended: events.VisitEnded) -> None:
        member = self._renew_lease(ended.connection)
        if member and self._visits and ended.iteration == member.iteration:
            self._send_visits(self._visits.end(Visit(member.worker, ended.shard, ended.part)))

    def _counted(self, member: Member, claimed: int, taken: tuple[int, ...] | None = None) -> int:
        """Return how many samples an update counts for: at most as many as the worker was given.

        taken: the requests that it was computed from; None: not known yet, so all that the worker holds.
        A worker that names no samples of a job that serves them counts for no more than the largest update that names
        its own. If the job serves no samples, only a batch size that the policy has granted limits the claim.
        """
        if self.samples is None:
            return claimed if member.batch_size is None else min(claimed, member.batch_size)
        given = self.samples.given(member.worker, taken)
        counted = min(claimed, given or self._largest_given)
        if given and taken is not None:
            self._largest_given = max(self._largest_given, counted)
        return counted

    def _check_batch(self, member: Member, claimed: int, taken: tuple[int, ...]) -> None:
        """Warn once if a worker's script does not follow the batch sizes that the policy grants."""
        if taken or member.batch_size in (None, claimed):  # served samples follow the Grant, except for an epoch's last
            member.ignored_batches = 0
            return
        member.ignored_batches += 1
        if member.ignored_batches == IGNORED and not self._warned_of_batches:
            self._warned_of_batches = True
            text = (
                f"the policy tunes batch sizes, and worker {member.worker} does not follow: it was granted "
                f"{member.batch_size} samples, and computed {claimed}. Take the batches from session.batches or "
                f"session.loader, or read optimizer.granted_batch (with paceline.coordinate: Permission.batch_size)"
            )
            self._out.append(instructions.LogLine(text, warns=True))

    def _report_own_batch(self, member: Member, taken: tuple[int, ...]) -> None:
        """Tell the policy a member's own batch size, once: the samples that it requested for a Grant without a batch.

        It may have got fewer. Its first samples may be the last of an epoch, or those that another worker returned.
        """
        if self.samples and not member.own_batch and member.batch_size is None:
            member.own_batch = min(self.samples.asked(member.worker, taken), MAX_SAMPLES)
            if member.own_batch:
                self._carry_out(self.ledger.own_batch(member.worker, member.own_batch, self._now))

    def _announce(self, member: Member, base_version: int, batch_size: int, seconds: float | None) -> None:
        """Tell the policy that a member is ready to push. seconds: how long it has computed, if it is done."""
        member.step(ANNOUNCE)
        if self._sees_pulls:
            seconds = None  # the driver also reports when the computation begins
        else:
            self.ledger.watcher.pulled(self._now, member.worker, base_version)
        if self.ledger.pushes_freely:
            self.ledger.turned(member.worker, self._now, seconds)
        else:
            self._carry_out(self.ledger.ready(member.worker, batch_size, self._now, seconds))

    def _return_samples(self, member: Member, computed: events.GradientComputed) -> None:
        """Take back the samples of a gradient whose iteration is over. Raise Violation if it was never granted."""
        if not 1 <= computed.iteration <= member.iteration:
            raise Violation(f"Iteration {computed.iteration} was not granted to this worker.")
        is_over = computed.iteration < member.iteration or member.stage is Stage.CANCELLED
        if is_over and self.samples:
            self.samples.returned(member.worker, computed.taken)

    def _update_arrived(self, arrived: events.UpdateArrived) -> None:
        shard, iteration = arrived.shard, arrived.iteration
        self.leases.shards_heard[shard] = self._now
        member = self.roster.training.get(arrived.worker)
        if member is None or member.incarnation != arrived.incarnation:
            self._drop(arrived)  # the worker has left
        elif iteration == member.iteration and member.stage in RUNNING:
            if arrived.size and not member.parts >> shard & 1:
                gradients, statistics, rate = member.size or (0.0, 0.0, 0.0)
                its = arrived.size
                member.size = (gradients + its[0], statistics + its[1], max(rate, its[2]))
            member.parts |= 1 << shard
            if member.update is not None:
                self._count_if_whole(member, member.update)
            self._tell_if_held(member)
        elif iteration != member.iteration or member.stage is Stage.CANCELLED:
            self._drop(arrived)
            if not 1 <= iteration <= member.iteration:
                raise Violation(f"Iteration {iteration} was not granted to this worker.", member)

    def _update_held_back(self, held: events.UpdateHeldBack) -> None:
        self.leases.shards_heard[held.shard] = self._now
        member = self.roster.training.get(held.worker)
        if member is None or member.stage not in RUNNING:
            return
        if (member.incarnation, member.iteration) == (held.incarnation, held.iteration):
            member.held |= 1 << held.shard
            self._tell_if_held(member)

    def _tell_if_held(self, member: Member) -> None:
        """Tell the policy of an update that every shard has, and that a shard cannot apply yet."""
        if member.held and (member.held | member.parts).bit_count() == self.config.shards:
            self._carry_out(self.ledger.held(member.worker, self._now))

    def _drop(self, arrived: events.UpdateArrived) -> None:
        """Order a shard to drop the update that it has just received."""
        update = Identity(arrived.worker, arrived.incarnation, arrived.iteration)
        self._out.append(instructions.OrderDrop(update, arrived.shard))

    def _count_if_whole(self, member: Member, update: Update) -> None:
        """Tell the policy of an update that has arrived at all shards."""
        if member.parts.bit_count() < self.config.shards or member.stage not in RUNNING:
            return
        member.step(ARRIVE)
        member.update = None
        member.parts = member.held = 0
        if self._visits:  # the shards may tell of the last visits before the worker does
            self._send_visits(self._visits.drop(member.worker))
        if self.clipping and member.size:
            self._clip(self.clipping, member, member.size, update)
        if self.samples:
            self.samples.arrived(member.worker, member.taken, member.identity)
        self._carry_out(self.ledger.arrived(update, self._now))

    def _clip(self, clipping: Clipping, member: Member, squares: tuple[float, float, float], update: Update) -> None:
        """Note the factors of an update that is larger than usual. They take effect when the update is applied."""
        gradients, statistics, rate = squares
        member.size = None
        factors = clipping.factors(update.worker, Size(math.sqrt(gradients), math.sqrt(statistics), rate))
        if factors == NOT_CLIPPED:
            return
        worker, factor = update.worker, factors.weight * factors.rate
        self._factors[member.identity] = factors
        self.ledger.watcher.clipped(self._now, worker, update.iteration, factor, update.incarnation)
        if worker not in self._clipped:
            self._clipped.add(worker)
            what = "an update" if factors.weight <= factors.rate else "a learning rate"
            text = (
                f"worker {worker} sent {what} {clipping.max_norm / min(factors):.3g} times as large as usual; it is "
                f"scaled down to {clipping.max_norm:g} times (--max-norm), and so are later ones"
            )
            self._out.append(instructions.LogLine(text, warns=True))

    # Measured values

    def _metric_reported(self, metric: events.MetricReported) -> None:
        member = self._renew_lease(metric.connection)
        if member and member.stage is not Stage.WAITING:
            kind, value = metric.kind[:80], metric_of(metric.value)
            if kind in DRIVER_KINDS:  # a worker must not steer a policy by a value that only the job may tell it
                self.ledger.watcher.measured(self._now, member.worker, kind, value)
            else:
                self._carry_out(self.ledger.measured(kind, member.worker, value, self._now))

    def _model_described(self, described: events.ModelDescribed) -> None:
        """Tell the policy the momentum. No worker has joined yet, so it makes no decisions."""
        if self._visits and described.pieces:  # a visit exchanges whole pieces
            self._visits = Visits(self.config.shards, min(self.config.visits, described.pieces))
        self._described = described
        if not self._restored:  # a restored job knows its model before it has begun, so `introduce` tells of it
            self._report_model(self.ledger.watcher)
        policy = self.ledger.policy
        if policy.hears_loss and not policy.mixes:
            self.ledger.measured("momentum", None, described.momentum, self._now)

    def _updates_compared(self, compared: events.UpdatesCompared) -> None:
        for update, cosine in zip(compared.updates, compared.cosines, strict=True):
            self._carry_out(self.ledger.measured("cosine", update, cosine, self._now))
        for update in compared.updates:
            self._notify_exclusion(update.worker)

    def _workers_pardoned(self, pardoned: events.WorkersPardoned) -> None:
        if pardoned.workers:
            self._carry_out(self.ledger.measured("pardon", pardoned.workers, 1.0, self._now))
            for worker in pardoned.workers:
                self._notify_exclusion(worker)

    def _notify_exclusion(self, worker: int) -> None:
        """Tell a member once that the policy excludes it. Otherwise it would wait for a Grant without knowing why."""
        member = self.roster.training.get(worker)
        if member:
            before, member.exclusion = member.exclusion, self.ledger.policy.exclusion(worker)
            if member.exclusion and not before:
                self._send(member.connection, instructions.SendExcluded, member.exclusion)

    def blacklist(self) -> dict[int, tuple[float, ...]]:
        """Return the workers that the policy excludes, and the cosines that are its reason."""
        blacklist = self.ledger.policy.memory().get("blacklist", {})
        return {int(client): tuple(cosines) for client, cosines in blacklist.items()}

    # Watchers

    def _report_model(self, watcher: Watcher) -> None:
        """Report the model, if it is known."""
        if self._described and self._described.elements:
            watcher.described(self._now, self._described.elements, self._described.optimizer)

    def introduce(self, watcher: Watcher) -> None:
        """Report the model, the members and the stage of each to a watcher that begins to watch now."""
        self._report_model(watcher)
        for worker, member in self.roster.training.items():
            if member.stage is Stage.WAITING:
                continue
            watcher.joined(self._now, worker, member.incarnation)
            if member.stage in RUNNING:
                watcher.granted(self._now, worker, member.batch_size, self.ledger.gap(worker))
            if member.stage in (Stage.ANNOUNCED, Stage.TURNED):
                version = member.update.base_version if member.update is not None else member.granted_version
                watcher.pulled(self._now, worker, version)
                watcher.computed(self._now, worker)
            if member.stage is Stage.TURNED:
                watcher.turned(self._now, worker)
