"""Networks by name, made to fit a data set, and how well one does.

Each is a plain module that takes `data.prepared(inputs)` and gives logits. Those for images can also be run for many
workers at once: `torch.func.functional_call` under `torch.func.vmap`, over stacked parameters, once
`torch.func.replace_all_batch_norm_modules_` has had the module.
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

__all__ = ["NetworkError", "accuracy", "loss", "make", "names", "parameters_of", "smallest_image"]


def make(name: str, data: Data) -> nn.Module:
    """The network of that name for that set, with fresh weights from torch's global generator."""
    known = _known(name)
    known.check(name, data)
    return known.build(name, data)


def names() -> list[str]:
    """Every known network's name."""
    return list(_NETWORKS)


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of logits (..., classes) for labels (...): of a sample each, or of a token each."""
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), labels.reshape(-1))


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The share of labels (...) for which the logits (..., classes) are largest, as a tensor without dimensions."""
    return (output.argmax(-1) == labels).to(torch.float32).mean()


def parameters_of(name: str, data: Data) -> int:
    """How many parameters the network has for that set. Draws no weights and takes no memory for them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make(name, data).parameters())


def smallest_image(name: str) -> int:
    """The least height and width of an image that the network takes; 0 if it reads tokens."""
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
                f"{name} looks at images, and {data.name} has none: take digits or another set of images"
            )
        height, width = data.inputs.shape[2:]
        if min(height, width) < self.smallest:
            raise NetworkError(
                f"{name} needs images of at least {self.smallest} by {self.smallest}, and those of {data.name} are "
                f"{height} by {width}: take a smaller network or another set"
            )

    def build(self, name: str, data: Data) -> nn.Module:
        channels, height, width = data.inputs.shape[1:]
        return self.construct((channels, height, width), data.classes)


@dataclass(frozen=True)
class _Tokens:
    """A network for tokens. It gives a label to each sequence, or to each token of what it writes."""

    construct: Callable[[str, Data], nn.Module]
    writes: bool

    def check(self, name: str, data: Data) -> None:
        if data.is_images or (data.labels.ndim == 2) != self.writes:
            wanted = "translation" if self.writes else "tokens"
            raise NetworkError(f"{name} cannot be trained on {data.name}: take the set {wanted}")

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
    # Five halvings: with less than this the last ones would have a single pixel to look at.
    "vgg16": _Images(vgg.vgg16, smallest=17),
    **{f"resnet{depth}": _Images(partial(resnet, depth), smallest=8) for depth in (20, 32, 56, 110)},
    **{name: _Tokens(language.bert, writes=False) for name in language.BERT},
    **{name: _Tokens(language.t5, writes=True) for name in language.T5},
}
