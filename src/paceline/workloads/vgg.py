"""VGG16 (Simonyan and Zisserman, 2015; configuration D) for images as small as CIFAR's.

With batch norm and narrower fully connected layers, as Liu and Deng (2015) have it for such images: without the first
it bears only small learning rates, and of the original's 138 million weights 120 serve to read larger images.
"""

from __future__ import annotations

from torch import nn

from paceline.workloads.small import Shape
from paceline.workloads.weights import rectified

#: Widths of the convolutions; a pool that halves the image comes behind each group.
GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
#: Of the hidden fully connected layers.
HIDDEN = (512, 512)


def vgg16(shape: Shape, classes: int) -> nn.Module:
    """Thirteen convolutions of 3 by 3 and three fully connected layers, without dropout.

    The first of those has 512 inputs for an image of 32 by 32, not the original's 25,088 for 224 by 224.
    """
    inputs, height, width = shape
    layers: list[nn.Module] = []
    for group in GROUPS:
        for outputs in group:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2, ceil_mode=True))  # An odd size is rounded up, so that 28 by 28 is enough.
    layers.append(nn.Flatten())
    inputs *= -(-height // 2 ** len(GROUPS)) * -(-width // 2 ** len(GROUPS))
    for outputs in HIDDEN:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    last = nn.Linear(inputs, classes)
    return rectified(nn.Sequential(*layers, last), last)
