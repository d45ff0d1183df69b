"""Finds the files of a data set, and reads them without trusting their headers."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.workloads.errors import DataError

#: The environment variable that names the folder of data sets, if no argument does.
VARIABLE = "PACELINE_DATA"
#: The largest size of a file, unpacked. The largest known file has 154 MB, so more is a mistake or an attack.
MAX_BYTES = 2**30
#: Files are read in pieces of this size, so that memory grows with the content and not with the claimed size.
PIECE = 2**20

Bytes = NDArray[np.uint8]


class ByteStream(Protocol):
    """A stream of bytes, packed or not."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class FileSet:
    """The files of a data set, and the folders that usually hold them, relative to the folder of data sets."""

    name: str
    files: tuple[str, ...]
    folders: tuple[str, ...]
    inside: tuple[str, ...] = (".",)  # where they are in a folder of this data set alone
    packed: bool = False  # whether each may also be a .gz file
    unread: tuple[str, ...] = ()  # usual folders of the same data as pickles, which are not read


def find(wanted: FileSet, folder: Path | None, others: frozenset[str] = frozenset()) -> list[Path]:
    """Return the path of each file. All of them must be in one folder: a usual one below `folder`, or `folder` itself.

    folder: None: the folder in PACELINE_DATA.
    others: names of folders that hold another data set with the same file names. If `folder` or its parent has such a
        name, only the usual folders below it are searched, because the files themselves would not show the mistake.
    """
    folder = folder or _folder_of_environment(wanted)
    if not folder.is_dir():
        raise DataError(
            f"{wanted.name} cannot be loaded from {folder}, which is not a folder; name the folder that holds it with "
            f"--data or {VARIABLE}."
        )
    places = [folder / each for each in wanted.folders]
    if not {folder.name, folder.parent.name} & others:
        places += [folder / each for each in wanted.inside]
    for place in places:
        found = [_file(place, each, wanted.packed) for each in wanted.files]
        if all(found):
            return [each for each in found if each]
    for each in wanted.unread:
        if (folder / each).is_dir():
            raise DataError(
                f"{folder / each} holds {wanted.name} as pickles, which are not read because they can run code; "
                "download the binary version."
            )
    packed = ", each plain or as .gz" if wanted.packed else ""
    raise DataError(
        f"{wanted.name} is not in {folder}: none of {', '.join(str(place) for place in places)} holds all of its files "
        f"({', '.join(wanted.files)}{packed}); name the folder that holds them with --data or {VARIABLE}."
    )


def _folder_of_environment(wanted: FileSet) -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        raise DataError(
            f"{wanted.name} is read from files ({', '.join(wanted.files)}); name the folder that holds them, or that "
            f"holds one of {', '.join(wanted.folders)} with them inside, with --data or {VARIABLE}."
        )
    return Path(named)


def _file(place: Path, name: str, packed: bool) -> Path | None:
    candidates = [place / name, place / f"{name}.gz"] if packed else [place / name]
    return next((each for each in candidates if each.is_file()), None)


@contextmanager
def opened(path: Path) -> Iterator[tuple[ByteStream, int | None]]:
    """Open a file for reading, unpacked, with its size in bytes. The size of a packed file is unknown: None.

    Errors while the file is read become a DataError that names the file.
    """
    try:
        with path.open("rb") as plain:
            if path.suffix == ".gz":
                with gzip.open(plain) as unpacked:
                    yield unpacked, None
            else:
                yield plain, os.fstat(plain.fileno()).st_size
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}). Download it again.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}). It must be a readable file.") from None


def read_rest(path: Path, stream: ByteStream, begun: int, size: int) -> Bytes:
    """Read the rest of a file that should have `size` bytes, of which `begun` are read already.

    `size` may come from the file itself and may be wrong. So memory is allocated only for the bytes that are there, and
    a file of another size is a DataError.
    """
    if size > MAX_BYTES:
        raise DataError(
            f"{path} claims to have {size:,} bytes, more than the {MAX_BYTES:,} that are allowed. Download it again."
        )
    content = bytearray()
    while begun + len(content) <= size:
        piece = stream.read(
            min(PIECE, size + 1 - begun - len(content))
        )  # one more byte, to notice a file that is too long
        if not piece:
            break
        content += piece
    check_size(path, begun + len(content), size)
    return np.frombuffer(content, np.uint8)


def check_size(path: Path, found: int, size: int) -> None:
    """Raise DataError if a file does not have the right size. For a packed file, this is the size unpacked."""
    if found != size:
        unpacked = " unpacked" if path.suffix == ".gz" else ""
        # A packed file is not read beyond its right size, so its real size is unknown.
        count = f"more than {size:,}" if unpacked and found > size else f"{found:,}"
        raise DataError(f"{path} has {count} bytes{unpacked} and should have {size:,}. Download it again.")


def check_labels(path: Path, labels: Bytes, classes: int) -> None:
    """Raise DataError if a label is not one of the classes."""
    if labels.size and labels.max() >= classes:
        raise DataError(
            f"{path} has the label {labels.max()}, but there are only {classes} classes, from 0. Download it again."
        )
