"""What every transport is asked to do: take a gradient, make one step of plain SGD, and give the weights back.

The numbers are chosen so that float32 loses nothing: after n steps each weight is exactly -n·RATE·gradient. So whoever
has the weights can tell how often, and where, the step was made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.slice import Slice

RATE = 0.5
ELEMENT = 4  # bytes of a float32


def description(size: int) -> Description:
    """A model of one tensor with so many elements, under plain SGD."""
    layout = Layout((Tensor("weights", (size,)),))
    return Description(layout, OptimizerSpec("SGD", ({"lr": RATE},)))


class ServedModel:
    """The serving side: weights that begin at zero, and a buffer to receive gradients into."""

    def __init__(self, size: int) -> None:
        described = description(size)
        self._slice = Slice(described.layout, 0, size, described.optimizer)
        self.weights = self._slice.weights
        self.gradient = torch.zeros(size)

    def step(self, gradient: torch.Tensor) -> None:
        self._slice.step([gradient], [1.0], [RATE])


@dataclass(frozen=True)
class Buffers:
    """The asking side: a gradient to send, and where the weights go."""

    gradient: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, size: int) -> Buffers:
        return cls((torch.arange(size) % 7 + 1).to(torch.float32), torch.zeros(size))

    def hold_steps(self, steps: int) -> bool:
        """Are these the weights after so many steps, each element of them?"""
        return torch.equal(self.weights, self.gradient * (-RATE * steps))


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor, as they lie in memory."""
    view: memoryview = tensor.numpy().data.cast("B")
    return view
