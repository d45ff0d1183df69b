"""`paceline reproduce`: reproduces a paper's tables and figures, with the paper's values beside ours."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from paceline.cli.shared import INTERRUPTED, check_target, errors, need, progress_bar, refuse, sentence
from paceline.observe.table import ruled
from paceline.reproduce.shared import report as page
from paceline.reproduce.shared.rows import NOT_REPRODUCED, TITLES, Figure, Results, read

if TYPE_CHECKING:
    from paceline.reproduce.shared.papers import PaperFigure
    from paceline.reproduce.shared.request import Request

NAMES = f"{', '.join(list(TITLES)[:-1])} or {list(TITLES)[-1]}"


def reproduce(
    paper: Annotated[str | None, typer.Argument(help=f"{NAMES}. Optional with --from.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Reproduce only this table or figure, such as fig7a. Can be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use fewer seeds and shorter runs.")] = False,
    device: Annotated[str, typer.Option(help="The device that trains: cpu or cuda.")] = "cpu",
    data: Annotated[Path | None, typer.Option(help="The folder with data sets. Default: $PACELINE_DATA.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="The number of trainings that run at the same time.")] = 1,
    keep: Annotated[
        Path | None, typer.Option(help="Keep finished trainings in this file, and do not repeat those that it holds.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="Begin no training after this many minutes. 0: no limit.")
    ] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables: an object per paper, or a list of several.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write a page with plots (index.html) and its results (JSON) into this folder.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Run nothing. Show the results in this folder's JSON files.")
    ] = None,
) -> None:
    """Reproduce a paper's tables and figures beside its own."""
    ended: _Ended | None = None
    if source is not None:
        found = _read(source, paper, only or [])
        _check_folder(report)
        if not as_json:
            for results in found:
                _show(results)
                if not only:
                    _show_not_reproduced(results.paper)
    else:
        request, entries, progress = _prepare(
            paper, only or [], quick, device, data, jobs, keep, minutes, quiet=as_json
        )
        _check_folder(report)
        figures, ended = _make_figures(request, entries, progress, show=not as_json)
        if not as_json and not only:
            _show_not_reproduced(str(paper))
        command = shlex.join(["paceline", *sys.argv[1:]])
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        found = [Results(str(paper), command, device, date, tuple(figures))]
    if as_json:
        texts = [results.as_json().decode() for results in found]
        typer.echo(texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]")
    if report is not None:
        written = page.write(found, report)
        if source is None:  # --from can draw the page again, also together with other papers
            written.with_name(f"{paper}.json").write_bytes(found[0].as_json())
        errors.print(Text(f"Written: {written}"))
    if ended:
        errors.print(Text(ended.message))
        sys.exit(ended.code)


@dataclass(frozen=True)
class _Ended:
    """Why the command ended early. Figures that were done by then are kept."""

    message: str
    code: int


class _ProgressDisplay:
    """Shows the progress of a figure's trainings: as a bar on a terminal, else as one line per training unless quiet.

    The bar disappears before a table is printed, because both may go to the same terminal.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._name = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def figure(self, entry: PaperFigure, number: int, count: int) -> Iterator[None]:
        """Show the progress of one figure while the context is open."""
        self._name = f"{entry.id} ({number} of {count})"
        with progress_bar(quiet=False) as self._bar:
            self._task = self._bar.add_task(self._name, total=None)
            yield

    def update(self, done: int, total: int, what: str) -> None:
        """Show that `done` of `total` trainings are finished, and which one runs or has just finished."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=escape(f"{self._name}: {what}"), completed=done, total=total)
        if not errors.is_terminal and not self._quiet:
            errors.print(Text(f"{self._name}: {done} of {total} trainings; {what}"))


def _prepare(
    name: str | None,
    only: Sequence[str],
    quick: bool,
    device: str,
    data: Path | None,
    jobs: int,
    keep: Path | None,
    minutes: float,
    quiet: bool,
) -> tuple[Request, list[PaperFigure], _ProgressDisplay]:
    """Check everything that was asked for, before anything runs."""
    if name is None:
        refuse(f"Name a paper ({NAMES}), or a folder of results with --from.")
    if data is not None and not data.is_dir():
        refuse(f"--data: there is no folder {str(data)!r}.")
    check_target(keep, "--keep")
    need("torch", "Reproducing a paper", "torch")
    from paceline.reproduce.shared import papers
    from paceline.reproduce.shared.request import Request
    from paceline.reproduce.shared.runs import Runs
    from paceline.simulate.task import TrainingError, device_named

    try:
        entries = papers.paper(name).named(only)
        device_named(device)
    except (papers.UnknownFigureError, TrainingError) as error:
        refuse(str(error))
    progress = _ProgressDisplay(quiet)
    until = time.monotonic() + 60 * minutes if minutes else math.inf
    try:
        runs = Runs(data, device, jobs, keep, progress.update, lambda: time.monotonic() > until)
    except TrainingError as error:
        refuse(str(error))
    return Request(runs, quick, device, data), entries, progress


