"""The decisions of the policy, carried out: each becomes instructions for workers and shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline import policies
from paceline.job import instructions
from paceline.job.identity import identity_of
from paceline.job.membership import Member, Stage, Transition
from paceline.job.samples import Samples
from paceline.job.saving import Saving, within_limit
from paceline.policies import Decision, Update

GRANT = Transition.GRANT  # needed all the time, and a member of an enum takes long to look up


class Decisions(Saving):
    """Carries out decisions."""

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            CARRIERS[type(decision)](self, decision)
        if self.checkpoints:
            self._save_if_due()

    def _grant(self, grant: policies.Grant) -> None:
        self.ledger.note_granted(grant, self._now)
        member = self.roster.training[grant.worker]
        member.step(GRANT)
        member.iteration += 1
        member.granted_version = version = self.ledger.version
        member.batch_size = grant.batch_size
        member.expected = within_limit(grant.expected_staleness)
        member.pull = not self.config.streams or member.last_applied != version
        self._send_grant(member)

    def _send_grant(self, member: Member) -> None:
        if member.connection is not None:
            self._out.append(
                instructions.SendGrant(
                    member.connection,
                    member.iteration,
                    member.granted_version,
                    member.batch_size,
                    member.pull,
                    member.expected,
                )
            )

    def _wake_at(self, wake: policies.WakeAt) -> None:
        self._out.append(instructions.SetTimer(wake.time))

    def _add(self, add: policies.Add) -> None:
        self._out.append(instructions.OrderAdd(identity_of(add.update), add.sum, add.weight))

    def _apply(self, apply: policies.Apply) -> None:
        self.ledger.note_applied(apply, self._now)
        version, updates, turns, compare = self.ledger.version, apply.updates, 1, False
        if not self.config.streams:  # streamed, the shards have applied it already
            turns = self._turns_of(updates)
            compare = len(updates) > 1 and self.ledger.policy.compares
        self._out.append(instructions.OrderApply(version, apply, turns, compare))
        training = self.roster.training
        for update in updates:
            member = training.get(update.worker)
            if member and member.incarnation == update.incarnation:
                member.applied = update.iteration
                member.last_applied = version
            else:
                self._applied[update.worker, update.incarnation] = update.iteration
        if self.samples:
            self._trained(self.samples, updates)
        if self.config.streams:
            for update in updates:
                self._shards_are_done_with(identity_of(update))

    def _trained(self, samples: Samples, updates: Iterable[Update]) -> None:
        """The samples of these updates are done."""
        for update in updates:
            samples.done(identity_of(update))
        done, size = samples.trained, samples.size
        self.ledger.watcher.progressed(self._now, done // size, done, size * samples.epochs)

    def _discard(self, discard: policies.Discard) -> None:
        self.ledger.note_discarded(discard, self._now)
        identity = identity_of(discard.update)
        self._shards_are_done_with(identity)
        self._out.append(instructions.OrderDiscard(discard))
        if self.samples:
            self.samples.dropped(identity)

    def _keep(self, keep: policies.Keep) -> None:
        self.ledger.note_kept(keep, self._now)
        self._out.append(instructions.OrderKeep(keep))
        if self.samples:
            self._trained(self.samples, (keep.update,))

    def _cancel(self, cancel: policies.Cancel) -> None:
        self.ledger.note_cancelled(cancel, self._now)
        member = self.roster.training[cancel.worker]
        self._send(member.connection, instructions.SendCancel, member.iteration)
        self._drop_parts(member)
        member.step(Transition.CANCEL)

    def _drop_parts(self, member: Member) -> None:
        """The update of this iteration will never be whole."""
        if self.config.streams:
            if member.stage in (Stage.ANNOUNCED, Stage.TURNED):
                self._out.append(instructions.OrderDrop(member.identity))
                self._shards_are_done_with(member.identity)
        else:
            have_it = [shard for shard in range(self.config.shards) if member.parts >> shard & 1]
            self._out += [instructions.OrderDrop(member.identity, shard) for shard in have_it]
        member.parts = 0
        if self.samples and member.ready:
            self.samples.returned(member.worker, member.ready.taken)
        member.ready = None


#: How each kind of decision is carried out.
CARRIERS: dict[type, Callable[[Decisions, Any], None]] = {
    policies.Grant: Decisions._grant,
    policies.Turn: Decisions._turn,
    policies.Stream: Decisions._stream,
    policies.Add: Decisions._add,
    policies.Apply: Decisions._apply,
    policies.Discard: Decisions._discard,
    policies.Keep: Decisions._keep,
    policies.Cancel: Decisions._cancel,
    policies.WakeAt: Decisions._wake_at,
}
