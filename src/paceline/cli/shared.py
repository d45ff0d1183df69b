"""What the commands have in common: how they refuse, and how they write files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO, NoReturn

from rich.console import Console
from rich.text import Text

from paceline.observe.trace import Event, as_line

errors = Console(stderr=True, highlight=False, soft_wrap=True)


def write_event(file: IO[str], event: Event) -> None:
    file.write(as_line(event))
    file.write("\n")


def unfinished(path: Path | None) -> Path | None:
    """Where a file is written until it is whole."""
    return path.with_name(path.name + ".part") if path else None


class opened:
    """A file to write, or None where there is none to be written."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w") if path else None

    def __enter__(self) -> IO[str] | None:
        return self._file

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()


def check_target(path: Path | None, option: str) -> None:
    if path is None:
        return
    if (path.exists() and not path.is_file()) or not path.parent.is_dir():
        refuse(f"{option}: {str(path)!r} cannot be written; name a plain file in a folder that exists.")
    if not os.access(path.parent, os.W_OK):
        refuse(f"{option}: the folder {str(path.parent)!r} cannot be written to.")


def check_script(path: str) -> None:
    if not Path(path).is_file():
        refuse(f"There is no script {path!r}.")


def refuse(message: str) -> NoReturn:
    errors.print(Text(message))
    sys.exit(2)
