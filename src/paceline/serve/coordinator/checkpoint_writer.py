"""Write the files of a checkpoint: a folder that the shards write their parts to, which becomes the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.model import checkpoint
from paceline.model.durable import cause
from paceline.model.tensor_file import FileDigest

PATIENCE = 600.0


@dataclass(frozen=True)
class CheckpointPlan:
    """The folder of a job's checkpoints, and the number of updates or seconds between two of them."""

    folder: Path
    updates: int | None = None
    seconds: float | None = None
    patience: float = PATIENCE  # seconds in which the last checkpoint is tried again if it fails


class CheckpointWriter:
    """Writes one checkpoint at a time. `begin` and `finish` return an error message, which is empty on success."""

    def __init__(self, plan: CheckpointPlan) -> None:
        self._plan = plan
        self._snapshot: Mapping[str, Any] = {}

    def folder(self, version: int) -> Path:
        """Return the folder that the shards write their parts of this version to."""
        return checkpoint.part_of(self._plan.folder, version)

    def begin(self, version: int, snapshot: Mapping[str, Any]) -> str:
        """Make the folder for the parts. snapshot: the state of the job at this version."""
        try:
            checkpoint.begin(self._plan.folder, version)
        except OSError as error:
            return self._fault(error)
        self._snapshot = snapshot
        return ""

    def finish(self, version: int, parts: Sequence[FileDigest]) -> str:
        """Make the folder a checkpoint when it has all parts. Block until the checkpoint is on the disk."""
        try:
            checkpoint.finish(self.folder(version), {**self._snapshot, "parts": parts})
        except (OSError, ValueError) as error:
            return self._fault(error)
        return ""

    def forget(self, version: int) -> None:
        """Remove the parts of this version."""
        shutil.rmtree(self.folder(version), ignore_errors=True)

    def _fault(self, error: Exception) -> str:
        """Return an error message that is the same for every version, so that it is not repeated."""
        return f"{self._plan.folder.resolve()}: {cause(error)}"
