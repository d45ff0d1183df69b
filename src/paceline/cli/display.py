"""The display of a running job in the terminal, its final report, and its trace file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import IO, NoReturn

import typer
from rich.console import RenderableType
from rich.text import Text

from paceline.cli.output import Output
from paceline.cli.reports import Reports, RunningReports
from paceline.cli.shared import errors, opened, unfinished, write_event
from paceline.observe.final_report import FinishedRun, closing
from paceline.observe.live import attendance, line, table
from paceline.observe.live_state import Live
from paceline.observe.metric_history import MetricHistory, Target
from paceline.observe.observer import Observer, Recorder, Tee
from paceline.observe.perfetto import Perfetto
from paceline.observe.stall import StallDetector
from paceline.observe.summary import Report
from paceline.policies import without_mean_weights

PERFETTO = ".perfetto.json"
CHECK_SECONDS = 1.0  # between two looks at whether the job has stalled


class Display(Output):
    """A live table on a terminal, or plain lines elsewhere. The trace gets its name when the job is done or stopped."""

    def __init__(
        self, policy: str, trace: Path | None, target: Target | None = None, reports: Reports | None = None
    ) -> None:
        """reports: where the numbers of the job go besides the terminal."""
        super().__init__()
        self._policy, self._trace, self._target = without_mean_weights(policy), trace, target
        self._live = Live(self._policy, shorten=without_mean_weights)
        self._attendance = ""  # as the log shows it
        self._seen = (0.0, time.monotonic())
        self._part = unfinished(trace)
        self._files = ExitStack()
        self._metrics = MetricHistory()
        self._stall = StallDetector(self._note, policy=self._policy)
        self._asked = reports or Reports()
        self._reports: RunningReports | None = None
        self._has_failed = True  # until it is finished
        self.observer: Observer = Tee(Tee(self._live, self._metrics), self._stall)

    def __enter__(self) -> Display:
        self._reports = RunningReports(self._asked, self._policy, lambda: self._stall.is_stalled, self._note)
        self.observer = Tee(self.observer, self._reports.observer)
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
        if self._reports:
            self._reports.close(self._has_failed)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Show the job, and warn if it stalls, for as long as this context lasts."""
        checking = asyncio.ensure_future(self._check())
        try:
            async with super().running():
                yield
        finally:
            checking.cancel()

    def keep_trace(self) -> Path | None:
        """Complete the trace file and give it its name. Return its path, or None if there is none."""
        self._files.close()
        if self._part and self._trace:
            self._part.replace(self._trace)
        return self._trace

    def finish(
        self, report: Report, seconds: float, *, is_done: bool, is_saved: bool, show: bool = True
    ) -> FinishedRun:
        """The job is over: give the trace file its name, and print the final report.

        is_done: whether it has come to its end, and was not stopped. is_saved: whether its last checkpoint is written,
        if one was asked for. Otherwise the logs tell of a job that has failed. show: whether to print the report.
        """
        self._has_failed = not (is_done and is_saved)
        if path := self.keep_trace():
            errors.print(Text(f"Written: {path}"))
        accuracy, curves = self._metrics.last("accuracy"), self._metrics.curves
        run = FinishedRun(self._policy, report, seconds, self._live.loss, accuracy, curves, self._target)
        if show:
            self._out.print(closing(run))
        return run

    def fail(self, message: str, code: int = 1) -> NoReturn:
        """The job has failed: print the message and exit with this code."""
        if message:
            errors.print(Text(message))
        raise typer.Exit(code)

    def picture(self, height: int) -> RenderableType:
        """Return the live table."""
        return table(self._live, height, self._now())

    def log_line(self) -> str:
        """Return the job's figures, or before it begins the workers that it waits for, if they have changed."""
        if self._live.updates:
            return line(self._live, self._now())
        before, self._attendance = self._attendance, attendance(self._live) if self._live.missing else ""
        return self._attendance if self._attendance != before else ""

    def _note(self, text: str) -> None:
        errors.print(Text(text))

    async def _check(self) -> None:
        while True:
            self._stall.check(self._now())
            await asyncio.sleep(CHECK_SECONDS)

    def _now(self) -> float:
        """The job's time now, which advances even if no event arrives."""
        if self._live.time != self._seen[0]:
            self._seen = (self._live.time, time.monotonic())
        return self._seen[0] + time.monotonic() - self._seen[1]
