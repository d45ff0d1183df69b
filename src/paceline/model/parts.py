"""The parts of a slice that its optimizer sees as parameters, and the model that a saved state belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.model.layout import STATISTICS, Layout
from paceline.model.optimizer_spec import OptimizerSpec, is_elementwise


@dataclass(frozen=True)
class SlicePart:
    """A range of the model's buffer that the optimizer sees as one parameter, in this shape."""

    start: int
    stop: int
    group: int
    shape: tuple[int, ...]


def slice_parts(layout: Layout, start: int, stop: int, whole: bool) -> list[SlicePart]:
    """Return the parameters of a slice.

    whole: each tensor is one parameter, in its own shape. Otherwise neighbours of one group are joined to one flat
    parameter. Then a step is one pass over a large tensor instead of many passes over small ones.
    """
    parts: list[SlicePart] = []
    for tensor, begin, end in layout.within(start, stop):
        if whole:
            parts.append(SlicePart(begin, end, tensor.group, tensor.shape))
            continue
        if parts and parts[-1].group == tensor.group:
            begin = parts.pop().start
        parts.append(SlicePart(begin, end, tensor.group, (end - begin,)))
    return parts


def optimizer_parts(layout: Layout, start: int, stop: int, spec: OptimizerSpec) -> list[SlicePart]:
    """Return the parameters of a slice that have a state in the optimizer. Running statistics have none."""
    parts = slice_parts(layout, start, stop, whole=not is_elementwise(spec.name))
    return [part for part in parts if part.group != STATISTICS]


def check_origin(meta: Mapping[str, Any], layout_digest: str, spec: OptimizerSpec) -> None:
    """Raise ValueError if the saved state of a slice is of another model or of another optimizer."""
    if meta.get("layout") != layout_digest:
        raise ValueError("the checkpoint is of another model: names, shapes, types or groups of parameters differ")
    if meta.get("optimizer") != spec.name:
        raise ValueError(f"the checkpoint is of {meta.get('optimizer')}, and this run uses {spec.name}")
