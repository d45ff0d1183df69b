"""Data sets and their files, made up for tests."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.workloads.data import Data

Bytes = NDArray[np.uint8]


def idx(content: Bytes) -> bytes:
    """The bytes of an IDX file."""
    return bytes((0, 0, 8, content.ndim)) + struct.pack(f">{content.ndim}I", *content.shape) + content.tobytes()


def write_idx(folder: Path, seed: int = 0, packed: bool = False, count: int = 12) -> dict[str, Bytes]:
    """The four files of a set like MNIST, half as many samples to test with; returns what is in each."""
    random = np.random.RandomState(seed)
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, Bytes] = {}
    for part, samples in (("train", count), ("t10k", count // 2)):
        written[f"{part}-images-idx3-ubyte"] = random.randint(256, size=(samples, 28, 28)).astype(np.uint8)
        written[f"{part}-labels-idx1-ubyte"] = random.randint(10, size=samples).astype(np.uint8)
    for name, content in written.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(content), 1))
        else:
            (folder / name).write_bytes(idx(content))
    return written


CIFAR_FILES = {
    "cifar10": [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"],
    "cifar100": ["train.bin", "test.bin"],
}


def write_cifar(folder: Path, name: str, count: int = 3) -> dict[str, Bytes]:
    """The files of a CIFAR set, so many records each; returns the records in each, a row each."""
    random = np.random.RandomState(0)
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for file in CIFAR_FILES[name]:
        labels = [random.randint(10, size=count)] if name == "cifar10" else []
        if name == "cifar100":
            labels = [random.randint(20, size=count), random.randint(20, 100, size=count)]  # coarse, fine
        records = np.column_stack([*labels, random.randint(256, size=(count, 3072))]).astype(np.uint8)
        (folder / file).write_bytes(records.tobytes())
        written[file] = records
    return written


def images(channels: int, side: int, samples: int = 8, classes: int = 10) -> Data:
    """A set of random images."""
    random = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.randint(256, (count, channels, side, side), generator=random, dtype=torch.uint8)
        return pixels, torch.randint(classes, (count,), generator=random)

    half, deviation = (0.5,) * channels, (0.29,) * channels
    return Data("made", *some(samples), *some(4), classes, half, deviation)
