"""The coordinator's connections to the shards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from paceline import policies
from paceline.job import events
from paceline.job.leases import SHARD_SILENCE
from paceline.model.tensor_file import FileDigest
from paceline.serve.coordinator.comparison import Comparison
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.coordinator.shard_replicas import Address, ShardReplicas
from paceline.serve.coordinator.shard_session import ShardSession
from paceline.serve.environment import REFUSALS
from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.endpoint import is_loopback
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import (
    ANY_NUMBER,
    BackupUnreachable,
    CheckpointLoaded,
    InitialWeightsReceived,
    PartSaved,
    PeerRejected,
    Register,
    SavePart,
    Setup,
    ShardFailed,
    ShardHeartbeat,
    ShardMoved,
    Stop,
    UpdateHeld,
    UpdateProducts,
    UpdateReceived,
)

log = logging.getLogger(__name__)
refusals = logging.getLogger(REFUSALS)

#: Seconds that a shard with a backup has to come back after its connection was closed. A shard that is alive takes a
#: fraction of a second.
RETURN_SECONDS = 2.0


class ShardConnections:
    """The connections to all shards of one generation.

    A lost connection may come back, and nothing is lost then. If a shard is lost, its backup takes over. Without a
    backup, the generation fails.
    """

    def __init__(
        self,
        config: ServerConfig,
        generation: str,
        set_up: Callable[[], None],
        tell: Callable[[events.Event], None],
        fail: Callable[[str], None],
    ) -> None:
        """set_up: called when all shards have registered. tell: called with each event.

        fail: called with a reason if a shard is lost or cannot be set up.
        """
        self._processes, self._generation = 1 + config.replicas, generation  # processes of each shard
        self._set_up, self._tell, self._fail = set_up, tell, fail
        self.complete = asyncio.Event()  # all shards have registered
        self.failure_is_permanent = False  # would a new generation fail in the same way?
        self.found_damage = False  # has a shard found that its part of the checkpoint is damaged?
        self.faults = 0  # peers that the shards refused
        self._shards = [ShardReplicas(shard, self._processes) for shard in range(config.shards)]
        self._comparing: dict[int, Comparison] = {}  # version → the products received so far
        self._workers: dict[int, AsyncChannel] = {}  # connections of workers that must know where the shards are
        self._moved: dict[int, ShardMoved] = {}  # shards whose backups have taken over
        self._saved: dict[int, tuple[int, FileDigest]] = {}  # the version and the part that a shard has saved last
        self.closing = False
        if not config.shards:
            self.complete.set()

    @property
    def addresses(self) -> list[Address]:
        """The address at which workers reach each shard."""
        return [replicas.address for replicas in self._shards]

    @property
    def certificates(self) -> tuple[bytes, ...]:
        """The digests of all shards' certificates, or nothing if they do not use TLS."""
        found = tuple(replicas.certificate for replicas in self._shards)
        return found if any(found) else ()

    def send(self, message: Any, shard: int | None = None) -> None:
        """Send an order to all shards, or to one of them, and to the backups."""
        for replicas in self._shards if shard is None else [self._shards[shard]]:
            replicas.send(message)

    def save(self, order: SavePart) -> None:
        """Order all shards to write their parts of a checkpoint. Backups write none."""
        for replicas in self._shards:
            replicas.saving = order.version
            replicas.sessions[replicas.primary].send(order)

    def set_up(self, shard: int, setup: Setup, description: bytes) -> None:
        """Send the Setup to a shard. Its backup gets one too, and follows."""
        self._shards[shard].set_up(setup, description)

    def inform(self, connection: int, worker: AsyncChannel) -> None:
        """Tell a worker that was welcomed or has resumed which shards have moved, now and later."""
        self._workers[connection] = worker
        for moved in self._moved.values():
            worker.send(moved)

    def forget(self, connection: int) -> None:
        """Forget the connection of a worker."""
        self._workers.pop(connection, None)

    def saved_parts(self, version: int) -> list[FileDigest]:
        """Return the sizes and the digests of the parts of a checkpoint that all shards have saved."""
        return [part for of, part in (self._saved[shard] for shard in range(len(self._shards))) if of == version]

    def expect_comparison(self, version: int, apply: policies.Apply) -> None:
        """Prepare for the UpdateProducts that all shards will send for this Apply."""
        if self._shards:
            self._comparing[version] = Comparison(apply)

    def lose(self, shard: int, reason: str, replica: int | None = None) -> None:
        """Give a process of a shard up. Its backup takes over; without one, the generation fails.

        replica: None for the primary.
        """
        replicas = self._shards[shard]
        lost = replicas.primary if replica is None else replica
        if replicas.expected <= {lost}:
            self._fail(reason)
        elif lost in replicas.expected:
            if replicas.give_up(lost):
                self._take_over(replicas, reason)
            else:
                log.warning("%s It was a backup: shard %d continues without one.", reason, shard)
            self._begin_if_complete()

    def _take_over(self, replicas: ShardReplicas, reason: str) -> None:
        """Tell the job and the workers that the backup of a shard has taken over."""
        shard = replicas.shard
        log.warning("%s Its backup takes over, and nothing is lost. Shard %d has no backup now.", reason, shard)
        if self.complete.is_set():
            self._moved[shard] = ShardMoved(shard, *replicas.address, replicas.certificate)
            for worker in self._workers.values():
                worker.send(self._moved[shard])
        self._tell(events.ShardAlive(shard))
        if replicas.saving is not None:  # the lost process may have written half of its part
            version, replicas.saving = replicas.saving, None
            self._tell(events.ShardSaved(shard, version, reason))

    def _begin_if_complete(self) -> None:
        """Set all shards up when all of them have registered."""
        if not self.complete.is_set() and all(each.sessions.keys() == each.expected for each in self._shards):
            self._set_up()
            self.complete.set()

    async def serve(self, peer: AsyncChannel, first: Register) -> None:
        """Handle the messages of a shard until its connection ends.

        The job notices if the shard does not come back: it hears no heartbeats.
        """
        if first.shard == ANY_NUMBER:
            first = msgspec.structs.replace(first, shard=self._free_number(first))
        shard, replica = first.shard, first.replica
        session = self._session_of(first, peer)
        if session is None:
            peer.send(Stop())
            return
        session.connect(peer, first)
        if self._shards[shard].sessions.get(replica) is not session:
            while await session.receive(peer) is not None:
                pass  # a process without the state of its shard is of use only to the next generation
            return
        self._handle(shard, replica, ShardHeartbeat(0))
        self._begin_if_complete()
        try:
            while (message := await session.receive(peer)) is not None:
                self._handle(shard, replica, message)
        except WireError as error:
            self._fail(f"Shard {shard} broke the protocol: {error}")
            raise
        except (asyncio.IncompleteReadError, OSError) as error:
            if not self.closing:
                log.info("the connection of shard %d is lost, and may come back: %s", shard, error)
                self._expect_back(shard, replica, session)
            raise

    def _expect_back(self, shard: int, replica: int, session: ShardSession) -> None:
        """Give a process up that does not come back soon, if another process of the same shard can go on."""

        def give_up() -> None:
            is_known = self._shards[shard].sessions.get(replica) is session
            if is_known and not session.is_connected and not self.closing and len(self._shards[shard].sessions) > 1:
                self.lose(shard, f"Shard {shard} has closed its connection.", replica)

        asyncio.get_running_loop().call_later(RETURN_SECONDS, give_up)

    def _free_number(self, first: Register) -> int:
        """Return a number for a shard that takes any: its own if it comes back, or one that is not in use.

        A shard that has closed its connection has a moment to come back, before another one takes its number.
        """
        known = [(replicas.shard, replicas.sessions.get(first.replica)) for replicas in self._shards]
        own = [shard for shard, session in known if session and session.is_of(first)]
        unused = [shard for shard, session in known if session is None]
        missing = [shard for shard, session in known if session and session.is_missing(RETURN_SECONDS)]
        for shard in (*own, *unused, *missing):
            return shard
        raise WireError(f"All {len(known)} shards of this job are there; give the server more --servers to use more.")

    def _session_of(self, first: Register, peer: AsyncChannel) -> ShardSession | None:
        """Return the session of a shard. Return None if the shard was given up.

        The session of a shard that was started again, and so has lost its state, is not among the shard's sessions.
        Raise WireError if the peer cannot be a shard of this generation.
        """
        shard, replica = first.shard, first.replica
        if not 0 <= shard < len(self._shards) or not 0 <= replica < self._processes:
            raise WireError(f"There is no shard {shard} in this job: it has {len(self._shards)}, numbered from 0.")
        if first.generation != self._generation:
            raise WireError(f"Shard {shard} belongs to another generation of the server.")
        replicas = self._shards[shard]
        known = replicas.sessions.get(replica)
        if known and known.is_of(first):
            return known
        if known and known.is_connected:
            raise WireError(f"There is a shard {shard} already: give each shard another number, or none.")
        if replicas.was_lost(first):
            return None
        if known:
            self.lose(shard, f"Shard {shard} has ended, and was started again.", replica)
        if known or replica not in replicas.expected:
            return ShardSession(first)
        replicas.enter(first, "" if is_loopback(peer.host) else peer.host)
        return replicas.sessions[replica]

    def _handle(self, shard: int, replica: int, message: Any) -> None:
        """Handle one message of a shard."""
        replicas = self._shards[shard]
        match message:
            case ShardHeartbeat():
                if replica == replicas.primary:
                    self._tell(events.ShardAlive(shard))
                silent = replicas.beat(replica)
                if silent is not None:
                    self.lose(shard, f"A process of shard {shard} has been silent for {SHARD_SILENCE:g} s.", silent)
            case UpdateReceived(update, size):
                if replicas.is_news(update):
                    self._tell(events.UpdateArrived(shard, *update, size))
            case UpdateHeld(update):
                self._tell(events.UpdateHeldBack(shard, *update))
            case CheckpointLoaded():
                self._tell(events.ShardLoaded(shard))
            case InitialWeightsReceived(worker, incarnation):
                self._tell(events.ShardInitialized(shard, worker, incarnation))
            case UpdateProducts():
                self._add_products(shard, message)
            case PartSaved(version, error, size, digest, is_spoiled):
                replicas.saving = None
                if not error:
                    self._saved[shard] = (version, FileDigest(size, digest))
                self._tell(events.ShardSaved(shard, version, error, is_spoiled))
            case PeerRejected(reason):
                refusals.warning("Shard %d refused a peer: %s", shard, reason)
                self.faults += 1
            case BackupUnreachable(reason):
                if (backup := replicas.backup) is not None:
                    self.lose(shard, f"The backup of shard {shard} cannot be reached: {reason}", backup)
            case ShardFailed(reason, damaged) if replica == replicas.primary:
                self.failure_is_permanent |= not damaged
                self.found_damage |= damaged
                self._fail(f"Shard {shard} cannot be set up: {reason}")
            case ShardFailed(reason):
                self.lose(shard, f"The backup of shard {shard} cannot be set up: {reason}", replica)
            case _:
                raise WireError(f"A {type(message).__name__} is not expected here.")

    def _add_products(self, shard: int, part: UpdateProducts) -> None:
        """Add one shard's products to its comparison. Tell the job the cosines when all shards have sent theirs."""
        comparison = self._comparing.get(part.version)
        if comparison is None and self._processes > 1:
            return  # of the second process of the last shard
        if comparison is None or not comparison.fits(part):
            raise WireError(f"UpdateProducts for version {part.version} do not match an ApplyUpdates with `compare`.")
        comparison.add(shard, part)
        if len(comparison.shards) == len(self._shards):
            # Shards report in the order of the log. So of an older version, no more reports will come.
            self._comparing = {version: each for version, each in self._comparing.items() if version > part.version}
            self._tell(events.UpdatesCompared(comparison.updates, tuple(comparison.cosines())))
