"""Checkpoints: the whole model at one version, with the state of the job.

A checkpoint is a folder `version-000000123` in the job's folder. It holds one `shard-K.safetensors` for each shard
(weights and optimizer state) and `job.json` (the version, the samples that are done, the newest applied iterations).
The folder is written under a temporary name and renamed when it is complete, so a folder with the final name is always
complete. The last two checkpoints are kept.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paceline.model.description import Description

FORMAT = 2
KEPT = 2  # checkpoints
PART = ".part"  # the suffix of a checkpoint that is being written
MAX_NUMBER = 1 << 63  # limit of the version and of the number of shards


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message says why, and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, and the content of its `job.json`."""

    folder: Path
    job: Mapping[str, Any]

    @property
    def version(self) -> int:
        """The version of the model."""
        return int(self.job["version"])

    @property
    def shards(self) -> int:
        """The number of shards that wrote the checkpoint."""
        return int(self.job["shards"])

    @property
    def description(self) -> Description:
        """The layout and the optimizer of the model."""
        return Description.from_json(json.dumps(self.job["description"]).encode())

    def check_model(self, described: Description) -> None:
        """Raise CheckpointError if the checkpoint is of another model or another optimizer."""
        ours = self.description
        difference = ours.layout.differs_from(described.layout)
        if difference:
            raise CheckpointError(f"The checkpoint {self.folder} is of another model: {difference}.")
        if ours.optimizer.name != described.optimizer.name:
            raise CheckpointError(
                f"The checkpoint {self.folder} was trained with {ours.optimizer.name}, and this job uses "
                f"{described.optimizer.name}."
            )


def part_of(folder: Path, version: int) -> Path:
    """Return the folder in which a checkpoint is written until it is complete."""
    return folder / f"version-{version:09d}{PART}"


def save_shard(folder: Path, number: int, tensors: Mapping[str, npt.NDArray[Any]], meta: Mapping[str, Any]) -> None:
    """Write one shard's part of a checkpoint, and wait until it is on disk."""
    path = shard_file(folder, number)
    save_file(dict(tensors), path, metadata={"paceline": json.dumps(meta)})
    _sync(path)


def load_shard(folder: Path, number: int) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the tensors and the metadata that `save_shard` wrote."""
    return load(shard_file(folder, number))


def load(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the tensors and the metadata of one shard's file."""
    try:
        with safe_open(path, "numpy") as file:
            meta = json.loads((file.metadata() or {}).get("paceline", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, meta  # noqa: SIM118 (`file` is not a mapping)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"The checkpoint file {path} cannot be read: {error}.") from None


def finish(part: Path, job: Mapping[str, Any]) -> Checkpoint:
    """Complete a checkpoint whose shards have all written: add `job.json`, and give the folder its final name."""
    described = part / "job.json"
    described.write_text(json.dumps({"format": FORMAT} | dict(job), indent=1) + "\n")
    _sync(described)
    _sync(part)
    whole = part.with_name(part.name.removesuffix(PART))
    if whole.exists():
        shutil.rmtree(whole)
    part.rename(whole)
    _sync(whole.parent)
    _prune(whole.parent)
    return read(whole)


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint in a job's folder, or None. Raise CheckpointError if it is damaged."""
    found = _complete(folder)
    return read(found[-1]) if found else None


def read(folder: Path) -> Checkpoint:
    """Return the checkpoint in this folder. If this is the folder of a job, return its newest checkpoint."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint at {folder}; name the folder that you gave to --checkpoint.")
    if not (folder / "job.json").is_file():
        inside = _complete(folder)
        if not inside:
            raise CheckpointError(f"There is no checkpoint in {folder}; name the folder that you gave to --checkpoint.")
        folder = inside[-1]
    try:
        job = json.loads((folder / "job.json").read_text())
        checkpoint = Checkpoint(folder, job)
        if job["format"] != FORMAT:
            raise CheckpointError(f"The checkpoint {folder} has format {job['format']}; this paceline reads {FORMAT}.")
        if not 0 <= checkpoint.version < MAX_NUMBER or not 1 <= checkpoint.shards < MAX_NUMBER:
            raise ValueError(f"version {checkpoint.version} of {checkpoint.shards} shards")
        _ = checkpoint.description  # raises if it cannot be read
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"The checkpoint {folder} cannot be read: {error!r}.") from None
    missing = next((number for number in range(checkpoint.shards) if not shard_file(folder, number).is_file()), None)
    if missing is not None:
        raise CheckpointError(f"The checkpoint {folder} lacks the part of shard {missing}.")
    return checkpoint


def weights(checkpoint: Checkpoint) -> dict[str, npt.NDArray[np.float32]]:
    """Return every tensor of the model by its name, as in a plain state_dict."""
    layout = checkpoint.description.layout
    flat = np.empty(layout.size, dtype=np.float32)
    filled = []
    for number in range(checkpoint.shards):
        tensors, meta = load_shard(checkpoint.folder, number)
        for piece, where in enumerate(_pieces(meta)):
            mine = tensors.get(f"{piece}/weights")
            start, stop = where
            if mine is None or mine.shape != (stop - start,) or not 0 <= start <= stop <= layout.size:
                raise CheckpointError(f"The checkpoint {checkpoint.folder} is damaged: shard {number} lacks a piece.")
            flat[start:stop] = mine
            filled.append((start, stop))
    ends = [0, *(end for part in sorted(filled) for end in part), layout.size]
    if any(end != begin for end, begin in zip(ends[::2], ends[1::2], strict=True)):
        raise CheckpointError(f"The checkpoint {checkpoint.folder} is damaged: a part of the model is missing.")
    return {
        tensor.name: flat[offset : offset + tensor.size].reshape(tensor.shape)
        for tensor, offset in zip(layout.tensors, layout.offsets[:-1], strict=True)
    }


def _pieces(meta: Any) -> list[tuple[int, int]]:
    """Return the range of each piece of a shard from the file's metadata. A range that makes no sense is (-1, -1)."""
    match meta:
        case {"pieces": [*pieces]}:
            ends = [(each.get("start"), each.get("stop")) if isinstance(each, dict) else (-1, -1) for each in pieces]
            return [(a, b) if isinstance(a, int) and isinstance(b, int) else (-1, -1) for a, b in ends]
    return []


def _complete(folder: Path) -> list[Path]:
    """Return the folders of all complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("version-*") if not path.name.endswith(PART) and path.is_dir())


def _prune(folder: Path) -> None:
    """Remove all but the newest checkpoints."""
    for old in _complete(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def shard_file(folder: Path, number: int) -> Path:
    """Return the file of a shard's part."""
    return folder / f"shard-{number}.safetensors"


def _sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
