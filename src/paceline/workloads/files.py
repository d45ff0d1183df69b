"""Finding a data set's files, and reading them without trusting what they say of themselves."""

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

#: The environment variable that says where data sets lie when nobody else does.
VARIABLE = "PACELINE_DATA"
#: Of one file, unpacked. The largest that is known here has 154 MB; more than this is a mistake or an attack.
MAX_BYTES = 2**30
#: A packed file is read in pieces of this size, so that memory grows with what is there and not with what is claimed.
PIECE = 2**20

Bytes = NDArray[np.uint8]


class ByteStream(Protocol):
    """What can be read, packed or not."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Home:
    """The files of a set, and the folders they usually lie in, seen from where data is kept."""

    name: str
    files: tuple[str, ...]
    folders: tuple[str, ...]
    inside: tuple[str, ...] = (".",)  # and where, if data is kept in a folder of this set alone
    packed: bool = False  # may each be there as .gz instead?
    unread: tuple[str, ...] = ()  # usual folders of the same set with pickles inside, which are not read


def find(home: Home, folder: Path | None, strangers: frozenset[str] = frozenset()) -> list[Path]:
    """Where each of the files is. They are all in one folder: a usual one below `folder`, or `folder` itself.

    folder: None is the one that PACELINE_DATA names.
    strangers: names of folders that hold another set with files of the same names. In a `folder` named like that, or
        right below one, only the usual ones are looked into: nothing in the files would tell that they are wrong.
    """
    folder = folder or _folder_of_environment(home)
    if not folder.is_dir():
        raise DataError(
            f"{home.name} is looked for in {folder}, which is not a folder: give the one that holds it with --data, or "
            f"set {VARIABLE}"
        )
    places = [folder / each for each in home.folders]
    if not {folder.name, folder.parent.name} & strangers:
        places += [folder / each for each in home.inside]
    for place in places:
        found = [_file(place, each, home.packed) for each in home.files]
        if all(found):
            return [each for each in found if each]
    for each in home.unread:
        if (folder / each).is_dir():
            raise DataError(
                f"{folder / each} holds {home.name} as pickles, which are not read because they can run code: fetch "
                "the binary version"
            )
    packed = ", each also as .gz" if home.packed else ""
    raise DataError(
        f"{home.name} is not in {folder}: its files are {', '.join(home.files)}{packed}, and all of them were looked "
        f"for in each of {', '.join(str(place) for place in places)}; give the folder that holds them with --data, or "
        f"set {VARIABLE}"
    )


def _folder_of_environment(home: Home) -> Path:
    named = os.environ.get(VARIABLE)
    if not named:
        raise DataError(
            f"{home.name} is read from files ({', '.join(home.files)}): give the folder that holds them, or that holds "
            f"one of {', '.join(home.folders)} with them inside, with --data, or set {VARIABLE}"
        )
    return Path(named)


def _file(place: Path, name: str, packed: bool) -> Path | None:
    candidates = [place / name, place / f"{name}.gz"] if packed else [place / name]
    return next((each for each in candidates if each.is_file()), None)


@contextmanager
def opened(path: Path) -> Iterator[tuple[ByteStream, int | None]]:
    """The file's content, unpacked, and how many bytes that is: None where only reading to the end would tell.

    Whatever goes wrong while it is read is a DataError that names the file.
    """
    try:
        with path.open("rb") as plain:
            if path.suffix == ".gz":
                with gzip.open(plain) as unpacked:
                    yield unpacked, None
            else:
                yield plain, os.fstat(plain.fileno()).st_size
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}): fetch it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): make it readable") from None


def rest(path: Path, stream: ByteStream, begun: int, size: int) -> Bytes:
    """The `size - begun` bytes that are left of a file which should have `size`, of which `begun` are read already.

    `size` is somebody's claim. Memory is taken for what is there; a file of another size is a DataError.
    """
    if size > MAX_BYTES:
        raise DataError(
            f"{path} should have {size:,} bytes by what it says of itself, more than the {MAX_BYTES:,} that are read: "
            "fetch it again"
        )
    content = bytearray()
    while begun + len(content) <= size:
        piece = stream.read(min(PIECE, size + 1 - begun - len(content)))  # one more, to see that there is no more
        if not piece:
            break
        content += piece
    check_size(path, begun + len(content), size)
    return np.frombuffer(content, np.uint8)


def check_size(path: Path, found: int, size: int) -> None:
    """Refuse a file that has another size than it should. Of a packed one, it is the size unpacked."""
    if found != size:
        unpacked = " unpacked" if path.suffix == ".gz" else ""
        # More than that are never read of a packed file, so nobody has counted them.
        count = f"more than {size:,}" if unpacked and found > size else f"{found:,}"
        raise DataError(f"{path} has {count} bytes{unpacked} and should have {size:,}: fetch it again")


def check_labels(path: Path, labels: Bytes, classes: int) -> None:
    """Refuse labels that are none of the classes."""
    if labels.size and labels.max() >= classes:
        raise DataError(
            f"{path} has the label {labels.max()}, and there are only {classes} classes, from 0: fetch it again"
        )
