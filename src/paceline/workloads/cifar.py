"""CIFAR's binary files: one record after the other, each its labels and then its planes of red, green and blue."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.workloads.errors import DataError
from paceline.workloads.files import Bytes, Home, check_labels, find, opened, rest

IMAGE = (3, 32, 32)
PIXELS = 3 * 32 * 32

HOMES = {
    "cifar10": Home(
        "cifar10",
        (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
        ("cifar-10-batches-bin", "cifar-10", "cifar10", "CIFAR10", "cifar10/cifar-10-batches-bin"),
        unread=("cifar-10-batches-py",),
    ),
    "cifar100": Home(
        "cifar100",
        ("train.bin", "test.bin"),
        ("cifar-100-binary", "cifar-100", "cifar100", "CIFAR100", "cifar100/cifar-100-binary"),
        unread=("cifar-100-python",),
    ),
}
CLASSES = {"cifar10": 10, "cifar100": 100}
#: Bytes of label in a record. CIFAR-100 has a coarse one first; the last one is the one that is learnt.
LABELS = {"cifar10": 1, "cifar100": 2}
#: Records in a file as it is published, to say what its size should be; 10,000 in all the others.
PUBLISHED = {"train.bin": 50_000}


def load(name: str, folder: Path | None) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Images (N, 3, 32, 32) and labels (N,) to train with, and the same to test with."""
    *training, test = find(HOMES[name], folder)
    batches = [records(path, LABELS[name]) for path in training]
    for path, batch in zip(training, batches, strict=True):  # One cut short just behind a record shows only here.
        if len(batch) != len(batches[0]):
            raise DataError(
                f"{path} has {len(batch):,} images and {training[0].name} {len(batches[0]):,}, and they should have "
                "as many: fetch both again"
            )
    for path, batch in zip([*training, test], [*batches, tests := records(test, LABELS[name])], strict=True):
        check_labels(path, batch[:, LABELS[name] - 1], CLASSES[name])
    return (*_parted(batches, LABELS[name]), *_parted([tests], LABELS[name]))


def records(path: Path, labels: int) -> Bytes:
    """The records in a file, a row each: at least one. There may be fewer than were published, but whole ones."""
    record = labels + PIXELS
    with opened(path) as (stream, size):
        assert size is not None, "these are never packed"
        if not size or size % record:
            whole = PUBLISHED.get(path.name, 10_000) * record
            raise DataError(
                f"{path} has {size:,} bytes and should have {whole:,} (a multiple of {record:,}, at any rate): fetch "
                "it again"
            )
        return rest(path, stream, 0, size).reshape(-1, record)


def _parted(batches: list[Bytes], labels: int) -> tuple[Bytes, Bytes]:
    images = np.concatenate([batch[:, labels:] for batch in batches])
    return images.reshape(-1, *IMAGE), np.concatenate([batch[:, labels - 1] for batch in batches])
