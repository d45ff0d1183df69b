"""The schedule of checkpoints, and the shards that have still to write their parts of one."""

from __future__ import annotations

from paceline.job.config import SaveEvery

RETRY = 10.0  # seconds between a failed checkpoint and the next attempt


class Checkpoints:
    """The schedule of checkpoints. One checkpoint is written at a time."""

    def __init__(self, every: SaveEvery, shards: int, saved: int | None) -> None:
        """saved: the version of the checkpoint that the job was restored from, or None."""
        self.every, self.saved = every, saved
        self.writing: int | None = None  # the version that is being written
        self._shards = shards
        self._missing: set[int] = set()  # shards that have not written their parts
        self._since = 0.0  # when the last checkpoint was begun or failed
        self.is_spoiled = False  # did it fail because the model holds numbers that are not finite?
        self.error = ""  # why the last attempt failed; empty if it did not

    def is_due(self, version: int, now: float) -> bool:
        """Return True if a checkpoint of this version is due now."""
        if self.writing is not None or (self.error and now - self._since < RETRY):
            return False
        if self.saved is None:
            return True
        by_count = self.every.updates is not None and version - self.saved >= self.every.updates
        by_time = self.every.seconds is not None and now - self._since >= self.every.seconds
        return version > self.saved and (by_count or by_time)

    def seconds(self, now: float) -> float:
        """Return how long the checkpoint that is being written has taken so far."""
        return now - self._since

    def begin(self, version: int, now: float) -> None:
        """Record that all shards were ordered to write this version."""
        self.writing, self._missing, self._since = version, set(range(self._shards)), now

    def written(self, shard: int, version: int) -> bool:
        """Record that a shard has written its part. Return True if that was the last part."""
        if self.writing != version:
            return False
        self._missing.discard(shard)
        return not self._missing

    def stored(self, version: int) -> None:
        """Record that the whole checkpoint is on disk."""
        if self.writing == version:
            self.saved, self.writing, self.error, self.is_spoiled = version, None, "", False

    def failed(self, version: int, error: str, now: float, is_spoiled: bool = False) -> bool:
        """Record that the checkpoint failed; the next attempt comes later. Return False if it had already failed."""
        if self.writing != version:
            return False
        self.writing, self.error, self._since, self.is_spoiled = None, error, now, is_spoiled
        return True
