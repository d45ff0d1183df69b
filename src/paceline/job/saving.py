"""The second layer of a JobState: checkpoints, and the orders that must wait for them.

A checkpoint is taken when it is due and no update is partly applied. Until then, orders that would begin a new update
are postponed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.job import events, instructions
from paceline.job.accounting import Watcher
from paceline.job.checkpoints import RETRY, Checkpoints
from paceline.job.config import JobConfig
from paceline.job.core import CoreLayer
from paceline.job.identity import Identity
from paceline.job.membership import RUNNING, Member, Stage, Transition
from paceline.job.quiesce import Quiesce
from paceline.job.visits import Visit, Visits
from paceline.policies import Policy, Stream, Turn, Update

MAX_STALENESS = 1 << 20  # the largest expected staleness that the protocol carries
Postponed = tuple[Turn | Stream, tuple[Identity, ...]]  # a postponed decision, and the updates that it was made for


def clamp_staleness(staleness: int | None) -> int | None:
    """Clamp an expected staleness to the protocol's limit."""
    if staleness is None or 0 <= staleness <= MAX_STALENESS:
        return staleness
    return 0 if staleness < 0 else MAX_STALENESS


class CheckpointLayer(CoreLayer):
    """Takes checkpoints, and gives the orders that begin a push or a stream."""

    def __init__(
        self, policy: Policy, config: JobConfig, watcher: Watcher, restored: Mapping[str, Any] | None, now: float
    ) -> None:
        super().__init__(policy, config, watcher, restored is not None, now)
        self.checkpoints: Checkpoints | None = None
        if config.save and config.shards:
            # Weights that a worker provides are in no checkpoint yet.
            saved = int(restored["version"]) if restored and config.provider is None else None
            self.checkpoints = Checkpoints(config.save, config.shards, saved)
        self._quiesce: Quiesce[Postponed] = Quiesce()
        self._streams_issued = 0
        self._visits = Visits(config.shards, config.visits) if config.visits else None
        self._departed_staleness: dict[int, int | None] = {}  # worker that left → expected staleness of its last Grant

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is being written or waits for quiescence."""
        return self._quiesce.is_awaited or (self.checkpoints is not None and self.checkpoints.writing is not None)

    # Orders that begin a push or a stream

    def _turn(self, turn: Turn) -> None:
        """Carry out a Turn, or postpone it while a checkpoint waits for quiescence."""
        self.ledger.note_turn(turn, self._now)
        member = self.roster.training[turn.worker]
        if self._quiesce.is_awaited:
            self._quiesce.postpone((turn, (member.identity,)))
        else:
            self._begin_push(member)

    def _begin_push(self, member: Member) -> None:
        """Tell a member to push the update that it announced."""
        if member.stage is Stage.ANNOUNCED:
            member.step(Transition.TURN)
            # A gradient that is still being computed is pushed in the order in which it is computed.
            member.visits = self._visits is not None and member.update is not None
            self._send_turn(member)
            if self._visits and member.visits:
                self._send_visits(self._visits.begin(member.worker))

    def _send_turn(self, member: Member) -> None:
        parts = self._visits.parts if self._visits and member.visits else 0
        self._send(member.connection, instructions.SendPushNow, member.iteration, parts)

    def _send_visits(self, visits: Iterable[Visit]) -> None:
        for visit in visits:
            member = self.roster.training[visit.worker]
            self._send(member.connection, instructions.SendVisit, member.iteration, visit.shard, visit.part)

    def _stream(self, stream: Stream) -> None:
        """Carry out a Stream, or postpone it while a checkpoint waits for quiescence."""
        updates = tuple(self.roster.training[worker].identity for worker in stream.workers)
        if self._quiesce.is_awaited:
            self._quiesce.postpone((stream, updates))
        else:
            self._begin_stream(stream, updates)

    def _begin_stream(self, stream: Stream, identities: tuple[Identity, ...]) -> None:
        """Order the shards to stream these updates. If the Stream was postponed, leave out updates that are over."""
        running = {
            identity: weight
            for identity, weight in zip(identities, stream.weights, strict=True)
            if self._is_running(identity)
        }
        self._streams_issued += 1
        self._quiesce.begun(running)
        turns = self._turns_per_round(identities)
        expected = clamp_staleness(stream.expected_staleness)
        number, weights = self._streams_issued, tuple(running.values())
        report_held = self.ledger.policy.hears_held and len(running) > 1
        self._out.append(
            instructions.OrderStream(number, tuple(running), weights, stream.in_order, turns, expected, report_held)
        )

    def _is_running(self, update: Identity) -> bool:
        """Return True if the worker of this update still runs the same iteration."""
        member = self.roster.training.get(update.worker)
        return member is not None and member.identity == update and member.stage in RUNNING

    def _turns_per_round(self, updates: Sequence[Update | Identity]) -> int:
        """Return the number of Applies that make up a round, from the staleness that the policy expects.

        If the updates differ in that, return the largest number. If nothing is known, return 1.
        """
        turns, training = 1, self.roster.training
        for update in updates:
            member = training.get(update.worker)
            expected = member.expected_staleness if member else self._departed_staleness.get(update.worker)
            if expected is not None and expected >= turns:
                turns = expected + 1
        return turns

    # Checkpoints

    def _save_if_due(self) -> None:
        """Begin a checkpoint if it is due."""
        checkpoints = self.checkpoints
        if checkpoints and not self._quiesce.is_awaited and checkpoints.is_due(self.version, self._now):
            self._quiesce.await_quiet()
            self._save_if_quiet()

    def _save_requested(self, _: events.SaveRequested) -> None:
        checkpoints = self.checkpoints
        if checkpoints and not self.is_saving and self.has_begun and checkpoints.saved != self.version:
            self._quiesce.await_quiet()
            self._save_if_quiet()

    def _settle_update(self, update: Identity) -> None:
        """Record that the shards have applied or dropped an update. A checkpoint may be waiting for that."""
        self._quiesce.settled(update)
        self._save_if_quiet()

    def _save_if_quiet(self) -> None:
        """If the job is quiescent, order the awaited checkpoint and then carry out the postponed decisions."""
        if not self._quiesce.is_quiet:
            return
        assert self.checkpoints is not None
        self.checkpoints.begin(self.version, self._now)
        self._out.append(instructions.OrderSave(self.version, self.snapshot()))
        for decision, updates in self._quiesce.resume():
            if isinstance(decision, Stream):
                self._begin_stream(decision, updates)
            elif self._is_running(updates[0]):
                self._begin_push(self.roster.training[decision.worker])

    def _shard_saved(self, saved: events.ShardSaved) -> None:
        self.leases.shards_heard[saved.shard] = self._now
        if self.checkpoints is None:
            return
        if saved.error:
            self._give_up_checkpoint(saved.version, saved.error, saved.is_spoiled)
        elif self.checkpoints.written(saved.shard, saved.version):
            self._out.append(instructions.StoreCheckpoint(saved.version))

    def _checkpoint_stored(self, stored: events.CheckpointStored) -> None:
        if self.checkpoints is None:
            return
        if stored.error:
            self._give_up_checkpoint(stored.version, stored.error)
        else:
            if self.checkpoints.error:
                text = f"The checkpoint of version {stored.version} was written; checkpoints work again."
                self._out.append(instructions.LogLine(text, warns=True))
            self.checkpoints.stored(stored.version)
            self.ledger.watcher.saved(self._now, stored.version, self.checkpoints.seconds(self._now))

    def _give_up_checkpoint(self, version: int, error: str, is_spoiled: bool = False) -> None:
        """Drop a checkpoint that failed. Another one is tried later. Log the reason, if it is not the one before."""
        assert self.checkpoints is not None
        before = self.checkpoints.error
        if not self.checkpoints.failed(version, error, self._now, is_spoiled):
            return
        if error != before:
            text = (
                f"Version {version} is not saved: {error}. Earlier checkpoints are kept. Lower the learning rate, or "
                "clip the gradients."
                if is_spoiled
                else f"The checkpoint of version {version} could not be written: {error}. The next attempt is in "
                f"{RETRY:.0f} s; free space, or repair the folder."
            )
            self._out.append(instructions.LogLine(text, warns=True))
        self._out.append(instructions.ForgetCheckpoint(version))
