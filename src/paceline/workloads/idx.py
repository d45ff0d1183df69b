"""Reads IDX files, the format of MNIST and Fashion-MNIST: a magic number, the sizes, and then the bytes."""

from __future__ import annotations

import math
import struct
from pathlib import Path

from paceline.workloads.errors import DataError
from paceline.workloads.files import Bytes, FileSet, check_labels, check_size, find, opened, read_rest

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
#: Height and width of an image.
IMAGE = (28, 28)
CLASSES = 10

FILE_SETS = {
    "mnist": FileSet("mnist", FILES, ("mnist", "MNIST/raw", "MNIST"), inside=(".", "raw"), packed=True),
    "fashion-mnist": FileSet(
        "fashion-mnist",
        FILES,
        ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST", "fashion_mnist"),
        inside=(".", "raw"),
        packed=True,
    ),
}


def load(name: str, folder: Path | None) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Return images (N, 1, 28, 28) and labels (N,) for training, and the same for testing."""
    others = frozenset(each.split("/")[0] for key, other in FILE_SETS.items() if key != name for each in other.folders)
    paths = find(FILE_SETS[name], folder, others)
    return (*_pair(*paths[:2]), *_pair(*paths[2:]))


def _pair(images_path: Path, labels_path: Path) -> tuple[Bytes, Bytes]:
    images, labels = read(images_path, IMAGE), read(labels_path, ())
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} has {len(images):,} images, but {labels_path.name} has {len(labels):,} labels. Download "
            "both again."
        )
    check_labels(labels_path, labels, CLASSES)
    return images[:, None], labels


def read(path: Path, shape: tuple[int, ...]) -> Bytes:
    """Return the samples in a file, which must have that shape. There is at least one."""
    dimensions = 1 + len(shape)
    magic = bytes((0, 0, 8, dimensions))  # 8 means unsigned bytes
    with opened(path) as (stream, found):
        header = stream.read(4 + 4 * dimensions)
        if header[:4] != magic or len(header) < 4 + 4 * dimensions:
            raise DataError(
                f"{path} begins with {header[:4].hex() or 'nothing'} and should begin with {magic.hex()} and "
                f"{dimensions} sizes, as an IDX file of {'labels' if not shape else 'images'} does. Download it again."
            )
        count, *sizes = struct.unpack(f">{dimensions}I", header[4:])
        if tuple(sizes) != shape:
            by = " by "
            raise DataError(
                f"{path} says that its images are {by.join(map(str, sizes))}, but they should be "
                f"{by.join(map(str, shape))}. Download it again."
            )
        if not count:
            raise DataError(f"{path} says that it holds no samples. Download it again.")
        size = len(header) + count * math.prod(shape)
        if found is not None:
            check_size(path, found, size)
        return read_rest(path, stream, len(header), size).reshape(count, *shape)
