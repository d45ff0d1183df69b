"""The processes of one shard: its primary and, with --replicas 1, its backup.

The coordinator sends both the same orders. Only the primary reports updates and writes checkpoints. If the primary is
lost, the backup takes over: it holds every update that the primary has reported.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.job.leases import SHARD_SILENCE
from paceline.serve.coordinator.shard_session import ShardSession
from paceline.serve.wire.messages import ContinueAlone, Identity, Register, Setup, TakeOver

Address = tuple[str, int]  # host ("": the coordinator's) and port


class ShardReplicas:
    """The processes of one shard that are there, by the number of their replica."""

    def __init__(self, shard: int, processes: int) -> None:
        """processes: that are expected to register."""
        self.shard = shard
        self.primary = 0  # the replica that reports updates
        self.sessions: dict[int, ShardSession] = {}
        self.expected = set(range(processes))  # replicas that have registered or will
        self._is_set_up = False  # have the processes received their Setup?
        self.saving: int | None = None  # version of the part of a checkpoint that the primary writes
        self._addresses: dict[int, Address] = {}
        self._certificates: dict[int, bytes] = {}  # the digest of each one's certificate; empty without TLS
        self._lost: list[ShardSession] = []
        self._beats: dict[int, int] = {}  # replica → heartbeats of the primary since its own last one
        self._newest: dict[int, tuple[int, int]] = {}  # worker → its newest update that was reported

    @property
    def address(self) -> Address:
        """The address at which workers reach the shard."""
        return self._addresses[self.primary]

    @property
    def certificate(self) -> bytes:
        """The digest of the certificate that workers see there; empty without TLS."""
        return self._certificates[self.primary]

    @property
    def backup(self) -> int | None:
        """The replica that can take over, or None."""
        return next((replica for replica in self.sessions if replica != self.primary), None)

    @property
    def backup_place(self) -> tuple[str, int, bytes] | None:
        """The address and the certificate at which the primary reaches the backup, or None if there is no backup."""
        backup = self.backup
        return None if backup is None else (*self._addresses[backup], self._certificates[backup])

    def enter(self, first: Register, host: str) -> None:
        """Take note of a new process."""
        self.sessions[first.replica] = ShardSession(first)
        self._addresses[first.replica] = (host, first.port)
        self._certificates[first.replica] = first.certificate

    def was_lost(self, register: Register) -> bool:
        """Return whether a Register comes from a process that was given up."""
        return any(session.is_of(register) for session in self._lost)

    def send(self, message: Any, body: bytes = b"") -> None:
        """Send an order to all processes of the shard."""
        for session in self.sessions.values():
            session.send(message, body)

    def set_up(self, setup: Setup, description: bytes) -> None:
        """Send the Setup to the primary, and to the backup, which follows."""
        self._is_set_up = True
        for replica, session in self.sessions.items():
            if replica == self.primary:
                session.send(msgspec.structs.replace(setup, backup=self.backup_place), description)
            else:
                session.send(msgspec.structs.replace(setup, follows=True), description)

    def give_up(self, replica: int) -> bool:
        """Give one of two processes up. Return True if the backup takes over, and False if the primary goes on alone.

        Before the Setup, no process has a part to take over.
        """
        self.expected.discard(replica)
        session = self.sessions.pop(replica, None)
        if session:
            self._lost.append(session)
            session.end()
        takes_over = replica == self.primary
        (self.primary,) = self.expected
        if self._is_set_up:
            self.sessions[self.primary].send(TakeOver() if takes_over else ContinueAlone())
        return takes_over

    def beat(self, replica: int) -> int | None:
        """Take note of a heartbeat. Return a backup that has been silent for too long, or None.

        The heartbeats of the primary serve as a clock, so that a coordinator that was held up gives no backup up.
        """
        if replica != self.primary:
            self._beats[replica] = 0
            return None
        backup = self.backup
        if backup is not None:
            self._beats[backup] = self._beats.get(backup, 0) + 1
            if self._beats[backup] > SHARD_SILENCE:
                return backup
        return None

    def is_news(self, update: Identity) -> bool:
        """Return whether this update is reported for the first time. A backup that takes over reports some again."""
        is_new = (update.incarnation, update.iteration) > self._newest.get(update.worker, (0, 0))
        if is_new:
            self._newest[update.worker] = (update.incarnation, update.iteration)
        return is_new
