"""When a checkpoint is due, and who has yet to write a part of it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.serve import checkpoint

log = logging.getLogger(__name__)

AFTER_A_FAILURE = 10.0  # seconds before another is tried


@dataclass(frozen=True)
class Plan:
    """Where checkpoints go, and how often there is one: every so many updates of the model, or so many seconds."""

    folder: Path
    updates: int | None = None
    seconds: float | None = None


class Saver:
    """One checkpoint at a time. `order(version, folder)` tells all shards to write theirs."""

    def __init__(self, plan: Plan, shards: int, order: Callable[[int, Path], None], saved: int | None) -> None:
        """`saved`: the version that is on the disk already."""
        self.plan = plan
        self.saved = saved
        self._shards, self._order = shards, order
        self._since = 0.0
        self._failed = False
        self._missing: set[int] = set()
        self._part: Path | None = None
        self._job: Mapping[str, Any] = {}

    @property
    def busy(self) -> bool:
        """Is one being written?"""
        return self._part is not None

    def is_due(self, version: int, now: float) -> bool:
        if self.busy or (self._failed and now - self._since < AFTER_A_FAILURE):
            return False
        if self.saved is None:
            return True
        plan = self.plan
        by_count = plan.updates is not None and version - self.saved >= plan.updates
        by_time = plan.seconds is not None and now - self._since >= plan.seconds
        return version > self.saved and (by_count or by_time)

    def begin(self, version: int, now: float, job: Mapping[str, Any]) -> None:
        """Write one of this version. `job` is what the coordinator knows at this point of the log."""
        part = checkpoint.part_of(self.plan.folder, version)
        try:
            shutil.rmtree(part, ignore_errors=True)  # of an attempt that was cut short
            part.mkdir(parents=True)
        except OSError as error:
            log.warning("the checkpoint cannot be written: %s", error)
            self._failed, self._since = True, now
            return
        self._part, self._job, self._missing, self._since = part, job, set(range(self._shards)), now
        self._order(version, part)

    def written(self, shard: int, version: int, error: str) -> Path | None:
        """A shard has written its part, or failed to; the folder if that was the last one."""
        if self._part is None or self._job["version"] != version:
            return None
        if error:
            log.warning("the checkpoint of version %d is given up: %s", version, error)
            shutil.rmtree(self._part, ignore_errors=True)
            self._part, self._failed = None, True
            return None
        self._missing.discard(shard)
        return None if self._missing else self._part

    def finish(self) -> None:
        """All parts are there. Blocks until it is on the disk."""
        if self._part is None:
            return
        try:
            checkpoint.finish(self._part, self._job)
            self.saved, self._failed = int(self._job["version"]), False
        except (OSError, ValueError) as error:
            self._failed = True
            log.warning("the checkpoint cannot be written: %s", error)
            shutil.rmtree(self._part, ignore_errors=True)
        finally:
            self._part = None
