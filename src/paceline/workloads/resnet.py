"""The residual networks of He et al. (2016) for CIFAR, section 4.2: three stages, 6n + 2 layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from paceline.workloads.small import Shape
from paceline.workloads.weights import he_initialized

WIDTHS = (16, 32, 64)


class Block(nn.Module):
    """Two convolutions and a shortcut without parameters (the paper's option A).

    Where a block has more outputs than inputs, the shortcut takes every second pixel of every second row, and fills the
    additional channels with zeros.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.grows = outputs - inputs
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2 if self.grows else 1, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        shortcut = x
        if self.grows:
            before = self.grows // 2
            shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, before, self.grows - before))
        return F.relu(inner + shortcut)


class Mean(nn.Module):
    """Global average pooling: the mean of each channel over an image of any size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((-2, -1))


def resnet(depth: int, shape: Shape, classes: int) -> nn.Module:
    """Return a residual network of `depth` layers: 20, 32, 44, 56, 110 or another 6n + 2."""
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"A ResNet for CIFAR has 6n + 2 layers, such as 20, 32 or 56; got {depth}.")
    inputs = WIDTHS[0]
    layers: list[nn.Module] = [nn.Conv2d(shape[0], inputs, 3, padding=1, bias=False), nn.BatchNorm2d(inputs), nn.ReLU()]
    for width in WIDTHS:
        for _ in range((depth - 2) // 6):
            layers.append(Block(inputs, width))
            inputs = width
    last = nn.Linear(inputs, classes)
    return he_initialized(nn.Sequential(*layers, Mean(), last), last)
