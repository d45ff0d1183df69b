"""The display of a running job in the terminal, its final report, and its trace file."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import IO, NoReturn

import typer
from rich.console import Console
from rich.live import Live as Screen
from rich.text import Text

from paceline.cli.shared import errors, opened, unfinished, write_event
from paceline.observe.final_report import FinishedRun, closing
from paceline.observe.live import line, table
from paceline.observe.live_state import Live
from paceline.observe.observer import Observer, Recorder, Tee
from paceline.observe.perfetto import Perfetto
from paceline.observe.summary import Report

PERFETTO = ".perfetto.json"
FRAME, LINE = 0.25, 10.0  # seconds between refreshes of the table on a terminal, and between lines in a log


class _Accuracy(Observer):
    """The accuracy that a worker has reported last."""

    value: float | None = None

    def measured(self, time: float, worker: int, kind: str, value: float) -> None:
        if kind == "accuracy":
            self.value = value


class Display:
    """A live table on a terminal, or plain lines elsewhere. The trace gets its name when the job is done."""

    def __init__(self, policy: str, trace: Path | None) -> None:
        self._policy, self._trace = policy, trace
        self._live = Live(policy)
        self._out = Console(highlight=False, soft_wrap=True)
        self._screen: Screen | None = None
        self._seen = (0.0, time.monotonic())
        self._part = unfinished(trace)
        self._files = ExitStack()
        self._accuracy = _Accuracy()
        self.observer: Observer = Tee(self._live, self._accuracy)

    def __enter__(self) -> Display:
        file: IO[str] | None = self._files.enter_context(opened(self._part))
        if file and str(self._trace).endswith(PERFETTO):
            self.observer = Tee(self.observer, self._files.enter_context(Perfetto(file)))
        elif file:
            self.observer = Tee(self.observer, Recorder(lambda event: write_event(file, event)))
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        if self._part:
            self._part.unlink(missing_ok=True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Show the job for as long as this context lasts."""
        drawing = asyncio.ensure_future(self._draw() if errors.is_terminal else self._log())
        try:
            yield
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)

    def say(self, line: str, *, aside: bool) -> None:
        """Print a line of a process's output, or (aside) a note about that process."""
        if aside or (self._screen and sys.stdout.isatty()):  # the live table would overwrite standard output
            errors.print(Text(line))
        else:
            self._out.print(Text(line))

    def finish(self, report: Report, seconds: float, show: bool = True) -> FinishedRun:
        """The job is done: rename the trace file, and print the final report."""
        self._files.close()
        if self._part and self._trace:
            self._part.replace(self._trace)
            errors.print(Text(f"Written: {self._trace}"))
        run = FinishedRun(self._policy, report, seconds, self._live.loss, self._accuracy.value)
        if show:
            self._out.print(closing(run))
        return run

    def fail(self, message: str, code: int = 1) -> NoReturn:
        """The job has failed: print the message and exit with this code."""
        if message:
            errors.print(Text(message))
        raise typer.Exit(code)

    async def _draw(self) -> None:
        with Screen(console=errors, auto_refresh=False, transient=True) as screen:
            self._screen = screen
            try:
                while True:
                    screen.update(table(self._live, errors.height - 1, self._now()), refresh=True)
                    await asyncio.sleep(FRAME)
            finally:
                self._screen = None

    async def _log(self) -> None:
        while True:
            await asyncio.sleep(LINE)
            if not self._live.updates:
                continue
            with contextlib.suppress(BlockingIOError):
                errors.print(Text(line(self._live, self._now())))

    def _now(self) -> float:
        """The job's time now, which advances even if no event arrives."""
        if self._live.time != self._seen[0]:
            self._seen = (self._live.time, time.monotonic())
        return self._seen[0] + time.monotonic() - self._seen[1]
