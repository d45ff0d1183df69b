"""Cut a saved model again: from the pieces that some shards have written to the slices that other shards hold.

A checkpoint is a set of pieces, each with its weights, its optimizer's state and the newest gradient. A new slice is
put together from the pieces that overlap it. Tensors with a value for each element are cut and joined. Optimizers that
need whole tensors have pieces that end where tensors do, so the state of a tensor moves as a whole.

Numbers that a parameter has once, such as the step of Adam, are the same in all pieces of a job. They can differ only
if a streamed push was cut off, so that some pieces have made a step that others have not, or if the user has loaded an
optimizer whose tensors had made different numbers of steps. The slice then takes the numbers of the piece with the
most steps.

This module reads no file: a piece names its tensors, and a function returns a range of their elements. So a shard reads
no more than its own slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from paceline.model.layout import Layout
from paceline.model.optimizer import trial
from paceline.model.optimizer_spec import OptimizerSpec, is_elementwise
from paceline.model.parts import SlicePart, check_origin, optimizer_parts
from paceline.model.slice import NOT_OF_OPTIMIZER

Array: TypeAlias = npt.NDArray[Any]
State: TypeAlias = tuple[dict[str, Array], dict[str, Any]]  # tensors and metadata, as `Slice.state` returns them


class IncompleteError(ValueError):
    """The pieces do not hold what a slice needs, or hold it twice."""


@dataclass(frozen=True)
class SavedPiece:
    """The saved state of the elements [start, stop) of a model."""

    start: int
    stop: int
    meta: Mapping[str, Any]  # as `Slice.state` returned it
    shapes: Mapping[str, tuple[int, ...]]  # of its tensors
    read: Callable[[str, int, int], Array]  # returns a range of the elements of a tensor, which is flat for this

    @classmethod
    def of(cls, tensors: Mapping[str, Array], meta: Mapping[str, Any]) -> SavedPiece:
        """Return the piece with these tensors, which are in memory."""
        shapes = {name: array.shape for name, array in tensors.items()}
        return cls(meta["start"], meta["stop"], meta, shapes, lambda name, a, b: tensors[name].reshape(-1)[a:b])

    def whole(self, name: str) -> Array:
        """Return a whole tensor in its own shape."""
        shape = self.shapes[name]
        return self.read(name, 0, int(np.prod(shape, dtype=np.int64))).reshape(shape)

    @cached_property
    def keys(self) -> dict[int, dict[str, bool]]:
        """The names of the optimizer's state of each parameter, and whether they are tensors."""
        others = self.meta.get("others")
        if not isinstance(others, Mapping):
            raise IncompleteError(f"the piece from {self.start} to {self.stop} does not say what it holds")
        found: dict[int, dict[str, bool]] = {}
        for names, are_tensors in ((self.shapes, True), (others, False)):
            for name in names:
                index, _, key = name.partition(".")
                if index.isdecimal():
                    found.setdefault(int(index), {})[key] = are_tensors
        return found

    def steps(self, index: int) -> float:
        """Return how many steps a parameter has made, or 0 if its optimizer does not count them."""
        is_tensor = self.keys.get(index, {}).get("step")
        if is_tensor is None:
            return 0.0
        value = self.whole(f"{index}.step").reshape(-1)[0] if is_tensor else self.meta["others"][f"{index}.step"]
        return float(value)


class _Source(NamedTuple):
    """A parameter of a saved piece, and the elements of it that a new parameter needs."""

    piece: SavedPiece
    number: int  # of the parameter in its piece
    part: SlicePart
    start: int
    stop: int

    @property
    def keys(self) -> dict[str, bool]:
        return self.piece.keys.get(self.number, {})

    @property
    def steps(self) -> float:
        return self.piece.steps(self.number)

    def name(self, key: str) -> str:
        return f"{self.number}.{key}"


