"""The work of every transport: receive a gradient, make one step of plain SGD, and return the weights.

The numbers are chosen so that float32 is exact: after n steps each weight is -n·RATE·gradient. So the weights show how
many steps were made, for every element.
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
    """Return a model of one tensor with `size` elements, under plain SGD."""
    layout = Layout((Tensor("weights", (size,)),))
    return Description(layout, OptimizerSpec("SGD", ({"lr": RATE},)))


class ServedModel:
    """The server's model: weights that begin at zero, and a buffer for received gradients."""

    def __init__(self, size: int) -> None:
        described = description(size)
        self._slice = Slice(described.layout, 0, size, described.optimizer)
        self.weights = self._slice.weights
        self.gradient = torch.zeros(size)

    def step(self, gradient: torch.Tensor) -> None:
        self._slice.step([gradient], [1.0], [RATE])


@dataclass(frozen=True)
class Buffers:
    """The client's buffers: a gradient to send, and space for the weights."""

    gradient: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, size: int) -> Buffers:
        return cls((torch.arange(size) % 7 + 1).to(torch.float32), torch.zeros(size))

    def hold_steps(self, steps: int) -> bool:
        """Return whether every weight is that after the given number of steps."""
        return torch.equal(self.weights, self.gradient * (-RATE * steps))


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a flat tensor."""
    view: memoryview = tensor.numpy().data.cast("B")
    return view
