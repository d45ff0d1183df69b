"""The output of a process as lines. A progress bar is a line that changes: each carriage return redraws it."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_LINE = 1 << 20  # bytes; a longer line is passed on in pieces
_UP = b"\x1b[A"  # moves the cursor up: tqdm draws nested bars below each other, and returns to the first
_PART = re.compile(rb"(\r|\n|\x1b\[A)")


class Line(NamedTuple):
    """A line of output.

    stays: False for a state of a progress bar, which the next line replaces. An empty state removes the bar.
    """

    text: str
    stays: bool = True


class OutputLines:
    """Splits the output of one process into lines."""

    def __init__(self) -> None:
        self._text = b""  # since the last separator
        self._drawn: bytes | None = None  # before the last carriage return; None if this line has none
        self._ups = 0  # cursor moves upwards since the last text: as many line feeds only move down again
        self._shown = ""  # the last state of the bar

    def feed(self, data: bytes) -> list[Line]:
        """Return the lines that end in these bytes, and the newest state of a bar that is still being drawn."""
        found: list[Line] = []
        for part in _PART.split(data):
            if part == b"\n" and not self._ups:
                found.append(self._line())
            elif part in (b"\r", b"\n", _UP):
                self._ups += {b"\r": 0, b"\n": -1, _UP: 1}[part]
                self._drawn = self._text or self._drawn or b""
                self._text = b""
            elif part:
                self._ups = 0
                self._text += part
                while len(self._text) > MAX_LINE:
                    found.append(Line(self._text[:MAX_LINE].decode(errors="replace")))
                    self._text = self._text[MAX_LINE:]
        if self._drawn is not None:
            state = (self._text or self._drawn).decode(errors="ignore").rstrip()
            if state != self._shown:
                self._shown = state
                found.append(Line(state, stays=False))
        return found

    def end(self) -> list[Line]:
        """Return the last line, if the output does not end with a line feed."""
        return [self._line()] if (self._text or self._drawn or b"").strip() else []

    def _line(self) -> Line:
        """Return the line that ends here, and begin the next one."""
        line = Line((self._text or self._drawn or b"").decode(errors="replace"))
        self._text, self._drawn, self._shown = b"", None, ""
        return line
