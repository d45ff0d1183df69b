"""The display of a running job in the terminal, its final report, and its trace file."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NoReturn

import typer
from rich.console import RenderableType
from rich.text import Text

from paceline.cli.output import Output
from paceline.cli.shared import errors, opened, unfinished, write_event
from paceline.observe.final_report import FinishedRun, closing
from paceline.observe.live import attendance, line, table
from paceline.observe.live_state import Live
from paceline.observe.metric_history import MetricHistory, Target
from paceline.observe.observer import Observer, Recorder, Tee
from paceline.observe.perfetto import Perfetto
from paceline.observe.summary import Report
from paceline.policies import without_mean_weights

PERFETTO = ".perfetto.json"


class Display(Output):
    """A live table on a terminal, or plain lines elsewhere. The trace gets its name when the job is done or stopped."""

    def __init__(self, policy: str, trace: Path | None, target: Target | None = None) -> None:
        super().__init__()
        self._policy, self._trace, self._target = without_mean_weights(policy), trace, target
        self._live = Live(self._policy, shorten=without_mean_weights)
        self._attendance = ""  # as the log shows it
        self._seen = (0.0, time.monotonic())
        self._part = unfinished(trace)
        self._files = ExitStack()
        self._metrics = MetricHistory()
        self.observer: Observer = Tee(self._live, self._metrics)

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

    def keep_trace(self) -> Path | None:
        """Complete the trace file and give it its name. Return its path, or None if there is none."""
        self._files.close()
        if self._part and self._trace:
            self._part.replace(self._trace)
        return self._trace

    def finish(self, report: Report, seconds: float, show: bool = True) -> FinishedRun:
        """The job is done: rename the trace file, and print the final report."""
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

    def _now(self) -> float:
        """The job's time now, which advances even if no event arrives."""
        if self._live.time != self._seen[0]:
            self._seen = (self._live.time, time.monotonic())
        return self._seen[0] + time.monotonic() - self._seen[1]