def cut_again(
    layout: Layout, spec: OptimizerSpec, ranges: Sequence[tuple[int, int]], pieces: Sequence[SavedPiece]
) -> State:
    """Return the state of a shard that holds these ranges of the model, in the form of its part of a checkpoint.

    Raise IncompleteError if the pieces do not hold each element once, and ValueError if they are of another model.
    """
    digest = layout.digest()
    parts = {id(piece): optimizer_parts(layout, piece.start, piece.stop, spec) for piece in pieces}
    tensors, described = dict[str, Array](), list[dict[str, Any]]()
    for number, (start, stop) in enumerate(ranges):
        needed = _overlapping(pieces, start, stop)
        for piece in needed:
            check_origin(piece.meta, digest, spec)
        found, others = _joined_elements(needed, start, stop), dict[str, Any]()
        known = [_Source(piece, *each) for piece in needed for each in _within(parts[id(piece)], start, stop)]
        for index, part in enumerate(optimizer_parts(layout, start, stop, spec)):
            sources = [each for each in known if part.start <= each.start < part.stop]
            collect = _joined_state if is_elementwise(spec.name) else _moved_state
            for key, value in collect(part, sources, spec).items():
                (found if isinstance(value, np.ndarray) else others)[f"{index}.{key}"] = value
        tensors |= {f"{number}/{name}": array for name, array in found.items()}
        meta = {"layout": digest, "start": start, "stop": stop, "optimizer": spec.name, "others": others}
        leading = max(known, key=lambda each: each.steps).piece if known else needed[0]
        described.append(meta | {key: leading.meta[key] for key in ("last", "round_weight") if key in leading.meta})
    return tensors, {"pieces": described}


def _overlapping(pieces: Sequence[SavedPiece], start: int, stop: int) -> list[SavedPiece]:
    """Return the pieces that hold the elements [start, stop), in their order."""
    found = sorted((each for each in pieces if each.start < stop and each.stop > start), key=lambda each: each.start)
    at = start
    for piece in found:
        if max(piece.start, start) != at:
            break
        at = min(piece.stop, stop)
    if at != stop or sum(min(each.stop, stop) - max(each.start, start) for each in found) != stop - start:
        raise IncompleteError(f"its parts do not hold each of the elements {start} to {stop} of the model once")
    return found


def _within(parts: Sequence[SlicePart], start: int, stop: int) -> list[tuple[int, SlicePart, int, int]]:
    """Return the parts that overlap the elements [start, stop): index, part, and start and stop of the overlap."""
    cut = ((index, part, max(part.start, start), min(part.stop, stop)) for index, part in enumerate(parts))
    return [each for each in cut if each[2] < each[3]]


def _joined_elements(pieces: Sequence[SavedPiece], start: int, stop: int) -> dict[str, Array]:
    """Return the weights, and what all pieces have of the rest: training can begin without it."""
    joined = {}
    for name in ("weights", *NOT_OF_OPTIMIZER):
        if name != "weights" and not all(name in piece.shapes for piece in pieces):
            continue
        for piece in pieces:
            if piece.shapes.get(name) != (piece.stop - piece.start,):
                raise IncompleteError(f"the piece from {piece.start} to {piece.stop} has no {name} of that size")
        ends = [(piece, max(start, piece.start), min(stop, piece.stop)) for piece in pieces]
        joined[name] = _concatenated([piece.read(name, a - piece.start, b - piece.start) for piece, a, b in ends])
    return joined


def _joined_state(part: SlicePart, sources: Sequence[_Source], spec: OptimizerSpec) -> dict[str, Any]:
    """Return the state of a flat parameter. It is empty if no piece has made a step."""
    known = [each for each in sources if each.keys]
    if not known:
        return {}
    leading, state = max(known, key=lambda each: each.steps), dict[str, Any]()
    for key, is_tensor in leading.keys.items():
        if not is_tensor:
            state[key] = leading.piece.meta["others"][leading.name(key)]
        elif not leading.piece.shapes[leading.name(key)]:
            state[key] = leading.piece.whole(leading.name(key))
        else:
            state[key] = _concatenated([_elements(each, key, spec) for each in sources])
    return state


def _elements(source: _Source, key: str, spec: OptimizerSpec) -> Array:
    """Return the elements of a state tensor. A parameter without a state has that of a step without a gradient."""
    part, count = source.part, source.stop - source.start
    if not source.keys:
        like = trial(spec, part.group, 1)[key]
        assert isinstance(like, torch.Tensor)
        return like.numpy().repeat(count)
    if source.piece.shapes.get(source.name(key)) != part.shape:
        raise IncompleteError(f"the piece from {source.piece.start} to {source.piece.stop} has no {key!r} of its size")
    return source.piece.read(source.name(key), source.start - part.start, source.stop - part.start)


def _moved_state(part: SlicePart, sources: Sequence[_Source], _: OptimizerSpec) -> dict[str, Any]:
    """Return the state of a parameter that is a whole tensor."""
    if len(sources) != 1 or sources[0].part != part:
        raise IncompleteError(f"no part holds the whole tensor from {part.start} to {part.stop}")
    piece, own = sources[0].piece, sources[0]
    return {
        key: piece.whole(own.name(key)) if is_tensor else piece.meta["others"][own.name(key)]
        for key, is_tensor in own.keys.items()
    }


def _concatenated(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