def _make_figures(
    request: Request, entries: Sequence[PaperFigure], progress: _ProgressDisplay, show: bool
) -> tuple[list[Figure], _Ended | None]:
    """Reproduce the figures in order, showing each as soon as it is done. After an early end, the rest is missing."""
    from paceline.simulate.task import TrainingError
    from paceline.workloads.errors import DataError

    figures: list[Figure] = []
    ended = None
    try:
        for number, entry in enumerate(entries, 1):
            request.runs.left_out.clear()
            with progress.figure(entry, number, len(entries)):
                figure = entry.reproduce(request)
            if count := len(request.runs.left_out):
                left_out = f"{count} training{'s' if count > 1 else ''} did not begin before the end of --minutes."
                figure = figure.lacking(left_out)
            figures.append(figure)
            if show:
                _show_figure(figure)
    except KeyboardInterrupt:
        missing = ", ".join(entry.id for entry in entries[len(figures) :])
        message = f"Interrupted: {len(figures)} of {len(entries)} are done. Missing: {missing}."
        if request.runs.keeps:
            message += " Finished trainings are kept. Run the same command again to continue."
        ended = _Ended(message, INTERRUPTED)
    except (DataError, TrainingError) as error:
        ended = _Ended(sentence(error), 2)
    finally:
        request.runs.close()
    if ended:
        reason = "Interrupted before it was done." if ended.code == INTERRUPTED else f"Not done: {ended.message}"
        figures += [Figure(entry.id, entry.title, (), missing=(reason,)) for entry in entries[len(figures) :]]
    return figures, ended


def _read(folder: Path, paper: str | None, only: Sequence[str]) -> list[Results]:
    """Return the results in a folder, limited to one paper and to the wanted figures if these are named."""
    if not folder.is_dir():
        refuse(f"--from: there is no folder {str(folder)!r}.")
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(read(path))
        except (ValueError, OSError) as error:
            why = str(error) if isinstance(error, ValueError) else f"{path} cannot be read: {error.strerror}."
            errors.print(Text(f"Note: {why} It is left out."))
    if not found:
        refuse(f"--from: {str(folder)!r} holds no results of `paceline reproduce`.")
    papers = sorted({results.paper for results in found})
    if paper is not None:
        found = [results for results in found if results.paper == paper]
        if not found:
            refuse(f"--from: {str(folder)!r} has no results of {paper!r}. Choose from {', '.join(papers)}.")
    if not only:
        return found
    known = dict.fromkeys(figure.id for results in found for figure in results.figures)
    for name in only:
        if name not in known:
            refuse(f"--only: {str(folder)!r} has no {name!r}. Choose from {', '.join(known)}.")
    chosen = [_with_only(results, only) for results in found]
    return [results for results in chosen if results.figures]


def _with_only(results: Results, only: Sequence[str]) -> Results:
    figures = tuple(figure for figure in results.figures if figure.id in only)
    return Results(results.paper, results.command, results.device, results.date, figures)


def _check_folder(folder: Path | None) -> None:
    """Create the folder, so that a long run does not end with nowhere to write to."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--report: the folder {str(folder)!r} cannot be created: {error.strerror}.")
    if not os.access(folder, os.W_OK):
        refuse(f"--report: the folder {str(folder)!r} cannot be written to.")


def _show(results: Results) -> None:
    Console(highlight=False).print(
        Text(f"{results.paper}: {results.command}, on {results.device}, {results.date}", style="bold")
    )
    for figure in results.figures:
        _show_figure(figure)


def _show_not_reproduced(paper: str) -> None:
    for what in NOT_REPRODUCED.get(paper, ()):
        Console(highlight=False).print(Text(f"Not reproduced: {what}", style="yellow"))


def _show_figure(figure: Figure) -> None:
    console = Console(highlight=False)
    console.print()
    if figure.rows:
        console.print(_table(figure))
    else:
        console.print(Text(f"{figure.id}: {figure.title}", style="bold"))
    for what in figure.missing:
        console.print(Text(f"Missing: {what}", style="yellow"))


def _table(figure: Figure) -> Table:
    """Return a table with the paper's values beside ours. A row's note is below its description."""
    table = ruled(escape(f"{figure.id}: {figure.title}"))
    table.add_column("what", overflow="fold", min_width=20)
    for heading in (figure.paper_heading, "ours"):
        table.add_column(heading, justify="right", overflow="fold", min_width=8)
    table.add_column("unit", overflow="fold")
    table.add_column("where", no_wrap=True)
    for row in figure.rows:
        what = Text(row.what)
        if row.note:
            what.append(f"\n{row.note}", style="dim")
        values = (Text(page.shown(value)) for value in (row.paper, row.ours))
        table.add_row(what, *values, Text(row.unit), row.where)
    return table
