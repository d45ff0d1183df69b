"""AlexNet (Krizhevsky et al., 2012) for images as small as CIFAR's, and a smaller one of the same kind.

Neither has the original's dropout: a simulated run is a function of weights and samples.
"""

from __future__ import annotations

from torch import nn

from paceline.workloads.small import Shape
from paceline.workloads.weights import rectified


def alexnet(shape: Shape, classes: int) -> nn.Module:
    """Five convolutions and three fully connected layers, the widths as in Krizhevsky's one-tower version (2014).

    The original's first layer takes strides of 4 over 224 by 224 pixels; here it takes strides of 2 over 32 by 32, with
    a kernel of 3 by 3 in place of 11 by 11. The three pools are its own: 3 by 3, in strides of 2. In the place of its
    local response normalization there is batch norm, without which it bears only small learning rates.
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
    """Three convolutions and two fully connected layers, as the DSSP paper's (Zhao et al., 2019) has.

    The paper gives no widths; these are 32, 64, 128 and 256.
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
    return nn.MaxPool2d(3, stride=2, padding=1)  # With padding, 8 by 8 is enough, and an odd size is rounded up.


def _built(shape: Shape, convolutions: list[nn.Module], halvings: int, widths: tuple[int, ...]) -> nn.Module:
    """The convolutions, and behind them fully connected layers from the first of the widths to the last."""
    _, height, width = shape
    inputs = widths[0] * -(-height // 2**halvings) * -(-width // 2**halvings)
    layers = [*convolutions, nn.Flatten()]
    for outputs in widths[1:-1]:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    last = nn.Linear(inputs, widths[-1])
    return rectified(nn.Sequential(*layers, last), last)
