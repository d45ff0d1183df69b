"""Small networks for small images: fully connected, convolutional and recurrent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from paceline.workloads.weights import he_initialized

Shape = tuple[int, int, int]


def mlp(shape: Shape, classes: int, units: Sequence[int] = (256, 128)) -> nn.Module:
    """Return a fully connected network whose hidden layers have the given numbers of units."""
    layers: list[nn.Module] = [nn.Flatten()]
    before = math.prod(shape)
    for each in units:
        layers += [nn.Linear(before, each), nn.ReLU()]
        before = each
    last = nn.Linear(before, classes)
    return he_initialized(nn.Sequential(*layers, last), last)


def dnn(hidden: int, shape: Shape, classes: int) -> nn.Module:
    """Return the RLP paper's DNN: `hidden` hidden layers of 256 units. With 0 it is logistic regression."""
    return mlp(shape, classes, (256,) * hidden)


def cnn(shape: Shape, classes: int) -> nn.Module:
    """Return two convolutions of 3 by 3, each followed by a pool that halves the image, and one linear layer."""
    channels, height, width = shape
    last = nn.Linear(32 * (height // 4) * (width // 4), classes)
    layers = (
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        last,
    )
    return he_initialized(nn.Sequential(*layers), last)


class LSTM(nn.Module):
    """An LSTM that reads an image row by row, from the top, and classifies it at the end.

    The cell is written out, because torch's own cannot run under `torch.func.vmap`.
    """

    def __init__(self, shape: Shape, classes: int, units: int = 64) -> None:
        super().__init__()
        channels, _, width = shape
        self.units = units
        self.read = nn.Linear(channels * width, 4 * units)
        self.recall = nn.Linear(units, 4 * units, bias=False)
        self.answer = nn.Linear(units, classes)
        with torch.no_grad():
            self.read.bias[units : 2 * units] = 1  # open the forget gate, so that the cell remembers at first

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = self.read(images.transpose(1, 2).flatten(2))  # (N, H, 4 * units); each row has all of its channels
        state = memory = torch.zeros_like(rows[:, 0, : self.units])
        for row in rows.unbind(1):
            gates = row + self.recall(state)
            write, keep, show, content = gates.chunk(4, dim=1)
            memory = keep.sigmoid() * memory + write.sigmoid() * content.tanh()
            state = show.sigmoid() * memory.tanh()
        logits: torch.Tensor = self.answer(state)
        return logits
