"""Lines that a worker shows its user."""

from __future__ import annotations

import contextlib
import logging
import sys

from paceline.serve.environment import is_launched

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
