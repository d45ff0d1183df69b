"""`paceline reproduce`: a paper's tables and figures, made again, with its figures beside ours."""

from __future__ import annotations

import importlib.util
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

from paceline.cli.shared import check_target, errors, refuse
from paceline.cli.simulate import progress_bar
from paceline.observe.table import ruled
from paceline.reproduce.shared import report as page
from paceline.reproduce.shared.rows import Figure, Results, read

if TYPE_CHECKING:
    from paceline.reproduce.shared.papers import PaperFigure
    from paceline.reproduce.shared.request import Request

INTERRUPTED = 130


def reproduce(
    paper: Annotated[
        str | None, typer.Argument(help="r2sp, fl-r2sp, dssp, rlp or hips; with --from it may be left out.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this table or figure, such as fig7a; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer seeds and shorter runs.")] = False,
    device: Annotated[str, typer.Option(help="What trains: cpu or cuda.")] = "cpu",
    data: Annotated[
        Path | None, typer.Option(help="The folder with data sets; that of PACELINE_DATA if left out.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many trainings at the same time.")] = 1,
    keep: Annotated[
        Path | None, typer.Option(help="Keep finished trainings in this file; what it holds is not done again.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, help="Begin no training after so long; 0: no bound.")] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables: an object, or a list of several.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write a page with pictures, index.html, and its results into this folder.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Run nothing: take the results in this folder's JSON files.")
    ] = None,
) -> None:
    """Make a paper's tables and figures again, and show its figures beside ours."""
    ended: _Ended | None = None
    if source is not None:
        found = _read(source, paper, only or [])
        _check_folder(report)
        if not as_json:
            for results in found:
                _show(results)
    else:
        ask, entries, progress = _prepared(paper, only or [], quick, device, data, jobs, keep, minutes, quiet=as_json)
        _check_folder(report)
        figures, ended = _made(ask, entries, progress, show=not as_json)
        command = shlex.join(["paceline", *sys.argv[1:]])
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        found = [Results(str(paper), command, device, date, tuple(figures))]
    if as_json:
        texts = [results.as_json().decode() for results in found]
        typer.echo(texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]")
    if report is not None:
        written = page.write(found, report)
        if source is None:  # so that the page can be drawn again, also together with another paper's
            written.with_name(f"{paper}.json").write_bytes(found[0].as_json())
        errors.print(Text(f"Written: {written}"))
    if ended:
        errors.print(Text(ended.said))
        sys.exit(ended.code)


@dataclass(frozen=True)
class _Ended:
    """Why it ended early; what had been done until then counts."""

    said: str
    code: int


class _ProgressLines:
    """How far the trainings of a figure are: a bar on a terminal; elsewhere a line for each, unless it is to be quiet.

    The bar goes away before anything is printed, since that may go to the same terminal.
    """

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._name = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def of(self, entry: PaperFigure, number: int, count: int) -> Iterator[None]:
        self._name = f"{entry.id} ({number} of {count})"
        with progress_bar(quiet=False) as self._bar:
            self._task = self._bar.add_task(self._name, total=None)
            yield

    def say(self, done: int, of: int, what: str) -> None:
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=escape(f"{self._name}: {what}"), completed=done, total=of)
        if not errors.is_terminal and not self._quiet:
            errors.print(Text(f"{self._name}: {done} of {of} trainings; {what}"))


def _prepared(
    name: str | None,
    only: Sequence[str],
    quick: bool,
    device: str,
    data: Path | None,
    jobs: int,
    keep: Path | None,
    minutes: float,
    quiet: bool,
) -> tuple[Request, list[PaperFigure], _ProgressLines]:
    """Whatever can be wrong with what was asked for is said here, before anything runs."""
    if name is None:
        refuse("Name a paper, r2sp, fl-r2sp, dssp or hips; or say with --from where results are.")
    if data is not None and not data.is_dir():
        refuse(f"--data: there is no folder {str(data)!r}.")
    check_target(keep, "--keep")
    if importlib.util.find_spec("torch") is None:
        refuse("Reproducing a paper trains with torch: pip install 'paceline[torch]'.")
    from paceline.reproduce.shared import papers
    from paceline.reproduce.shared.request import Request
    from paceline.reproduce.shared.runs import Runs
    from paceline.simulate.task import TrainingError, device_named

    try:
        entries = papers.paper(name).named(only)
        device_named(device)
    except (papers.UnknownFigureError, TrainingError) as error:
        refuse(str(error))
    progress = _ProgressLines(quiet)
    until = time.monotonic() + 60 * minutes if minutes else math.inf
    try:
        runs = Runs(data, device, jobs, keep, progress.say, lambda: time.monotonic() > until)
    except TrainingError as error:
        refuse(str(error))
    return Request(runs, quick, device, data), entries, progress


