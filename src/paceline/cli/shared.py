"""Helpers that several commands share: refusing bad input, writing files, and progress bars."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from pathlib import Path
from typing import IO, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from paceline.observe.trace import Event, as_line

INTERRUPTED = 130  # the exit code of a command that Ctrl-C has stopped
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def refuse(message: str) -> NoReturn:
    """Print a message to standard error and exit with code 2."""
    errors.print(Text(message))
    sys.exit(2)


def sentence(error: Exception) -> str:
    """The message of an error with a capital letter, unless it begins with a name, and with a full stop."""
    text = str(error)
    if re.match(r"[a-z]+[ ,;:]", text):  # not torch.optim, vgg16 or --option
        text = text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def need(module: str, purpose: str, extra: str) -> None:
    """Refuse the command if a Python module is not installed, and name the extra that installs it."""
    if importlib.util.find_spec(module) is None:
        refuse(f'{purpose} needs {module}: pip install "paceline[{extra}]".')


def need_torch() -> None:
    """Refuse the command if PyTorch is not installed."""
    need("torch", "Training", "torch")


def write_event(file: IO[str], event: Event) -> None:
    """Write a trace event as one line of JSON."""
    file.write(as_line(event))
    file.write("\n")


def unfinished(path: Path | None) -> Path | None:
    """The temporary path under which a file is written until it is complete."""
    return path.with_name(path.name + ".part") if path else None


class opened:
    """A context manager: the file at a path, open for writing, or None if there is no path."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w") if path else None

    def __enter__(self) -> IO[str] | None:
        return self._file

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()


def check_target(path: Path | None, option: str) -> None:
    """Refuse the command if an option names a file that cannot be written."""
    if path is None:
        return
    if (path.exists() and not path.is_file()) or not path.parent.is_dir():
        refuse(f"{option}: {str(path)!r} cannot be written; name a plain file in a folder that exists.")
    _check_writable(path.parent, option)


def check_folder(folder: Path | None, option: str) -> None:
    """Refuse the command if an option names a folder that cannot be made or written to. The folder is not made yet."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        refuse(f"{option}: {str(folder)!r} is not a folder.")
    _check_writable(next(each for each in (folder, *folder.absolute().parents) if each.exists()), option)


def _check_writable(folder: Path, option: str) -> None:
    """Refuse the command if nothing can be made in a folder. Its permissions do not say so everywhere (/proc)."""
    try:
        tempfile.TemporaryDirectory(prefix=".paceline-", dir=folder).cleanup()
    except OSError:
        refuse(f"{option}: the folder {str(folder)!r} cannot be written to; name another one.")


def check_script(path: str) -> None:
    """Refuse the command if the training script does not exist."""
    if Path(path).is_dir():
        refuse(f"{path!r} is a folder; name the training script.")
    if not Path(path).is_file():
        refuse(f"There is no script {path!r}.")


def progress_bar(quiet: bool) -> Progress:
    """A progress bar on standard error. It shows nothing if `quiet` or if standard error is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=quiet or not errors.is_terminal,
    )
