"""Silence: how long workers and shards may be silent, and how long a worker that was given up is expected back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

EXPECTED_BACK = 60.0  # seconds, or two leases, for which a worker that was given up is expected back
SHARD_SILENCE = 20.0  # seconds of silence after which a shard counts as lost; a shard beats every second


class LastHeard(Protocol):
    """Something that was last heard at a time."""

    heard: float


class Leases:
    """The times at which silence has lasted too long."""

    def __init__(self, lease: float) -> None:
        self.lease = lease
        self.tick_seconds = min(1.0, lease / 4)  # how often a driver should tell Tick, at least
        self.shards_heard: dict[int, float] = {}  # shard → when it was last heard
        self._back_by: dict[int, float] = {}  # worker → when it is no longer expected back
        self._unknown_by: float | None = None  # when unknown workers are no longer expected

    def expect_back(self, worker: int, now: float) -> None:
        """A worker was given up. It is expected back, but not for ever."""
        self._back_by[worker] = now + max(EXPECTED_BACK, 2 * self.lease)

    def expect_unknown(self, now: float) -> None:
        """Workers that nobody knows may come, but not for ever."""
        if self._unknown_by is None:
            self._unknown_by = now + self.lease

    def extend(self, members: Iterable[LastHeard], away: float, now: float) -> None:
        """The driver was held up and heard nobody: everybody gets that time again, up to now."""
        for member in members:
            member.heard = min(member.heard + away, now)
        for shard, heard in self.shards_heard.items():
            self.shards_heard[shard] = min(heard + away, now)

    def is_silent(self, member: LastHeard, now: float) -> bool:
        """Has its lease run out?"""
        return now >= member.heard + self.lease

    def seems_dead(self, member: LastHeard, now: float) -> bool:
        """Has it been silent for so long that another may take its place?"""
        return now - member.heard >= self.lease / 2

    def lost_shard(self, now: float) -> int | None:
        """A shard that has been silent for too long."""
        return next((shard for shard, heard in self.shards_heard.items() if now - heard > SHARD_SILENCE), None)

    def no_longer_expected(self, now: float) -> list[int]:
        """Workers that were expected back until now. Each is named once."""
        over = [worker for worker, until in self._back_by.items() if now >= until]
        for worker in over:
            del self._back_by[worker]
        return over

    def unknown_are_over(self, now: float) -> bool:
        """Are unknown workers no longer expected, from this moment on? True once."""
        over = self._unknown_by is not None and now >= self._unknown_by
        if over:
            self._unknown_by = None
        return over

    def deadline(self, members: Iterable[LastHeard]) -> float | None:
        """The earliest time at which a member's lease could run out, as things stand."""
        return min((member.heard + self.lease for member in members), default=None)
