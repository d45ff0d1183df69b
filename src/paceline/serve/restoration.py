"""Choose the checkpoint that a generation of a server begins from.

A damaged checkpoint is passed over, and the newest whole one is used. If the user names one checkpoint, the newer ones
are abandoned. Both are renamed if they lie in the folder that the job writes to. Otherwise they would count as
checkpoints of this run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from paceline.model import checkpoint
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.checkpoint_names import is_checkpoint, job_folder, set_aside, versions

log = logging.getLogger(__name__)

Why = Literal["damaged", "abandoned"]


class Restoration:
    """The checkpoints that a server can begin from: those in the folder that it writes to, and that of --resume."""

    def __init__(self, shards: int, saving: Path | None, resume: Path | None) -> None:
        """Find the first checkpoint. Change nothing yet; `begin` does.

        Raise CheckpointError if there is no whole checkpoint, if its model cannot be cut into so many shards, or if the
        folder to write to has checkpoints of another run.
        """
        self._shards, self._saving, self._resume = shards, saving, resume
        self._aside: list[tuple[Path, Why]] = []  # checkpoints to rename
        self._notes: list[str] = []
        self._rejected: set[Path] = set()  # found to be damaged by a shard
        self.first = self._find_first(resume) if resume else None
        self._check_folder()

    def begin(self) -> None:
        """Rename the checkpoints that were passed over, and say so."""
        for note in self._notes:
            log.warning("%s", note)
        for path, why in self._aside:
            _set_aside(path, why)
        self._notes, self._aside = [], []

    def reject(self, found: Checkpoint, reason: str) -> None:
        """Pass over a checkpoint that a shard found to be damaged. Raise CheckpointError if the user has named it."""
        self._rejected.add(found.folder)
        if self._resume and is_checkpoint(self._resume) and self.first and found.folder == self.first.folder:
            raise CheckpointError(f"{reason} Continue from another checkpoint with --resume.")
        if self._is_ours(found.folder):
            _set_aside(found.folder, "damaged")

    def newest(self, without_first: bool = False) -> Checkpoint | None:
        """Return the newest whole checkpoint of the job: one that it has written, or else the one that it began from.

        Damaged checkpoints are renamed. without_first: the weights of the first checkpoint do not belong to the job.
        """
        found: Checkpoint | None = None
        if self._saving:
            found, damaged = checkpoint.survey(self._saving, without=self._rejected)
            for error in damaged:
                log.warning("%s", checkpoint.passed_over(error, found) if found else error)
                _set_aside(error.folder, "damaged")
        first = self.first
        if first and not without_first and not self._is_ours(first.folder) and first.folder not in self._rejected:
            try:
                first = checkpoint.read(first.folder)
            except CheckpointError as error:
                log.warning("%s", error)
            else:
                found = found if found and found.version >= first.version else first
        return self._check_shards(found) if found else None

    def _find_first(self, resume: Path) -> Checkpoint:
        if is_checkpoint(resume):
            first = self._check_shards(checkpoint.read(resume))
            folder = job_folder(resume)
            newer = [path for path in versions(folder) if _is_newer(path, first)] if folder else []
            if newer and self._saving and _same(folder, self._saving):
                self._aside += [(path, "abandoned") for path in newer]
                names = ", ".join(path.name for path in newer)
                self._notes.append(f"Going back to version {first.version}; {names} will be kept as *.abandoned.")
            return first
        first = checkpoint.read(resume, self._notes.append)
        if self._saving and _same(resume, self._saving):
            self._aside += [(path, "damaged") for path in versions(resume) if _is_newer(path, first)]
        return self._check_shards(first)

    def _check_folder(self) -> None:
        """Raise CheckpointError if the folder to write to has checkpoints of another run, to keep two runs apart."""
        if self._saving is None or (self._resume and _same(job_folder(self._resume), self._saving)):
            return
        old, damaged = checkpoint.survey(self._saving, quick=True)
        if old:
            raise CheckpointError(
                f"{self._saving} has checkpoints of an earlier run: continue it with --resume {self._saving}, "
                "or name another folder."
            )
        for error in damaged:
            self._notes.append(f"{str(error).removesuffix('.')}; it will be kept as {error.folder.name}.damaged.")
            self._aside.append((error.folder, "damaged"))

    def _check_shards(self, found: Checkpoint) -> Checkpoint:
        """Return the checkpoint. Raise CheckpointError if its model cannot be cut into the shards of this server."""
        if not self._shards:
            raise CheckpointError(f"The checkpoint {found.folder} holds a model: use --servers 1 or more.")
        try:
            found.description.deal(self._shards, 1)
        except ValueError as error:
            raise CheckpointError(
                f"The model of the checkpoint {found.folder} cannot be cut again: {error}; use fewer --servers."
            ) from None
        return found

    def _is_ours(self, folder: Path) -> bool:
        """Return whether this is a checkpoint in the folder that the job writes to, under its final name."""
        return self._saving is not None and any(_same(folder, path) for path in versions(self._saving))


def _is_newer(path: Path, than: Checkpoint) -> bool:
    """Return whether a checkpoint in a job's folder is newer than another one, which may be renamed."""
    version = int(path.name.rpartition("-")[2])
    return version > than.version or (version == than.version and not _same(path, than.folder))


def _same(one: Path | None, other: Path) -> bool:
    return one is not None and one.resolve() == other.resolve()


def _set_aside(folder: Path, why: Why) -> None:
    try:
        set_aside(folder, why)
    except OSError as error:
        log.warning("%s cannot be renamed (%s); remove it before you resume the job.", folder, error.strerror)
