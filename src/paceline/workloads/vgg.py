"""VGG16 (Simonyan and Zisserman, 2015; configuration D) for images as small as CIFAR's.

It has batch norm and narrower fully connected layers, as Liu and Deng (2015) use for such images. Without batch norm it
trains only at small learning rates. Of the original's 138 million weights, 120 million serve to read larger images.
"""

from __future__ import annotations

from torch import nn

from paceline.workloads.small import Shape
from paceline.workloads.weights import he_initialized

#: Widths of the convolutions. A pool that halves the image follows each group.
GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
#: Widths of the hidden fully connected layers.
HIDDEN = (512, 512)


def vgg16(shape: Shape, classes: int) -> nn.Module:
    """Return VGG16: thirteen convolutions of 3 by 3 and three fully connected layers, without dropout.

    The first fully connected layer has 512 inputs for an image of 32 by 32. The original has 25,088 for 224 by 224.
    """
    inputs, height, width = shape
    layers: list[nn.Module] = []
    for group in GROUPS:
        for outputs in group:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2, ceil_mode=True))  # rounds odd sizes up, which makes 28 by 28 large enough
    layers.append(nn.Flatten())
    inputs *= -(-height // 2 ** len(GROUPS)) * -(-width // 2 ** len(GROUPS))
    for outputs in HIDDEN:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    last = nn.Linear(inputs, classes)
    return he_initialized(nn.Sequential(*layers, last), last)
