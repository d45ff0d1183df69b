"""The names of the folders of checkpoints: which of them count, and which the job has passed over."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from paceline.model.durable import rename

_VERSION = re.compile(r"version-(\d{9,})")
_PASSED_OVER = re.compile(r"version-\d{9,}\.(damaged|abandoned)(-\d+)?")


def is_checkpoint(folder: Path) -> bool:
    """Return whether this is the folder of one checkpoint, not that of a job."""
    return _is_version(folder.name) or (folder / "job.json").is_file()


def job_folder(folder: Path) -> Path | None:
    """Return the job's folder for the folder of a job or of one of its checkpoints.

    Return None for a checkpoint that lies elsewhere under a name of its own.
    """
    if _is_version(folder.name):
        return folder.parent
    if not (folder / "job.json").is_file():
        return folder
    return folder.resolve().parent if _is_version(folder.resolve().name) else None


def versions(folder: Path) -> list[Path]:
    """Return the folders of all checkpoints in a job's folder, oldest first, whether they are whole or damaged."""
    named = ((_VERSION.fullmatch(path.name), path) for path in folder.glob("version-*"))
    found = [(int(match[1]), path) for match, path in named if match and path.is_dir()]
    return [path for _, path in sorted(found)]


def set_aside(folder: Path, why: Literal["damaged", "abandoned"]) -> Path:
    """Rename a checkpoint that the job has passed over, so that it counts no more. Return its new path."""
    target, count = folder.with_name(f"{folder.name}.{why}"), 1
    while target.exists():
        count += 1
        target = folder.with_name(f"{folder.name}.{why}-{count}")
    rename(folder, target)
    return target


def _is_version(name: str) -> bool:
    return bool(_VERSION.fullmatch(name) or _PASSED_OVER.fullmatch(name))
