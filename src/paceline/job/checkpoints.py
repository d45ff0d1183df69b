"""When a checkpoint is due, and which shards have yet to write their part of it."""

from __future__ import annotations

from paceline.job.config import SaveEvery

RETRY = 10.0  # seconds after a failure before another is tried


class Checkpoints:
    """One checkpoint at a time."""

    def __init__(self, every: SaveEvery, shards: int, saved: int | None) -> None:
        """saved: the version that is on the disk already."""
        self.every, self.saved = every, saved
        self.writing: int | None = None  # the version that is being written
        self._shards = shards
        self._missing: set[int] = set()  # shards that have yet to write
        self._since = 0.0  # when the last one was begun, or failed
        self._failed = False

    def is_due(self, version: int, now: float) -> bool:
        """Is it time for one of this version?"""
        if self.writing is not None or (self._failed and now - self._since < RETRY):
            return False
        if self.saved is None:
            return True
        by_count = self.every.updates is not None and version - self.saved >= self.every.updates
        by_time = self.every.seconds is not None and now - self._since >= self.every.seconds
        return version > self.saved and (by_count or by_time)

    def begin(self, version: int, now: float) -> None:
        """The shards are told to write this version."""
        self.writing, self._missing, self._since = version, set(range(self._shards)), now

    def written(self, shard: int, version: int) -> bool:
        """A shard has written its part. True if that was the last one."""
        if self.writing != version:
            return False
        self._missing.discard(shard)
        return not self._missing

    def stored(self, version: int) -> None:
        """The checkpoint is on the disk."""
        if self.writing == version:
            self.saved, self.writing, self._failed = version, None, False

    def failed(self, version: int, now: float) -> bool:
        """The checkpoint cannot be written; another is tried later. False if it was given up before."""
        if self.writing != version:
            return False
        self.writing, self._failed, self._since = None, True, now
        return True
