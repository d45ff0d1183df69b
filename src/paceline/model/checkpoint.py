"""Checkpoints: the whole model at one version, with the state of the job.

A checkpoint is a folder `version-000000123` in the job's folder. It holds one `shard-K.safetensors` for each shard
(weights and optimizer state) and `job.json` (the version, the samples that are done, the newest applied iterations,
the size and the digest of each part, and a digest of itself).

The folder is written under a temporary name and renamed when all of it is on disk. The last two checkpoints are kept.
A file that was damaged later does not match its digest. Then the newest whole checkpoint is used. A checkpoint that the
job has passed over, because it is damaged or because the user went back, is renamed and never deleted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load as load_bytes
from safetensors.numpy import save as save_bytes

from paceline.model.checkpoint_names import is_checkpoint, job_folder, versions
from paceline.model.description import Description
from paceline.model.durable import cause, make_folder, rename, sync, write_file
from paceline.model.tensor_file import FileDigest, SpoiledError, digest_of, new_digest, not_finite, write_tensors

log = logging.getLogger(__name__)

FORMAT = 3
WITHOUT_DIGESTS = 2  # the format before, which can still be read
KEPT = 2  # checkpoints
PART = ".part"  # the suffix of a checkpoint that is being written
REPLACED = ".replaced"  # the suffix of a checkpoint while another one of the same version takes its place
MAX_NUMBER = 1 << 63  # limit of the version and of the number of shards
THREADS = 4  # that read parts to check them
NO_DIGEST = "0" * 64  # stands for the digest of job.json while it is computed


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message says why, and what to do."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, or is not what was written, or holds weights that are not finite."""

    def __init__(self, folder: Path, reason: str, advice: str = "") -> None:
        """reason: names the file. advice: the rest of the sentence, which says what to do."""
        super().__init__(f"The checkpoint {folder} is damaged: {reason}{advice}.")
        self.folder, self.reason = folder, reason


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
    def parts(self) -> tuple[FileDigest, ...]:
        """The size and the digest of each shard's part. Empty for a checkpoint of the format without digests."""
        return tuple(FileDigest(int(size), str(digest)) for size, digest in self.job.get("parts", ()))

    @property
    def description(self) -> Description:
        """The layout and the optimizer of the model."""
        return Description.from_json(json.dumps(self.job["description"]).encode())

    @property
    def digests(self) -> tuple[str, ...]:
        """The digest of each shard's part, or empty strings if they are not known."""
        return tuple(part.digest for part in self.parts) if self.parts else ("",) * self.shards

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


class Survey(NamedTuple):
    """The newest whole checkpoint of a job's folder, and the newer ones that are damaged, newest first."""

    newest: Checkpoint | None
    damaged: tuple[DamagedError, ...]


# Write


def begin(folder: Path, version: int) -> Path:
    """Make the folder in which a checkpoint is written until it is complete. Return its path."""
    make_folder(folder)
    part = part_of(folder, version)
    shutil.rmtree(part, ignore_errors=True)  # left over from an attempt that was interrupted
    make_folder(part)
    return part


def part_of(folder: Path, version: int) -> Path:
    """Return the folder in which a checkpoint is written until it is complete."""
    return folder / f"version-{version:09d}{PART}"


def save_shard(
    folder: Path, number: int, tensors: Mapping[str, npt.NDArray[Any]], meta: Mapping[str, Any]
) -> FileDigest:
    """Write one shard's part of a checkpoint, and wait until it is on disk. Return its size and its digest.

    Raise SpoiledError if a weight is not finite. Such a checkpoint would take the place of a good one.
    """
    if fault := not_finite(tensors):
        raise SpoiledError(f"the model holds {fault}")
    return save(shard_file(folder, number), tensors, meta)


def save(path: Path, tensors: Mapping[str, npt.NDArray[Any]], meta: Mapping[str, Any]) -> FileDigest:
    """Write a shard's state to a file, which `load` reads."""
    return write_tensors(path, tensors, {"paceline": json.dumps(meta)})


def finish(part: Path, job: Mapping[str, Any]) -> Checkpoint:
    """Complete a checkpoint whose shards have all written: add `job.json`, and give the folder its final name.

    job: the state of the job, with `parts`: the size and the digest of each shard's part. Raise CheckpointError if a
    part does not have that size.
    """
    for number, (size, _) in enumerate(job["parts"]):
        path = shard_file(part, number)
        if path.stat().st_size != size:
            raise CheckpointError(f"{path.name} has {path.stat().st_size} bytes instead of {size}")
        sync(path)  # its shard has done that; here it counts for a file system that several machines share
    text = json.dumps({"format": FORMAT} | dict(job) | {"digest": NO_DIGEST}, indent=1) + "\n"
    write_file(part / "job.json", [text.replace(NO_DIGEST, _digest(text.encode())).encode()])
    sync(part)
    whole = part.with_name(part.name.removesuffix(PART))
    replaced = part.with_name(whole.name + REPLACED)
    if whole.exists():  # the job began again with other weights of this version
        shutil.rmtree(replaced, ignore_errors=True)
        whole.rename(replaced)
    rename(part, whole)
    shutil.rmtree(replaced, ignore_errors=True)
    _prune(whole.parent)
    return _read(whole, quick=True)


