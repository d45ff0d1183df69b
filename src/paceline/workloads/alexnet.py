"""AlexNet (Krizhevsky et al., 2012) for images as small as CIFAR's, and a smaller variant.

Neither has the original's dropout, because a simulated run must be a function of weights and samples alone.
"""

from __future__ import annotations

from torch import nn

from paceline.workloads.small import Shape
from paceline.workloads.weights import he_initialized


def alexnet(shape: Shape, classes: int) -> nn.Module:
    """Return AlexNet: five convolutions and three fully connected layers, with the widths of Krizhevsky (2014).

    The original's first layer has a stride of 4 and a kernel of 11 by 11, for 224 by 224 pixels. Here it has a stride
    of 2 and a kernel of 3 by 3, for 32 by 32 pixels. The three pools are the original's: 3 by 3 with a stride of 2.
    Batch norm replaces local response normalization; without it the network trains only at small learning rates.
    """
    return _built(
        shape,
        [
            nn.Conv2d(shape[0], 64, 3, stride=2, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            _pool(),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.BatchNorm2d(192),
            nn.ReLU(),
            _pool(),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.BatchNorm2d(384),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.BatchNorm2d(256),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.BatchNorm2d(256),
            nn.ReLU(),
            _pool(),
        ],
        halvings=4,
        widths=(256, 4096, 4096, classes),
    )


def alexnet_small(shape: Shape, classes: int) -> nn.Module:
    """Return the small AlexNet of the DSSP paper (Zhao et al., 2019): three convolutions, two fully connected layers.

    The paper gives no widths. These are 32, 64, 128 and 256.
    """
    return _built(
        shape,
        [
            nn.Conv2d(shape[0], 32, 5, padding=2),
            nn.ReLU(),
            _pool(),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            _pool(),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            _pool(),
        ],
        halvings=3,
        widths=(128, 256, classes),
    )


def _pool() -> nn.Module:
    return nn.MaxPool2d(3, stride=2, padding=1)  # padding makes 8 by 8 pixels large enough, and rounds odd sizes up


def _built(shape: Shape, convolutions: list[nn.Module], halvings: int, widths: tuple[int, ...]) -> nn.Module:
    """Return the convolutions followed by fully connected layers of the given widths."""
    _, height, width = shape
    inputs = widths[0] * -(-height // 2**halvings) * -(-width // 2**halvings)
    layers = [*convolutions, nn.Flatten()]
    for outputs in widths[1:-1]:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    last = nn.Linear(inputs, widths[-1])
    return he_initialized(nn.Sequential(*layers, last), last)
