"""The state of an optimizer, such as momentum, between the tensors of a model and the parts of the shards.

A shard sees neighbouring tensors as one flat parameter (`slice.py`), and a tensor may be cut between two shards. torch
keeps the state of each tensor apart. A shard's part of the state has the form of its part of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.model import checkpoint
from paceline.model.layout import Layout
from paceline.model.optimizer import trial
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.parts import SlicePart, optimizer_parts

State = dict[str, Any]  # of one parameter: tensors and numbers, as in `torch.optim.Optimizer.state`
Range = tuple[int, int]


def states_of_tensors(layout: Layout, spec: OptimizerSpec, parts: Sequence[bytes]) -> list[State]:
    """Return the state of each tensor of the layout from the parts of all shards.

    A tensor whose parameter has made no step has an empty state, and so has a running statistic.
    """
    states: list[State] = [{} for _ in layout.tensors]
    for part in parts:
        arrays, meta = checkpoint.parse(part)
        for number, piece in enumerate(meta["pieces"]):
            places = optimizer_parts(layout, piece["start"], piece["stop"], spec)
            for index, place in enumerate(places):
                prefix = f"{number}/{index}."
                values: State = {
                    name.removeprefix(prefix): torch.from_numpy(array)
                    for name, array in arrays.items()
                    if name.startswith(prefix)
                }
                values |= {
                    name.removeprefix(f"{index}."): value
                    for name, value in piece["others"].items()
                    if name.startswith(f"{index}.")
                }
                _distribute(layout, place, values, states)
    return states


def part_of_shard(
    layout: Layout,
    spec: OptimizerSpec,
    pieces: Sequence[Range],
    weights: torch.Tensor,
    states: Sequence[State],
) -> bytes:
    """Return a shard's part of a checkpoint with these weights and states. pieces: the shard's.

    weights: the flat weights of the whole model. states: of each tensor of the layout, empty for a tensor without one.
    Raise ValueError if a state does not fit the optimizer.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    described = []
    for number, (start, stop) in enumerate(pieces):
        arrays[f"{number}/weights"] = weights[start:stop].numpy()
        others: dict[str, Any] = {}
        for index, place in enumerate(optimizer_parts(layout, start, stop, spec)):
            for key, value in _collect(layout, spec, place, states).items():
                if isinstance(value, torch.Tensor):
                    arrays[f"{number}/{index}.{key}"] = value.numpy()
                else:
                    others[f"{index}.{key}"] = value
        described.append(
            {"layout": layout.digest(), "start": start, "stop": stop, "optimizer": spec.name, "others": others}
        )
    return checkpoint.format_part(arrays, {"pieces": described})


def _overlaps(layout: Layout, place: SlicePart) -> list[tuple[int, int, int]]:
    """Return the index of each tensor in a shard's parameter, with the start and the stop of the overlap."""
    found = []
    for index, (begin, end) in enumerate(zip(layout.offsets[:-1], layout.offsets[1:], strict=True)):
        start, stop = max(begin, place.start), min(end, place.stop)
        if start < stop:
            found.append((index, start, stop))
    return found


def _distribute(layout: Layout, place: SlicePart, values: State, states: list[State]) -> None:
    """Copy the state of a shard's parameter to the states of the tensors that it consists of."""
    for index, start, stop in _overlaps(layout, place):
        tensor, offset, state = layout.tensors[index], layout.offsets[index], states[index]
        for key, value in values.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0 or tuple(value.shape) != place.shape:
                state[key] = value.clone() if isinstance(value, torch.Tensor) else value
            else:
                if key not in state:
                    state[key] = torch.zeros(tensor.shape, dtype=value.dtype)
                flat = value.reshape(-1)[start - place.start : stop - place.start]
                state[key].view(-1)[start - offset : stop - offset].copy_(flat)


def _collect(layout: Layout, spec: OptimizerSpec, place: SlicePart, states: Sequence[State]) -> State:
    """Return the state of a shard's parameter from the states of its tensors. It is empty if none has a state."""
    overlaps = _overlaps(layout, place)
    known = [states[index] for index, _, _ in overlaps if _values(states[index])]
    if not known:
        return {}
    expected = trial(spec, place.group, len(place.shape))
    collected: State = {}
    for key, like in expected.items():
        given = [state[key] for state in known if state.get(key) is not None]
        if not given:
            raise ValueError(f"the state of {spec.name} lacks {key!r}, which these settings need")
        if isinstance(like, torch.Tensor) and like.dim():
            collected[key] = _joined(layout, place, overlaps, key, states, like.dtype)
        elif isinstance(like, torch.Tensor):  # a count of steps, which may differ between tensors
            collected[key] = torch.tensor(max(float(value) for value in given), dtype=like.dtype)
        else:
            collected[key] = type(like)(max(given))
    return collected


def _joined(
    layout: Layout,
    place: SlicePart,
    overlaps: Sequence[tuple[int, int, int]],
    key: str,
    states: Sequence[State],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a state tensor of a shard's parameter. Elements of a tensor without this state are zero."""
    if len(overlaps) == 1:
        index, start, stop = overlaps[0]
        value: torch.Tensor = states[index][key].detach().cpu().to(dtype)
        offset = layout.offsets[index]
        if tuple(value.shape) != layout.tensors[index].shape:
            return value.contiguous()  # a factor of a matrix, say
        return value.reshape(-1)[start - offset : stop - offset].reshape(place.shape).contiguous()
    joined = torch.zeros(place.stop - place.start, dtype=dtype)
    for index, start, stop in overlaps:
        if (known := states[index].get(key)) is not None:
            if tuple(known.shape) != layout.tensors[index].shape:
                raise ValueError(
                    f"the state {key!r} of {layout.tensors[index].name!r} has another shape than the model"
                )
            flat = known.detach().cpu().reshape(-1)[start - layout.offsets[index] : stop - layout.offsets[index]]
            joined[start - place.start : stop - place.start] = flat.to(dtype)
    return joined.view(place.shape)


def _values(state: Mapping[str, Any]) -> list[Any]:
    return [value for value in state.values() if value is not None]
