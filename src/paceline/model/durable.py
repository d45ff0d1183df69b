"""Files and folders that are on disk before they count. Only their owner may read them, since they hold models."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file that only its owner may read, and wait until it is on disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    with open(handle, "wb", buffering=0) as file:
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(handle)


def make_folder(path: Path) -> None:
    """Make a folder that only its owner may read, and the folders above it. Wait until all of them are on disk."""
    if path.is_dir():
        return
    missing = [path]
    while not missing[-1].parent.is_dir() and missing[-1].parent != missing[-1]:
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(FOLDER_MODE if each == path else 0o777, exist_ok=True)
        sync(each.parent)


def rename(path: Path, target: Path) -> None:
    """Rename a file or a folder, and wait until its new name is on disk."""
    path.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Wait until a file or a folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cause(error: Exception) -> str:
    """Return the cause of an error without the name of a file, so that equal causes read the same."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
