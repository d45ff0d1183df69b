"""Convolutions as matrix products, so that those of many clients, each with weights of its own, are one product.

Under `torch.func.vmap` a convolution becomes a grouped one, which GPUs are slow at; a product of matrices becomes a
batch of products, which they are quick at. The image is laid out once for each place of the kernel and takes that much
more memory: right for small images and small kernels.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F


def as_products(network: nn.Module) -> nn.Module:
    """A network that does the same, with parameters of the same names, and no convolution that can be helped."""
    network = copy.deepcopy(network)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.Conv2d) and _plain(layer):
            within, _, last = name.rpartition(".")
            setattr(network.get_submodule(within), last, Product(layer))
    return network


def _plain(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros" and layer.padding != "same"


class Product(nn.Module):
    """Does as the convolution it is made of."""

    def __init__(self, of: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = of.weight, of.bias
        self._kernel, self._stride = of.kernel_size, of.stride
        self._padding = (0, 0) if isinstance(of.padding, str) else of.padding  # "valid" is none

    def forward(self, images: torch.Tensor) -> torch.Tensor:
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
        # Channels first: one matrix for the whole batch, and the next layer takes it as it is.
        laid_out = torch.stack([place.transpose(0, 1) for place in places], 1).view(channels * tall * wide, -1)
        found = (self.weight.flatten(1) @ laid_out).to(images.dtype)  # batch norm under vmap takes no mixture
        if self.bias is not None:
            found = found + self.bias[:, None]
        return found.view(-1, count, rows, columns).transpose(0, 1)
