"""Reads CIFAR's binary files. A record has its labels, and then its planes of red, green and blue."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.workloads.errors import DataError
from paceline.workloads.files import Bytes, FileSet, check_labels, find, opened, read_rest

IMAGE = (3, 32, 32)
PIXELS = 3 * 32 * 32

FILE_SETS = {
    "cifar10": FileSet(
        "cifar10",
        (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
        ("cifar-10-batches-bin", "cifar-10", "cifar10", "CIFAR10", "cifar10/cifar-10-batches-bin"),
        unread=("cifar-10-batches-py",),
    ),
    "cifar100": FileSet(
        "cifar100",
        ("train.bin", "test.bin"),
        ("cifar-100-binary", "cifar-100", "cifar100", "CIFAR100", "cifar100/cifar-100-binary"),
        unread=("cifar-100-python",),
    ),
}
CLASSES = {"cifar10": 10, "cifar100": 100}
#: Label bytes in a record. CIFAR-100 has a coarse label first; the last label is the one to learn.
LABELS = {"cifar10": 1, "cifar100": 2}
#: Records in a published file, for error messages; 10,000 in all other files.
PUBLISHED = {"train.bin": 50_000}


def load(name: str, folder: Path | None) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Return images (N, 3, 32, 32) and labels (N,) for training, and the same for testing."""
    *training, test = find(FILE_SETS[name], folder)
    batches = [records(path, LABELS[name]) for path in training]
    for path, batch in zip(
        training, batches, strict=True
    ):  # only this finds a file that was cut at the end of a record
        if len(batch) != len(batches[0]):
            others = f"{training[0].name} has {len(batches[0]):,}"
            raise DataError(f"{path} has {len(batch):,} images, but {others}. Download both again.")
    for path, batch in zip([*training, test], [*batches, tests := records(test, LABELS[name])], strict=True):
        check_labels(path, batch[:, LABELS[name] - 1], CLASSES[name])
    return (*_images_and_labels(batches, LABELS[name]), *_images_and_labels([tests], LABELS[name]))


def records(path: Path, labels: int) -> Bytes:
    """Return the records in a file, one per row: at least one. There may be fewer than in the published file."""
    record = labels + PIXELS
    with opened(path) as (stream, size):
        assert size is not None, "CIFAR files are never packed"
        if not size or size % record:
            whole = PUBLISHED.get(path.name, 10_000) * record
            raise DataError(
                f"{path} has {size:,} bytes and should have {whole:,}, or another multiple of {record:,}. Download it "
                "again."
            )
        return read_rest(path, stream, 0, size).reshape(-1, record)


def _images_and_labels(batches: list[Bytes], labels: int) -> tuple[Bytes, Bytes]:
    images = np.concatenate([batch[:, labels:] for batch in batches])
    return images.reshape(-1, *IMAGE), np.concatenate([batch[:, labels - 1] for batch in batches])
