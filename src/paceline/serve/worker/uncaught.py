"""An uncaught error of paceline ends a script with one sentence that says what to do, instead of a traceback.

This is a sys.excepthook. A script can still catch every error. PACELINE_TRACEBACK=1 shows tracebacks.
"""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from paceline.serve.environment import LOST, REFUSAL, REFUSED, is_launched, tell_launcher
from paceline.serve.wire.frames import WireError
from paceline.serve.worker.endings import IncarnationOver, Refusal
from paceline.serve.worker.notices import notice

TRACEBACK = "PACELINE_TRACEBACK"
PACKAGE = str(Path(__file__).parents[2])
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_show_traceback = sys.excepthook


def shorten() -> None:
    """Show uncaught errors of paceline as sentences from now on."""
    global _show_traceback
    if sys.excepthook is not _show:
        _show_traceback, sys.excepthook = sys.excepthook, _show


def sentence(error: BaseException) -> str:
    """Return the message of an error that paceline has raised for the user, or "" for any other error.

    The message of a ValueError ends with the line of the script that is at fault.
    """
    text = " ".join(str(error).split())
    if isinstance(error, Refusal | WireError | IncarnationOver):
        return text
    if not isinstance(error, ValueError | ConnectionError) or not _is_raised_here(error):
        return ""
    where = [(path, line) for path, line in _lines(error) if not path.startswith((PACKAGE, *LIBRARIES, "<"))]
    if isinstance(error, ConnectionError) or not where:
        return text
    path, line = where[-1]
    return f"{text} ({Path(path).name}, line {line})"


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an uncaught error. Under `paceline run` and `work`, the exit code says whether a restart may help."""
    text, shows_traceback = sentence(error), bool(os.environ.get(TRACEBACK))
    if isinstance(error, KeyboardInterrupt) and not shows_traceback:
        notice("Interrupted; this worker leaves the job.")
    elif not text or shows_traceback:
        _show_traceback(kind, error, trace)
    elif not is_launched() or type(error) is ConnectionError:  # another rank has failed, which reports the reason
        sys.stderr.write(f"{text}\n")
    if text and is_launched() and type(error) is not ConnectionError:
        tell_launcher(f"{REFUSAL}{text}")
        raise SystemExit(REFUSED if isinstance(error, ValueError) else LOST)


def _is_raised_here(error: BaseException) -> bool:
    """Return whether a `raise` statement of paceline has raised this error. Otherwise it may be a bug."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    if trace is None or not trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _lines(error: BaseException) -> Iterator[tuple[str, int]]:
    """Yield the file and the line of each frame of the error's traceback, the innermost last."""
    trace = error.__traceback__
    while trace:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