def format_part(tensors: Mapping[str, npt.NDArray[Any]], meta: Mapping[str, Any]) -> bytes:
    """Return one shard's part of a checkpoint as bytes, in the format of `save_shard`."""
    return save_bytes(dict(tensors), metadata={"paceline": json.dumps(meta)})


# Read


def newest(folder: Path, *, quick: bool = False) -> Checkpoint | None:
    """Return the newest whole checkpoint in a job's folder, or None. quick: do not read the parts, as in `survey`."""
    return survey(folder, quick=quick).newest


def survey(folder: Path, *, quick: bool = False, without: Collection[Path] = ()) -> Survey:
    """Return the newest whole checkpoint in a job's folder, and the newer ones that are damaged.

    quick: check the digest of `job.json` and the sizes of the parts, but not the digests of the parts.
    without: checkpoints that must not be used.
    """
    damaged: list[DamagedError] = []
    for path in reversed(versions(folder)):
        if path in without:
            continue
        try:
            return Survey(_read(path, quick), tuple(damaged))
        except DamagedError as error:
            damaged.append(error)
    return Survey(None, tuple(damaged))


def read(folder: Path, note: Callable[[str], None] | None = None, *, quick: bool = False) -> Checkpoint:
    """Return the checkpoint in this folder. If this is the folder of a job, return its newest whole checkpoint.

    note: is called with a sentence for each damaged checkpoint that is passed over. quick: as in `survey`.
    Raise CheckpointError if there is no whole checkpoint.
    """
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint at {folder}; name the folder that you gave to --checkpoint.")
    if is_checkpoint(folder):
        try:
            return _read(folder, quick)
        except DamagedError as error:
            known = job_folder(folder)
            advice = f"; continue from the newest whole one with --resume {known}" if known else "; name another one"
            raise DamagedError(folder, error.reason, advice) from None
    found, damaged = survey(folder, quick=quick)
    if found is None:
        if damaged:
            raise DamagedError(damaged[0].folder, damaged[0].reason, f"; {folder} has no whole checkpoint")
        raise CheckpointError(f"There is no checkpoint in {folder}; name the folder that you gave to --checkpoint.")
    if note:
        for each in damaged:
            note(passed_over(each, found))
    return found


def passed_over(error: DamagedError, instead: Checkpoint) -> str:
    """Return the sentence that says which checkpoint is used in place of a damaged one."""
    return f"{str(error).removesuffix('.')}; going back to version {instead.version}."


def load(path: Path, digest: str = "") -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the tensors and the metadata of one shard's file. digest: that the file must have; empty: any.

    Raise DamagedError if the file has another digest or another format, or if a weight is not finite.
    """
    try:
        _check_digest(path, digest)
        with safe_open(path, "numpy") as file:
            meta = json.loads((file.metadata() or {}).get("paceline", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (`file` is not a mapping)
    except OSError as error:  # perhaps this machine does not share the folder
        raise CheckpointError(f"The checkpoint file {path} cannot be read: {cause(error)}.") from None
    except (SafetensorError, ValueError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(path.parent, f"{path.name} cannot be read: {error}") from None
    if fault := not_finite(tensors):
        raise DamagedError(path.parent, f"{path.name} holds {fault}")
    return tensors, meta


def parse(part: bytes) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Return the tensors and the metadata that `format_part` was given. Raise CheckpointError for any other bytes."""
    try:
        size = int.from_bytes(part[:8], "little")
        meta = json.loads(json.loads(part[8 : 8 + size])["__metadata__"]["paceline"])
        return load_bytes(part), meta
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The state of a shard cannot be read: {error}.") from None


def weights(checkpoint: Checkpoint) -> dict[str, npt.NDArray[np.float32]]:
    """Return every tensor of the model by its name, as in a plain state_dict. Raise DamagedError if one is damaged."""
    layout = checkpoint.description.layout
    flat = np.empty(layout.size, dtype=np.float32)
    filled = []
    for number in range(checkpoint.shards):
        tensors, meta = load(shard_file(checkpoint.folder, number), checkpoint.digests[number])
        for piece, where in enumerate(pieces_of(meta)):
            mine = tensors.get(f"{piece}/weights")
            start, stop = where
            if mine is None or mine.shape != (stop - start,) or not 0 <= start <= stop <= layout.size:
                raise DamagedError(checkpoint.folder, f"the part of shard {number} lacks a piece")
            flat[start:stop] = mine
            filled.append((start, stop))
    ends = [0, *(end for part in sorted(filled) for end in part), layout.size]
    if any(end != begin for end, begin in zip(ends[::2], ends[1::2], strict=True)):
        raise DamagedError(checkpoint.folder, "a piece of the model is in no part")
    return {
        tensor.name: flat[offset : offset + tensor.size].reshape(tensor.shape)
        for tensor, offset in zip(layout.tensors, layout.offsets[:-1], strict=True)
    }


