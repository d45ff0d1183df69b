"""Networks by name, made to fit a data set; and their loss and accuracy.

A network is a plain module that takes `data.prepared(inputs)` and returns logits. Networks for images can also run for
many workers at once: with `torch.func.functional_call` under `torch.func.vmap` over stacked parameters, after a call of
`torch.func.replace_all_batch_norm_modules_`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from paceline.workloads import alexnet, language, small, vgg
from paceline.workloads.data import Data
from paceline.workloads.errors import NetworkError, unknown
from paceline.workloads.resnet import resnet
from paceline.workloads.small import Shape


def make(name: str, data: Data) -> nn.Module:
    """Return a new network for a data set, with weights from torch's global generator."""
    known = _known(name)
    known.check(name, data)
    return known.build(name, data)


def names() -> list[str]:
    """Return the names of all networks."""
    return list(_NETWORKS)


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of logits (..., classes) for labels (...), one per sample or one per token."""
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), labels.reshape(-1))


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the share of labels (...) that have the largest of the logits (..., classes), as a scalar tensor."""
    return (output.argmax(-1) == labels).to(torch.float32).mean()


def parameters_of(name: str, data: Data) -> int:
    """Return the number of parameters of a network for a data set, without allocating or drawing weights."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make(name, data).parameters())


def smallest_image(name: str) -> int:
    """Return the smallest height and width of an image that a network takes; 0 if it reads tokens."""
    known = _known(name)
    return known.smallest if isinstance(known, _Images) else 0


@dataclass(frozen=True)
class _Images:
    """A network for images."""

    construct: Callable[[Shape, int], nn.Module]
    smallest: int = 1

    def check(self, name: str, data: Data) -> None:
        if not data.is_images:
            raise NetworkError(
                f"{name} needs images, and {data.name} has none. Choose digits or another data set of images."
            )
        height, width = data.inputs.shape[2:]
        if min(height, width) < self.smallest:
            raise NetworkError(
                f"{name} needs images of at least {self.smallest} by {self.smallest}, and those of {data.name} are "
                f"{height} by {width}. Choose another network or another data set."
            )

    def build(self, name: str, data: Data) -> nn.Module:
        channels, height, width = data.inputs.shape[1:]
        return self.construct((channels, height, width), data.classes)


@dataclass(frozen=True)
class _Tokens:
    """A network for tokens. It labels each sequence, or, if it writes, each token of its output."""

    construct: Callable[[str, Data], nn.Module]
    writes: bool

    def check(self, name: str, data: Data) -> None:
        if data.is_images or (data.labels.ndim == 2) != self.writes:
            wanted = "translation" if self.writes else "tokens"
            raise NetworkError(f"{name} cannot be trained on {data.name}. Choose the data set {wanted}.")

    def build(self, name: str, data: Data) -> nn.Module:
        return self.construct(name, data)


def _known(name: str) -> _Images | _Tokens:
    if name not in _NETWORKS:
        raise NetworkError(unknown("network", name, _NETWORKS))
    return _NETWORKS[name]


_NETWORKS: dict[str, _Images | _Tokens] = {
    "mlp": _Images(small.mlp),
    **{f"dnn{hidden}": _Images(partial(small.dnn, hidden)) for hidden in range(7)},
    "cnn": _Images(small.cnn, smallest=4),
    "lstm": _Images(small.LSTM),
    "alexnet-small": _Images(alexnet.alexnet_small, smallest=8),
    "alexnet": _Images(alexnet.alexnet, smallest=17),
    # Five pools halve the image. In a smaller one, the last convolutions would see a single pixel.
    "vgg16": _Images(vgg.vgg16, smallest=17),
    **{f"resnet{depth}": _Images(partial(resnet, depth), smallest=8) for depth in (20, 32, 56, 110)},
    **{name: _Tokens(language.bert, writes=False) for name in language.BERT},
    **{name: _Tokens(language.t5, writes=True) for name in language.T5},
}
