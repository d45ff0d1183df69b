"""The usual augmentation of CIFAR-10: an image padded by four pixels, cropped at random, and mirrored or not.

A variant of a sample is one number, which says which crop it is. So what a worker computes depends on the numbers that
it drew and on nothing else, whenever and on whichever device it is computed.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from paceline.workloads.data import Data
from paceline.workloads.errors import DataError

PADDING = 4
OFFSETS = 2 * PADDING + 1
VARIANTS = 2 * OFFSETS * OFFSETS  # of each sample


class Crops:
    """The variants of the training images of a data set."""

    def __init__(self, data: Data) -> None:
        """data: on the device on which the variants are made."""
        if not data.is_images:
            raise DataError(f"Only images can be cropped, and {data.name} has none.")
        self._padded = F.pad(data.inputs, (PADDING,) * 4)
        device = data.inputs.device
        height, width = data.inputs.shape[2:]
        self._rows = torch.arange(height, device=device)
        self._columns = torch.arange(width, device=device)
        self._channels = torch.arange(data.inputs.shape[1], device=device)

    def images(self, variants: torch.Tensor) -> torch.Tensor:
        """Return the images of these variants."""
        sample, crop = variants // VARIANTS, variants % VARIANTS
        down, right, mirrored = crop % OFFSETS, crop // OFFSETS % OFFSETS, crop // OFFSETS**2
        rows = self._rows + down[:, None]
        columns = torch.where(mirrored[:, None] == 1, self._columns.flip(0), self._columns) + right[:, None]
        return self._padded[
            sample[:, None, None, None], self._channels[:, None, None], rows[:, None, :, None], columns[:, None, None]
        ]


def draw(samples: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a random variant of each sample."""
    return samples * VARIANTS + torch.randint(VARIANTS, samples.shape, generator=generator)


def samples_of(variants: torch.Tensor) -> torch.Tensor:
    """Return the samples of these variants."""
    return variants // VARIANTS
