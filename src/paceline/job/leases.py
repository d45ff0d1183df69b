"""Leases: how long workers and shards may be silent, and how long the job waits for a worker to come back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

EXPECTED_BACK = 60.0  # seconds to wait for a worker that was given up, unless configured; at least two leases
SHARD_SILENCE = 20.0  # seconds without a heartbeat before a shard counts as lost; it sends one every second


class LastHeard(Protocol):
    """A peer, and the time of its last message."""

    heard: float


class Leases:
    """The deadlines of workers and shards."""

    def __init__(self, lease: float, absence: float = EXPECTED_BACK) -> None:
        """absence: seconds to wait for a worker that was given up or will return."""
        self.lease, self._absence = lease, absence
        self.tick_seconds = min(1.0, lease / 4)  # the driver should report TimePassed at least this often
        self.shards_heard: dict[int, float] = {}  # shard → the time of its last message
        self._expected_until: dict[int, float] = {}  # worker that was given up → when the job stops waiting for it
        self._unknown_until: float | None = None  # when the job stops waiting for unknown workers

    def expect_back(self, worker: int, now: float) -> None:
        """Begin to wait, for a limited time, for a worker that was given up."""
        self._expected_until[worker] = now + max(self._absence, 2 * self.lease)

    def work_is_done(self, now: float) -> None:
        """Stop waiting soon for the workers that are away: nothing is left for them to do."""
        latest = now + max(EXPECTED_BACK, 2 * self.lease)
        self._expected_until = {worker: min(until, latest) for worker, until in self._expected_until.items()}

    def expect_unknown(self, now: float) -> None:
        """Begin to wait, for a limited time, for workers of an earlier generation whose numbers are unknown."""
        if self._unknown_until is None:
            self._unknown_until = now + self.lease

    def extend(self, members: Iterable[LastHeard], away: float, now: float) -> None:
        """Extend all leases by the `away` seconds during which the driver was blocked and read no message."""
        for member in members:
            member.heard = min(member.heard + away, now)
        for shard, heard in self.shards_heard.items():
            self.shards_heard[shard] = min(heard + away, now)

    def is_long(self, away: float) -> bool:
        """Return True if leases that were not extended by `away` seconds could soon run out."""
        return away >= min(self.lease, SHARD_SILENCE) / 2

    def has_expired(self, member: LastHeard, now: float) -> bool:
        """Return True if the member's lease has run out."""
        return now >= member.heard + self.lease

    def seems_dead(self, member: LastHeard, now: float) -> bool:
        """Return True if the member has been silent for half a lease. Then another process may take its number."""
        return now - member.heard >= self.lease / 2

    def lost_shard(self, now: float) -> int | None:
        """Return a shard that has been silent for too long, or None."""
        return next((shard for shard, heard in self.shards_heard.items() if now - heard > SHARD_SILENCE), None)

    def pop_no_longer_expected(self, now: float) -> list[int]:
        """Return the workers that the job stops waiting for now. Each worker is returned once."""
        over = [worker for worker, until in self._expected_until.items() if now >= until]
        for worker in over:
            del self._expected_until[worker]
        return over

    def stops_expecting_unknown(self, now: float) -> bool:
        """Return True once, when the job stops waiting for unknown workers."""
        over = self._unknown_until is not None and now >= self._unknown_until
        if over:
            self._unknown_until = None
        return over

    def deadline(self, members: Iterable[LastHeard]) -> float | None:
        """Return the earliest time at which a lease can run out, or None without members."""
        return min((member.heard + self.lease for member in members), default=None)
