"""The files of a checkpoint while it is written: a folder for the shards' parts, which becomes the checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.model import checkpoint


@dataclass(frozen=True)
class CheckpointPlan:
    """Where checkpoints go, and how often there is one: every so many updates of the model, or so many seconds."""

    folder: Path
    updates: int | None = None
    seconds: float | None = None


class CheckpointWriter:
    """Writes one checkpoint at a time. Its methods return an error in a sentence, or nothing."""

    def __init__(self, plan: CheckpointPlan) -> None:
        self._plan = plan
        self._snapshot: Mapping[str, Any] = {}

    def folder(self, version: int) -> Path:
        """Where the shards write their parts of this version."""
        return checkpoint.part_of(self._plan.folder, version)

    def begin(self, version: int, snapshot: Mapping[str, Any]) -> str:
        """Make the folder. snapshot: what the job knows of this version."""
        part = self.folder(version)
        try:
            shutil.rmtree(part, ignore_errors=True)  # of an attempt that was cut short
            part.mkdir(parents=True)
        except OSError as error:
            return str(error)
        self._snapshot = snapshot
        return ""

    def finish(self, version: int) -> str:
        """All parts are there: make it a checkpoint. Blocks until it is on the disk."""
        try:
            checkpoint.finish(self.folder(version), self._snapshot)
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def forget(self, version: int) -> None:
        """Remove the parts of this version."""
        shutil.rmtree(self.folder(version), ignore_errors=True)
