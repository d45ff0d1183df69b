"""Checkpoints, and the orders that have to wait for them.

A checkpoint is taken when it is due, at a moment when no update is half applied. Until that moment, orders that would
begin something new are put off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.job import events, instructions
from paceline.job.accounting import Watcher
from paceline.job.checkpoints import Checkpoints
from paceline.job.config import JobConfig
from paceline.job.core import JobCore
from paceline.job.identity import Identity
from paceline.job.membership import RUNNING, Member, Stage, Transition
from paceline.job.quiesce import Quiesce
from paceline.policies import Policy, Stream, Turn, Update

MAX_STALENESS = 1 << 20  # versions that an update may be expected to be behind
PutOff = tuple[Turn | Stream, tuple[Identity, ...]]  # an order, and the updates that it was for when it was given


def within_limit(staleness: int | None) -> int | None:
    """Clamp an expected staleness to the limit of the protocol."""
    if staleness is None or 0 <= staleness <= MAX_STALENESS:
        return staleness
    return 0 if staleness < 0 else MAX_STALENESS


class Saving(JobCore):
    """Takes checkpoints, and gives the orders that begin something."""

    def __init__(
        self, policy: Policy, config: JobConfig, watcher: Watcher, restored: Mapping[str, Any] | None, now: float
    ) -> None:
        super().__init__(policy, config, watcher, restored is not None, now)
        self.checkpoints: Checkpoints | None = None
        if config.save and config.shards:
            saved = int(restored["version"]) if restored else None
            self.checkpoints = Checkpoints(config.save, config.shards, saved)
        self._quiesce: Quiesce[PutOff] = Quiesce()
        self._streams_issued = 0
        self._expected: dict[int, int | None] = {}  # worker that has left → what its last Grant expected

    @property
    def is_saving(self) -> bool:
        """Is a checkpoint being written, or waited for?"""
        return self._quiesce.is_awaited or (self.checkpoints is not None and self.checkpoints.writing is not None)

    # Orders that begin something new

    def _turn(self, turn: Turn) -> None:
        self.ledger.note_turn(turn, self._now)
        member = self.roster.training[turn.worker]
        if self._quiesce.is_awaited:
            self._quiesce.put_off((turn, (member.identity,)))
        else:
            self._begin_push(member)

    def _begin_push(self, member: Member) -> None:
        if member.stage is Stage.ANNOUNCED:
            member.step(Transition.TURN)
            self._send(member.connection, instructions.SendPushNow, member.iteration)

    def _stream(self, stream: Stream) -> None:
        updates = tuple(self.roster.training[worker].identity for worker in stream.workers)
        if self._quiesce.is_awaited:
            self._quiesce.put_off((stream, updates))
        else:
            self._begin_stream(stream, updates)

    def _begin_stream(self, stream: Stream, identities: tuple[Identity, ...]) -> None:
        """Order that these updates be applied as they come. Those that were put off may be over by now."""
        known = {
            identity: weight
            for identity, weight in zip(identities, stream.weights, strict=True)
            if self._goes_on(identity)
        }
        self._streams_issued += 1
        self._quiesce.begun(known)
        turns = self._turns_of(identities)
        expected = within_limit(stream.expected_staleness)
        number, weights = self._streams_issued, tuple(known.values())
        self._out.append(instructions.OrderStream(number, tuple(known), weights, stream.in_order, turns, expected))

    def _goes_on(self, update: Identity) -> bool:
        """Is its worker still at this iteration, and was it not cancelled?"""
        member = self.roster.training.get(update.worker)
        return member is not None and member.identity == update and member.stage in RUNNING

    def _turns_of(self, updates: Sequence[Update | Identity]) -> int:
        """How many Applies like this one make up a round, as far as the policy knows; the most, if they differ."""
        turns, training = 1, self.roster.training
        for update in updates:
            member = training.get(update.worker)
            expected = member.expected if member else self._expected.get(update.worker)
            if expected is not None and expected >= turns:
                turns = expected + 1
        return turns

    # Checkpoints

    def _save_if_due(self) -> None:
        checkpoints = self.checkpoints
        if checkpoints and not self._quiesce.is_awaited and checkpoints.is_due(self.version, self._now):
            self._quiesce.await_quiet()
            self._save_if_quiet()

    def _save_now(self, _: events.SaveRequested) -> None:
        checkpoints = self.checkpoints
        if checkpoints and not self.is_saving and self.has_begun and checkpoints.saved != self.version:
            self._quiesce.await_quiet()
            self._save_if_quiet()

    def _shards_are_done_with(self, update: Identity) -> None:
        self._quiesce.settled(update)
        self._save_if_quiet()

    def _save_if_quiet(self) -> None:
        """Take the checkpoint that is awaited, if nothing is under way; then carry out what was put off."""
        if not self._quiesce.is_quiet:
            return
        assert self.checkpoints is not None
        self.checkpoints.begin(self.version, self._now)
        self._out.append(instructions.OrderSave(self.version, self.snapshot()))
        for order, updates in self._quiesce.resume():
            if isinstance(order, Stream):
                self._begin_stream(order, updates)
            elif self._goes_on(updates[0]):
                self._begin_push(self.roster.training[order.worker])

    def _saved(self, saved: events.ShardSaved) -> None:
        self.leases.shards_heard[saved.shard] = self._now
        if self.checkpoints is None:
            return
        if saved.error:
            self._give_up_checkpoint(saved.version, saved.error)
        elif self.checkpoints.written(saved.shard, saved.version):
            self._out.append(instructions.StoreCheckpoint(saved.version))

    def _stored(self, stored: events.CheckpointStored) -> None:
        if self.checkpoints is None:
            return
        if stored.error:
            self._give_up_checkpoint(stored.version, stored.error)
        else:
            self.checkpoints.stored(stored.version)

    def _give_up_checkpoint(self, version: int, error: str) -> None:
        assert self.checkpoints is not None
        if self.checkpoints.failed(version, self._now):
            text = f"the checkpoint of version {version} cannot be written: {error}"
            self._out += [instructions.LogLine(text, warns=True), instructions.ForgetCheckpoint(version)]
