"""Convolutions as matrix products, for many clients at once, each with its own weights.

Under `torch.func.vmap` a convolution becomes a grouped one, at which GPUs are slow. A matrix product becomes a batch of
products, at which they are fast. The image is copied once for each place of the kernel, and takes that much more
memory. This suits small images and small kernels.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F


def as_products(network: nn.Module) -> nn.Module:
    """Return an equivalent network that uses matrix products instead of convolutions where it can.

    Its parameters have the same names.
    """
    network = copy.deepcopy(network)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.Conv2d) and _can_be_product(layer):
            within, _, last = name.rpartition(".")
            setattr(network.get_submodule(within), last, Product(layer))
    return network


def _can_be_product(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros" and layer.padding != "same"


class Product(nn.Module):
    """A layer that computes a convolution as a matrix product, with the weights of a Conv2d."""

    def __init__(self, of: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = of.weight, of.bias
        self._kernel, self._stride = of.kernel_size, of.stride
        self._padding = (0, 0) if isinstance(of.padding, str) else of.padding  # "valid" means none

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        given, device = images.dtype, images.device.type
        if torch.is_autocast_enabled(device):  # before the copies, which then take half the memory
            images = images.to(torch.get_autocast_dtype(device))
        count, channels, height, width = images.shape
        down, across = self._padding
        padded = F.pad(images, (across, across, down, down)) if down or across else images
        (tall, wide), (fall, step) = self._kernel, self._stride
        rows, columns = (height + 2 * down - tall) // fall + 1, (width + 2 * across - wide) // step + 1
        places = [
            padded[:, :, top : top + fall * (rows - 1) + 1 : fall, left : left + step * (columns - 1) + 1 : step]
            for top in range(tall)
            for left in range(wide)
        ]
        # Channels first: one matrix for the whole batch, in the layout that the next layer uses.
        laid_out = torch.stack([place.transpose(0, 1) for place in places], 1).view(channels * tall * wide, -1)
        found = (self.weight.flatten(1) @ laid_out).to(given)  # batch norm under vmap needs a single type
        if self.bias is not None:
            found = found + self.bias[:, None]
        return found.view(-1, count, rows, columns).transpose(0, 1)
