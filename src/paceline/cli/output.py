"""The output of a job's processes in the terminal: their lines, and below them the progress bars of the scripts."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live as Screen
from rich.text import Text

from paceline.cli.shared import errors

FRAME, LINE = 0.25, 10.0  # seconds between refreshes on a terminal, and between lines of a bar in a log
MAX_BARS = 8  # progress bars on a terminal at a time


class Output:
    """Shows the lines of processes. A progress bar changes in place on a terminal; a log gets a line now and then."""

    def __init__(self) -> None:
        self._out = Console(highlight=False, soft_wrap=True)
        self._screen: Screen | None = None
        self._bars: dict[str, str] = {}  # source → the state of its progress bar
        self._logged: dict[str, str] = {}  # source → the state that the log shows

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Show the processes for as long as this context lasts."""
        drawing = asyncio.ensure_future(self._draw() if errors.is_terminal else self._log())
        try:
            yield
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)

    def say(self, line: str, *, aside: bool, source: str = "", stays: bool = True) -> None:
        """Print a line of a process's output, or (aside) a note about that process.

        source: the stream that the line comes from. stays: False for a state of its progress bar.
        """
        self._bars.pop(source, None)
        if not stays:
            if line:
                self._bars[source] = line
            return
        self._logged.pop(source, None)
        if aside or (self._screen and sys.stdout.isatty()):  # the live display would overwrite standard output
            errors.print(Text(line))
        else:
            self._out.print(Text(line))

    def picture(self, height: int) -> RenderableType | None:
        """Return what to show above the progress bars on a terminal, in at most `height` lines. None: nothing."""
        return None

    def log_line(self) -> str:
        """Return what to add to the log now and then. An empty string: nothing."""
        return ""

    async def _draw(self) -> None:
        with Screen(console=errors, auto_refresh=False, transient=True) as screen:
            self._screen = screen
            try:
                while True:
                    bars = [self._bars[source] for source in sorted(self._bars)[:MAX_BARS]]
                    above = self.picture(errors.height - 1 - len(bars))
                    below = [Text(bar, no_wrap=True, overflow="ellipsis") for bar in bars]
                    screen.update(Group(*([above] if above else []), *below), refresh=True)
                    await asyncio.sleep(FRAME)
            finally:
                self._screen = None

    async def _log(self) -> None:
        while True:
            await asyncio.sleep(LINE)
            changed = {source: bar for source, bar in self._bars.items() if self._logged.get(source) != bar}
            self._logged |= changed
            with contextlib.suppress(BlockingIOError):
                for line in filter(None, (*changed.values(), self.log_line())):
                    errors.print(Text(line))
