"""The third layer of a JobState: turns each decision of the policy into instructions to workers and shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline import policies
from paceline.job import instructions
from paceline.job.accounting import Watcher
from paceline.job.clipping import NOT_CLIPPED, Factors
from paceline.job.config import JobConfig
from paceline.job.identity import Identity, identity_of
from paceline.job.membership import Member, Stage, Transition
from paceline.job.samples import Samples
from paceline.job.saving import CheckpointLayer, clamp_staleness
from paceline.policies import Decision, Policy, Update

GRANT = Transition.GRANT  # a module-level name, because looking up an enum's member is slow


class DecisionLayer(CheckpointLayer):
    """Carries out the policy's decisions."""

    def __init__(
        self, policy: Policy, config: JobConfig, watcher: Watcher, restored: Mapping[str, Any] | None, now: float
    ) -> None:
        super().__init__(policy, config, watcher, restored, now)
        self._factors: dict[Identity, Factors] = {}  # of updates that were clipped and are not applied yet
        self._clipped: set[int] = set()  # workers whose updates were clipped
        self._kept: dict[int, Identity] = {}  # slot → the clipped update in it

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            DECISION_HANDLERS[type(decision)](self, decision)
        if self.checkpoints:
            self._save_if_due()

    def _grant(self, grant: policies.Grant) -> None:
        self.ledger.note_granted(grant, self._now)
        member = self.roster.training[grant.worker]
        member.step(GRANT)
        member.iteration += 1
        member.granted_version = version = self.ledger.version
        member.batch_size = grant.batch_size
        member.expected_staleness = clamp_staleness(grant.expected_staleness)
        member.pull = not self.config.streams or member.applied_version != version
        self._send_grant(member)

    def _send_grant(self, member: Member) -> None:
        """Send a member its last Grant."""
        if member.connection is not None:
            self._out.append(
                instructions.SendGrant(
                    member.connection,
                    member.iteration,
                    member.granted_version,
                    member.batch_size,
                    member.pull,
                    member.expected_staleness,
                    None if self.config.shards else member.weight,
                )
            )

    def _wake_at(self, wake: policies.WakeAt) -> None:
        self._out.append(instructions.SetTimer(wake.time))

    def _add(self, add: policies.Add) -> None:
        self._out.append(
            instructions.OrderAdd(identity_of(add.update), add.sum, add.weight, self._factors_of(add.update))
        )

    def _apply(self, apply: policies.Apply) -> None:
        self.ledger.note_applied(apply, self._now)
        version, updates, turns, compare = self.ledger.version, apply.updates, 1, False
        if not self.config.streams:  # with streaming, the shards have applied the update already
            turns = self._turns_per_round(updates)
            compare = len(updates) > 1 and self.ledger.policy.compares
        clips = self._clips_of(apply) if self._factors else ()
        self._out.append(instructions.OrderApply(version, apply, turns, compare, clips))
        training = self.roster.training
        for update, weight in zip(updates, apply.weights, strict=True):
            member = training.get(update.worker)
            if member and member.incarnation == update.incarnation:
                member.applied_iteration = update.iteration
                member.applied_version = version
                member.weight = weight
            else:
                self._applied[update.worker, update.incarnation] = update.iteration
        if self.samples:
            self._count_trained(self.samples, updates)
        if self.config.streams:
            for update in updates:
                self._settle_update(identity_of(update))

    def _factors_of(self, update: Update) -> Factors:
        return self._factors.get(identity_of(update), NOT_CLIPPED) if self._factors else NOT_CLIPPED

    def _clips_of(self, apply: policies.Apply) -> tuple[Factors, ...]:
        """Return the factors of clipped updates, and forget them; empty if no update was clipped.

        Running sums contain the factors already.
        """
        factors = tuple(self._factors_of(update) for update in apply.updates)
        for update in {identity_of(each) for each in apply.updates}.difference(self._kept.values()):
            self._factors.pop(update, None)
        return () if all(each == NOT_CLIPPED for each in factors) else factors

    def _count_trained(self, samples: Samples, updates: Iterable[Update]) -> None:
        """Count the samples of these updates as done, and report the progress."""
        for update in updates:
            samples.done(identity_of(update))
        done, size = samples.trained, samples.size
        epoch = max(done - 1, 0) // size  # of the last sample: after a whole epoch, the next one has not begun
        self.ledger.watcher.progressed(self._now, epoch, done, samples.total)

    def _discard(self, discard: policies.Discard) -> None:
        self.ledger.note_discarded(discard, self._now)
        identity = identity_of(discard.update)
        self._settle_update(identity)
        self._factors.pop(identity, None)
        member = self.roster.training.get(identity.worker)
        if member and member.incarnation == identity.incarnation:
            member.weight = 0.0
        self._out.append(instructions.OrderDiscard(discard))
        if self.samples:
            self.samples.dropped(identity)

    def _keep(self, keep: policies.Keep) -> None:
        self.ledger.note_kept(keep, self._now)
        self._out.append(instructions.OrderKeep(keep))
        if self._factors:
            if old := self._kept.pop(keep.slot, None):
                self._factors.pop(old, None)
            if (identity := identity_of(keep.update)) in self._factors:
                self._kept[keep.slot] = identity
        if self.samples:
            self._count_trained(self.samples, (keep.update,))

    def _cancel(self, cancel: policies.Cancel) -> None:
        self.ledger.note_cancelled(cancel, self._now)
        member = self.roster.training[cancel.worker]
        self._send(member.connection, instructions.SendCancel, member.iteration)
        self._drop_current_update(member)
        member.step(Transition.CANCEL)

    def _drop_current_update(self, member: Member) -> None:
        """Drop what has arrived of the update of this iteration, and take back its samples."""
        if self._visits:
            self._send_visits(self._visits.drop(member.worker))
        if self.config.streams:
            if member.stage in (Stage.ANNOUNCED, Stage.TURNED):
                self._out.append(instructions.OrderDrop(member.identity))
                self._settle_update(member.identity)
        else:
            holders = [shard for shard in range(self.config.shards) if member.parts >> shard & 1]
            self._out += [instructions.OrderDrop(member.identity, shard) for shard in holders]
        member.parts = member.held = 0
        member.size = None
        if self.samples and member.update is not None:
            self.samples.returned(member.worker, member.taken)
        member.update = None


#: The method that carries out each kind of decision.
DECISION_HANDLERS: dict[type, Callable[[DecisionLayer, Any], None]] = {
    policies.Grant: DecisionLayer._grant,
    policies.Turn: DecisionLayer._turn,
    policies.Stream: DecisionLayer._stream,
    policies.Add: DecisionLayer._add,
    policies.Apply: DecisionLayer._apply,
    policies.Discard: DecisionLayer._discard,
    policies.Keep: DecisionLayer._keep,
    policies.Cancel: DecisionLayer._cancel,
    policies.WakeAt: DecisionLayer._wake_at,
}
