"""Checkpoints: the whole model at one version, with the position in the data and the table of what was applied.

A checkpoint is a folder `version-000000123` in the job's folder: one `shard-K.safetensors` for each shard (weights and
the optimizer's state) and `job.json`. It is written under another name and renamed when it is whole, so a folder that
has its name is good; the last two are kept.
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
KEPT = 2
PART = ".part"
MAX_NUMBER = 1 << 63  # of a version, and of shards


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message says what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole."""

    folder: Path
    job: Mapping[str, Any]

    @property
    def version(self) -> int:
        return int(self.job["version"])

    @property
    def shards(self) -> int:
        return int(self.job["shards"])

    @property
    def description(self) -> Description:
        return Description.from_json(json.dumps(self.job["description"]).encode())

    def must_be_of(self, described: Description) -> None:
        """Refuse another model or optimizer, in one sentence."""
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
    """Where a checkpoint is written until it is whole."""
    return folder / f"version-{version:09d}{PART}"


def save_shard(folder: Path, number: int, tensors: Mapping[str, npt.NDArray[Any]], meta: Mapping[str, Any]) -> None:
    """Write one shard's part, down to the disk."""
    path = shard_file(folder, number)
    save_file(dict(tensors), path, metadata={"paceline": json.dumps(meta)})
    _sync(path)


def load_shard(folder: Path, number: int) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """What `save_shard` wrote."""
    return load(shard_file(folder, number))


def load(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """One shard's part, by its file."""
    try:
        with safe_open(path, "numpy") as file:
            meta = json.loads((file.metadata() or {}).get("paceline", "{}"))
            return {name: file.get_tensor(name) for name in file.keys()}, meta  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"The checkpoint's file {path} cannot be read: {error}.") from None


def finish(part: Path, job: Mapping[str, Any]) -> Checkpoint:
    """All shards have written: add what the coordinator knows, and give it its name."""
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
    """The newest whole checkpoint in a job's folder; None if there is none. A damaged one is an error."""
    found = _whole(folder)
    return read(found[-1]) if found else None


def read(folder: Path) -> Checkpoint:
    """One checkpoint, by its own folder or by its job's: then the newest."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint at {folder}; name the folder that --checkpoint was given.")
    if not (folder / "job.json").is_file():
        inside = _whole(folder)
        if not inside:
            raise CheckpointError(f"There is no checkpoint in {folder}; name the folder that --checkpoint was given.")
        folder = inside[-1]
    try:
        job = json.loads((folder / "job.json").read_text())
        checkpoint = Checkpoint(folder, job)
        if job["format"] != FORMAT:
            raise CheckpointError(f"The checkpoint {folder} has format {job['format']}, and this is format {FORMAT}.")
        if not 0 <= checkpoint.version < MAX_NUMBER or not 1 <= checkpoint.shards < MAX_NUMBER:
            raise ValueError(f"version {checkpoint.version} of {checkpoint.shards} shards")
        _ = checkpoint.description  # all that is needed is there
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"The checkpoint {folder} cannot be read: {error!r}.") from None
    missing = next((number for number in range(checkpoint.shards) if not shard_file(folder, number).is_file()), None)
    if missing is not None:
        raise CheckpointError(f"The checkpoint {folder} lacks the part of shard {missing}.")
    return checkpoint


def weights(checkpoint: Checkpoint) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of the model by its name, as a plain state_dict has them."""
    layout = checkpoint.description.layout
    flat = np.empty(layout.size, dtype=np.float32)
    filled = []
    for number in range(checkpoint.shards):
        tensors, meta = load_shard(checkpoint.folder, number)
        for piece, where in enumerate(_pieces(meta)):
            mine = tensors.get(f"{piece}/weights")
            start, stop = where
            if mine is None or mine.shape != (stop - start,) or not 0 <= start <= stop <= layout.size:
                raise CheckpointError(f"The checkpoint {checkpoint.folder} is damaged: shard {number} has other parts.")
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
    """From where to where each piece of a shard goes, as far as what a file says can be made out."""
    match meta:
        case {"pieces": [*pieces]}:
            ends = [(each.get("start"), each.get("stop")) if isinstance(each, dict) else (-1, -1) for each in pieces]
            return [(a, b) if isinstance(a, int) and isinstance(b, int) else (-1, -1) for a, b in ends]
    return []


def _whole(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("version-*") if not path.name.endswith(PART) and path.is_dir())


def _prune(folder: Path) -> None:
    for old in _whole(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def shard_file(folder: Path, number: int) -> Path:
    """Where a shard's part is."""
    return folder / f"shard-{number}.safetensors"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
