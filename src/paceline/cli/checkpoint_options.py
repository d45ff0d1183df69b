"""The options of checkpoints: where a job writes them, how often, and the one that it begins from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.shared import check_folder, refuse

if TYPE_CHECKING:
    from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan

AUTO = "auto"  # the value of --resume for the last checkpoint, if there is one
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def check_resume(resume: Path | None) -> None:
    """Refuse a folder without a checkpoint."""
    if resume is not None:
        from paceline.model import checkpoint

        try:
            checkpoint.read(resume, quick=True)
        except checkpoint.CheckpointError as error:
            refuse(str(error))


def resumed(resume: Path | None, folder: Path | None) -> Path | None:
    """The checkpoint to begin from, as --resume and --checkpoint say; None: begin anew."""
    if resume is None or str(resume) != AUTO:
        return resume
    if folder is None:
        refuse("--resume auto needs --checkpoint, the folder to look for a checkpoint in.")
    from paceline.model import checkpoint

    found = checkpoint.survey(folder, quick=True)
    if found.newest is None and found.damaged:
        refuse(f"{found.damaged[0]} No other checkpoint in {folder} is whole; give another folder to begin anew.")
    return folder if found.newest else None


def absence_seconds(text: str) -> float:
    """The seconds that --absence gives."""
    seconds = _seconds(text)
    if seconds is None:
        refuse(f"--absence must be a time (30s, 10m, 1h), not {text!r}.")
    return seconds


def checkpoint_plan(
    folder: Path | None, every: str | None, resume: Path | None, patience: str | None
) -> CheckpointPlan | None:
    """The plan that --checkpoint and its other options describe; None without a folder.

    Without --checkpoint, a resumed job writes to the folder that its checkpoint lies in.
    """
    from paceline.serve.coordinator.checkpoint_writer import PATIENCE, CheckpointPlan

    folder = folder or _folder_of(resume)
    if folder is None:
        for option, value in (("every", every), ("patience", patience)):
            if value:
                refuse(f"--checkpoint-{option} needs --checkpoint, the folder to write to.")
        return None
    check_folder(folder, "--checkpoint")
    waits = _seconds(patience) if patience else PATIENCE
    if waits is None:
        refuse(f"--checkpoint-patience must be a time (30s, 10m, 1h), not {patience!r}.")
    text = every or "60s"
    if text.isdigit() and int(text):
        return CheckpointPlan(folder, updates=int(text), patience=waits)
    seconds = _seconds(text)
    if seconds is None:
        refuse(f"--checkpoint-every must be a number of updates (500) or a time (30s, 10m, 1h), not {text!r}.")
    return CheckpointPlan(folder, seconds=seconds, patience=waits)


def _folder_of(resume: Path | None) -> Path | None:
    """The job's folder of a checkpoint to resume. Refuse a checkpoint that lies in no job's folder."""
    from paceline.model.checkpoint_names import job_folder

    if resume is None:
        return None
    folder = job_folder(resume)
    if folder is None:
        refuse(f"{resume} is a checkpoint outside a job's folder: name a folder to write to with --checkpoint.")
    return folder


def _seconds(text: str) -> float | None:
    """The seconds of a time such as 30s, 10m or 1h; None if it is not above zero or makes no sense."""
    try:
        seconds = float(text[:-1]) * UNITS[text[-1:]]
    except (ValueError, KeyError):
        return None
    return seconds if 0 < seconds < float("inf") else None
