"""Lines that a worker shows its user, and lines that it sends to the command that started it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from paceline.serve.environment import LAUNCHED

log = logging.getLogger("paceline")


def notice(text: str) -> None:
    """Show the user of a worker that was started by hand how its part in the job goes.

    If the script has configured logging, this is a record of the level INFO. Otherwise it is a line on standard error.
    `paceline run` and `work` show the job themselves.
    """
    if log.hasHandlers():
        log.info(text)
    elif not is_launched():
        with contextlib.suppress(OSError, ValueError):  # standard error may be closed
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def is_launched() -> bool:
    """Return whether `paceline run` or `work` has started this process."""
    return LAUNCHED in os.environ


def tell_launcher(line: str) -> None:
    """Send a line to `paceline run` or `work`, over standard error. Without them, do nothing.

    The line begins with a carriage return, so that it does not become a part of a progress bar.
    """
    if is_launched():
        with contextlib.suppress(OSError):
            os.write(2, f"\r{line}\n".encode(errors="replace"))
