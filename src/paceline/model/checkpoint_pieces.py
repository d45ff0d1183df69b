"""Read a shard's slice of the model from the files of a checkpoint, whichever shards have written them.

A shard opens all files, since a file says itself which pieces it holds. It checks and reads those that overlap its
slice, and keeps no more than its slice in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from paceline.model.checkpoint import CheckpointError, DamagedError, pieces_of, shard_file
from paceline.model.description import Description
from paceline.model.durable import cause
from paceline.model.recut import Array, IncompleteError, SavedPiece, State, cut_again
from paceline.model.tensor_file import digest_of, not_finite


def load_pieces(
    folder: Path, digests: Sequence[str], described: Description, ranges: Sequence[tuple[int, int]]
) -> State:
    """Return the state of a shard that holds these ranges of the model, in the form of its part of a checkpoint.

    digests: of each file of the checkpoint; an empty one is not known. Raise DamagedError if a file is damaged or
    missing, or if the files do not hold each element once, and ValueError if they are of another model.
    """
    with ExitStack() as opened:
        files = [_PartFile(shard_file(folder, number), opened) for number in range(len(digests))]
        for file, digest in zip(files, digests, strict=True):
            if file.overlaps(ranges):
                file.check(digest)
        try:
            return cut_again(
                described.layout, described.optimizer, ranges, [piece for file in files for piece in file.pieces()]
            )
        except IncompleteError as error:
            raise DamagedError(folder, str(error)) from None


class _PartFile:
    """One shard's file of a checkpoint."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self._path = path
        try:
            self._file: Any = opened.enter_context(safe_open(path, "numpy"))
            meta: Any = json.loads((self._file.metadata() or {}).get("paceline", "{}"))
            self._names: list[str] = list(self._file.keys())
        except OSError as error:  # perhaps this machine does not share the folder
            raise CheckpointError(f"The checkpoint file {path} cannot be read: {cause(error)}.") from None
        except (SafetensorError, ValueError) as error:
            raise self._damaged(error) from None
        self._ranges = pieces_of(meta)
        if not self._ranges or not all(0 <= start < stop for start, stop in self._ranges):
            raise DamagedError(path.parent, f"{path.name} does not say which pieces it holds")
        self._metas: list[Mapping[str, Any]] = meta["pieces"]

    def overlaps(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Return whether the file holds an element of these ranges."""
        return any(a < stop and b > start for a, b in self._ranges for start, stop in ranges)

    def check(self, digest: str) -> None:
        """Raise DamagedError if the content of the file has another digest. The file is not kept in memory."""
        try:
            is_damaged = bool(digest) and digest_of(self._path) != digest
        except OSError as error:
            raise CheckpointError(f"The checkpoint file {self._path} cannot be read: {cause(error)}.") from None
        if is_damaged:
            raise DamagedError(self._path.parent, f"the content of {self._path.name} does not match its digest")

    def pieces(self) -> list[SavedPiece]:
        """Return the pieces of the file."""
        return [self._piece(number) for number in range(len(self._ranges))]

    def _piece(self, number: int) -> SavedPiece:
        prefix = f"{number}/"
        names = [name for name in self._names if name.startswith(prefix)]
        shapes = {name.removeprefix(prefix): tuple(self._file.get_slice(name).get_shape()) for name in names}

        def read(name: str, start: int, stop: int) -> Array:
            return self._read(prefix + name, shapes[name], start, stop)

        return SavedPiece(*self._ranges[number], self._metas[number], shapes, read)

    def _read(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> Array:
        """Return a range of the elements of a tensor. Raise DamagedError if a number must not be there."""
        try:
            flat = len(shape) == 1
            part: Array = self._file.get_slice(name)[start:stop] if flat else self._file.get_tensor(name)
        except SafetensorError as error:
            raise self._damaged(error) from None
        part = part if flat else part.reshape(-1)[start:stop]
        if fault := not_finite({name: part}):
            raise DamagedError(self._path.parent, f"{self._path.name} holds {fault}")
        return part

    def _damaged(self, error: Exception) -> DamagedError:
        return DamagedError(self._path.parent, f"{self._path.name} cannot be read: {error}")