def _made(
    ask: Request, entries: Sequence[PaperFigure], progress: _ProgressLines, show: bool
) -> tuple[list[Figure], _Ended | None]:
    """One figure after the other, each shown as soon as it is there. If it ends early, the others are said to miss."""
    from paceline.simulate.task import TrainingError
    from paceline.workloads.errors import DataError

    figures: list[Figure] = []
    ended = None
    try:
        for number, entry in enumerate(entries, 1):
            ask.runs.left_out.clear()
            with progress.of(entry, number, len(entries)):
                figure = entry.make(ask)
            if count := len(ask.runs.left_out):
                said = f"{count} training{'s were' if count > 1 else ' was'} not begun: the time of --minutes was over."
                figure = Figure(figure.id, figure.title, figure.rows, figure.plots, (*figure.missing, said))
            figures.append(figure)
            if show:
                _show_figure(figure)
    except KeyboardInterrupt:
        missing = ", ".join(entry.id for entry in entries[len(figures) :])
        said = f"Interrupted: {len(figures)} of {len(entries)} were done; missing: {missing}."
        if ask.runs.keeps:
            said += " Trainings that were finished are kept: the same command goes on from there."
        ended = _Ended(said, INTERRUPTED)
    except (DataError, TrainingError) as error:
        said = str(error)
        ended = _Ended(said[:1].upper() + said[1:] + ("" if said.endswith(".") else "."), 2)
    finally:
        ask.runs.close()
    if ended:
        reason = "Interrupted before it was done." if ended.code == INTERRUPTED else f"Not done: {ended.said}"
        figures += [Figure(entry.id, entry.title, (), missing=(reason,)) for entry in entries[len(figures) :]]
    return figures, ended


def _read(folder: Path, paper: str | None, only: Sequence[str]) -> list[Results]:
    """The results that lie in a folder: of one paper, if one is named, and only what was asked for."""
    if not folder.is_dir():
        refuse(f"--from: there is no folder {str(folder)!r}.")
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(read(path))
        except (ValueError, OSError) as error:
            said = str(error) if isinstance(error, ValueError) else f"{path} cannot be read: {error.strerror}."
            errors.print(Text(f"Note: {said} It is left out."))
    if not found:
        refuse(f"--from: there are no results of `paceline reproduce --json` in {str(folder)!r}.")
    papers = sorted({results.paper for results in found})
    if paper is not None:
        found = [results for results in found if results.paper == paper]
        if not found:
            refuse(f"--from: there is nothing of {paper!r} in {str(folder)!r}; there is {', '.join(papers)}.")
    if not only:
        return found
    known = dict.fromkeys(figure.id for results in found for figure in results.figures)
    for name in only:
        if name not in known:
            refuse(f"--only: there is no {name!r} in {str(folder)!r}; there are {', '.join(known)}.")
    chosen = [_with_only(results, only) for results in found]
    return [results for results in chosen if results.figures]


def _with_only(results: Results, only: Sequence[str]) -> Results:
    figures = tuple(figure for figure in results.figures if figure.id in only)
    return Results(results.paper, results.command, results.device, results.date, figures)


def _check_folder(folder: Path | None) -> None:
    """Make it, so that a long run does not end with nowhere to write to."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--report: the folder {str(folder)!r} cannot be made: {error.strerror}.")
    if not os.access(folder, os.W_OK):
        refuse(f"--report: the folder {str(folder)!r} cannot be written to.")


def _show(results: Results) -> None:
    Console(highlight=False).print(
        Text(f"{results.paper}: {results.command}, on {results.device}, {results.date}", style="bold")
    )
    for figure in results.figures:
        _show_figure(figure)


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
    """The paper's figures beside ours; what is to be said of them is below what they are of."""
    table = ruled(escape(f"{figure.id}: {figure.title}"))
    table.add_column("what", overflow="fold", min_width=20)
    for heading in ("paper", "ours"):
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
