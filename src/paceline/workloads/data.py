"""Data sets by name, held in memory and indexed by sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from paceline.workloads import cifar, digits, idx, speech, tokens
from paceline.workloads.errors import DataError, unknown
from paceline.workloads.files import Bytes


@dataclass(frozen=True, eq=False)  # == of tensors is not a single bool, so a data set equals only itself
class Data:
    """A data set: training samples and test samples."""

    name: str
    inputs: torch.Tensor  # training inputs: uint8 images (N, C, H, W), or int64 tokens (N, L)
    labels: torch.Tensor  # int64 (N,), or (N, L) with one label per token
    test_inputs: torch.Tensor
    test_labels: torch.Tensor
    classes: int  # number of different labels
    mean: tuple[float, ...]  # of the training pixels, scaled to 0..1, by channel; empty for tokens
    deviation: tuple[float, ...]  # standard deviation, likewise; 1 for a constant channel
    vocabulary: int = 0  # number of different tokens; 0 for images

    @property
    def is_images(self) -> bool:
        """Whether the inputs are images. Otherwise they are tokens."""
        return bool(self.mean)

    def to(self, device: torch.device | str) -> Data:
        """Return the data set with its tensors on a device."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            labels=self.labels.to(device),
            test_inputs=self.test_inputs.to(device),
            test_labels=self.test_labels.to(device),
        )

    def prepared(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return inputs as a network takes them: tokens unchanged, images (..., C, H, W) as normalized float32.

        A pixel x becomes (x / 255 - mean) / deviation.
        """
        if not self.is_images:
            return inputs
        mean, deviation = (_by_channel(each, inputs.device) for each in (self.mean, self.deviation))
        return (inputs.to(torch.float32) / 255 - mean) / deviation

    def limited(self, samples: int) -> Data:
        """Return the data set with at most the first `samples` training samples, and everything else unchanged.

        Mean and deviation stay those of the whole set, so that a network sees a sample the same way.
        """
        if samples < 1:
            raise DataError(f"{self.name} must keep at least 1 training sample; got {samples}.")
        return replace(self, inputs=self.inputs[:samples], labels=self.labels[:samples])


@lru_cache  # A CUDA graph cannot capture a copy to the device, so the copy happens only once, before the capture.
def _by_channel(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


def load(name: str, folder: Path | None = None) -> Data:
    """Load the data set of that name.

    folder: the folder that holds the files of the data set, directly or in a subfolder with a usual name. None: the
        folder in the environment variable PACELINE_DATA. `digits`, `tokens` and `translation` need no files.
    """
    if name not in _SETS:
        raise DataError(unknown("data set", name, _SETS))
    return _SETS[name](None if folder is None else Path(folder))


def names() -> list[str]:
    """Return the names of all data sets. The first one is the default."""
    return list(_SETS)


def _idx(name: str) -> Callable[[Path | None], Data]:
    return lambda folder: _images(name, idx.CLASSES, *idx.load(name, folder))


def _cifar(name: str) -> Callable[[Path | None], Data]:
    return lambda folder: _images(name, cifar.CLASSES[name], *cifar.load(name, folder))


def _images(name: str, classes: int, images: Bytes, labels: Bytes, test_images: Bytes, test_labels: Bytes) -> Data:
    mean, deviation = moments(images)
    return Data(
        name,
        torch.from_numpy(images),
        torch.from_numpy(labels.astype(np.int64)),
        torch.from_numpy(test_images),
        torch.from_numpy(test_labels.astype(np.int64)),
        classes,
        mean,
        deviation,
    )


def _tokens(name: str, classes: int, vocabulary: int, arrays: tuple[tokens.Tokens, ...]) -> Data:
    inputs, labels, test_inputs, test_labels = (torch.from_numpy(each) for each in arrays)
    return Data(name, inputs, labels, test_inputs, test_labels, classes, (), (), vocabulary)


def moments(images: Bytes) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel's pixels, scaled to 0..1.

    They are computed from sums of integers, so they are exact and the same on every machine.
    """
    count = images.size // images.shape[1]
    sums, squares = (np.zeros(images.shape[1], np.uint64) for _ in range(2))
    for start in range(0, len(images), 1000):  # in pieces, because squares need more memory than pixels
        piece = images[start : start + 1000]
        sums += piece.sum(axis=(0, 2, 3), dtype=np.uint64)
        squares += np.square(piece, dtype=np.uint16).sum(axis=(0, 2, 3), dtype=np.uint64)  # 255² fits into uint16
    mean, deviation = [], []
    for total, of_squares in zip(sums.tolist(), squares.tolist(), strict=True):
        mean.append(total / count / 255)
        deviation.append(math.sqrt(of_squares * count - total * total) / count / 255 or 1.0)
    return tuple(mean), tuple(deviation)


_SETS: dict[str, Callable[[Path | None], Data]] = {
    "digits": lambda _: _images("digits", digits.CLASSES, *digits.load()),
    "mnist": _idx("mnist"),
    "fashion-mnist": _idx("fashion-mnist"),
    "cifar10": _cifar("cifar10"),
    "cifar100": _cifar("cifar100"),
    "speech": lambda folder: _images("speech", len(speech.WORDS), *speech.load(folder)),
    "tokens": lambda _: _tokens("tokens", tokens.CLASSES, tokens.TOPICS_VOCABULARY, tokens.topics()),
    "translation": lambda _: _tokens(
        "translation", tokens.TRANSLATION_VOCABULARY, tokens.TRANSLATION_VOCABULARY, tokens.translation()
    ),
}