def shard_file(folder: Path, number: int) -> Path:
    """Return the file of a shard's part."""
    return folder / f"shard-{number}.safetensors"


def _read(folder: Path, quick: bool) -> Checkpoint:
    """Return the checkpoint in this folder. Raise DamagedError if it is not whole. quick: as in `survey`."""
    checkpoint = _read_job(folder)
    paths: list[Path] = []
    for number in range(checkpoint.shards):
        path = shard_file(folder, number)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise _unreadable(path, error) from None
        if checkpoint.parts and size != checkpoint.parts[number].size:
            raise DamagedError(folder, f"{path.name} has {size} bytes instead of {checkpoint.parts[number].size}")
        paths.append(path)
    if not quick:
        with ThreadPoolExecutor(max_workers=THREADS) as threads:
            list(threads.map(_check_part, paths, checkpoint.digests))
    return checkpoint


def _read_job(folder: Path) -> Checkpoint:
    """Return the checkpoint that `job.json` describes. Raise DamagedError if the file is damaged."""
    try:
        raw = (folder / "job.json").read_bytes()
        job = json.loads(raw)
        known = job["format"]
        if "digest" in job or known != WITHOUT_DIGESTS:
            stated = str(job["digest"]).encode()
            before, _, after = raw.rpartition(stated)
            if len(stated) != len(NO_DIGEST) or _digest(before + NO_DIGEST.encode() + after) != stated.decode():
                raise ValueError("its content does not match its digest")
        if known not in (FORMAT, WITHOUT_DIGESTS):
            raise CheckpointError(f"The checkpoint {folder} has format {known}; this paceline reads {FORMAT}.")
        checkpoint = Checkpoint(folder, job)
        if not 0 <= checkpoint.version < MAX_NUMBER or not 1 <= checkpoint.shards < MAX_NUMBER:
            raise ValueError(f"version {checkpoint.version} of {checkpoint.shards} shards")
        if known == FORMAT and len(checkpoint.parts) != checkpoint.shards:
            raise ValueError("it does not describe all parts")
        _ = checkpoint.description  # raises if it cannot be read
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        if isinstance(error, OSError):
            raise _unreadable(folder / "job.json", error) from None
        why = str(error) if type(error) is ValueError else repr(error)
        raise DamagedError(folder, f"job.json cannot be read: {why}") from None
    if known == WITHOUT_DIGESTS:
        log.debug("The checkpoint %s was written without digests.", folder)
    return checkpoint


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that cannot be read. It is damage, unless this process may not read it now."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE):
        return CheckpointError(f"The checkpoint file {path} cannot be read: {cause(error)}.")
    return DamagedError(path.parent, f"{path.name} cannot be read: {cause(error)}")


def _check_part(path: Path, digest: str) -> None:
    """Raise DamagedError if a part does not have this digest. Without a digest, check that the part can be loaded."""
    if not digest:
        load(path)
        return
    try:
        _check_digest(path, digest)
    except OSError as error:
        raise _unreadable(path, error) from None


def _check_digest(path: Path, digest: str) -> None:
    if digest and digest_of(path) != digest:
        raise DamagedError(path.parent, f"the content of {path.name} does not match its digest")


def _digest(content: bytes) -> str:
    hashed = new_digest()
    hashed.update(content)
    return str(hashed.hexdigest())


def pieces_of(meta: Any) -> list[tuple[int, int]]:
    """Return the range of each piece of a shard from the file's metadata. A range that makes no sense is (-1, -1)."""
    match meta:
        case {"pieces": [*pieces]}:
            ends = [(each.get("start"), each.get("stop")) if isinstance(each, dict) else (-1, -1) for each in pieces]
            return [(a, b) if isinstance(a, int) and isinstance(b, int) else (-1, -1) for a, b in ends]
    return []


def _prune(folder: Path) -> None:
    """Remove all but the newest checkpoints, and what interrupted attempts have left.

    Those that are damaged at first sight neither count nor go. A checkpoint is renamed before it is removed, so that an
    interrupted removal leaves no folder that looks like a damaged checkpoint.
    """
    whole = []
    found = versions(folder)
    for path in found if len(found) > KEPT else ():
        try:
            whole.append(_read(path, quick=True).folder)
        except CheckpointError:
            continue
    for old in whole[:-KEPT]:
        with contextlib.suppress(OSError):  # the next attempt removes it
            old.rename(old.with_name(old.name + PART))
    for part in folder.glob(f"version-*{PART}"):
        shutil.rmtree(part, ignore_errors=True)
