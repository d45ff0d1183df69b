"""`paceline reproduce`: its output and files, its answers to mistakes, and what Ctrl-C leaves behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import shell as shell_of
from paceline.cli import shared
from paceline.reproduce.shared import papers
from paceline.reproduce.shared.papers import Paper, PaperFigure, UnknownFigureError
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Results, Row, read
from paceline.reproduce.shared.runs import Run
from paceline.workloads.errors import DataError
from shell import Outcome

PLOT = Plot("A plot", "", "s", (PlotLine("ours", ("a",), (1.0,)),), "bars")


def simple(name: str, value: float = 1.5) -> Callable[[Request], Figure]:
    def make(request: Request) -> Figure:
        note = f"quick: {request.quick}, device: {request.device}, folder: {request.folder}"
        row = Row(name, f"the [bold]time[/bold] of {name}", 2.0, value, "s", request.where, note)
        return Figure(name, f"About {name} [of it]", (row,), (PLOT,), ("A part of it is not here.",))

    return make


def interrupted(request: Request) -> Figure:
    raise KeyboardInterrupt


def without_data(request: Request) -> Figure:
    raise DataError("cifar10 is not in this folder: download it first")


def trains(request: Request) -> Figure:
    run = Run("lab-1mb", "bsp", "mlp", "digits", 0.1, 2)
    trained = request.runs([run])[run]
    row = Row("learns", "loss", None, trained.learned.loss[-1], "", request.where, "not in the paper")
    return Figure("learns", "Real gradients", (row,))


def paper_of(*entries: PaperFigure) -> Paper:
    return Paper("small", "A small paper", entries)


SMALL = paper_of(
    PaperFigure("table1", "A table", simple("table1")),
    PaperFigure("fig2", "A figure", simple("fig2", 3.25), also=("journal-fig3",)),
)


class Shell(shell_of.Shell):
    """Runs `paceline reproduce …` with a single small paper."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, capsys, monkeypatch, ("reproduce",))
        self.has(SMALL)

    def has(self, paper: Paper) -> None:
        def named(name: str) -> Paper:
            if name != paper.name:
                raise UnknownFigureError(f"There is no paper {name!r}. Choose from {paper.name}.")
            return paper

        self.monkeypatch.setattr(papers, "paper", named)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, capsys, monkeypatch)


# Output and files


def test_tables_show_the_papers_values_beside_ours(shell: Shell) -> None:
    outcome = shell("small")
    assert (outcome.code, outcome.err) == (0, "")
    lines = [line.split() for line in outcome.out.splitlines()]
    assert ["what", "paper", "ours", "unit", "where"] in lines
    assert ["the", "[bold]time[/bold]", "of", "fig2", "2", "3.25", "s", "simulated"] in lines
    assert "fig2: About fig2 [of it]" in outcome.out
    assert outcome.out.count("Missing: A part of it is not here.") == 2
    assert outcome.out.index("table1") < outcome.out.index("fig2")
    assert shell.files() == set()


def test_each_table_is_printed_as_soon_as_it_is_done(
    shell: Shell, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[str] = []

    def second(request: Request) -> Figure:
        seen.append(capsys.readouterr().out)
        return simple("fig2")(request)

    shell.has(paper_of(SMALL.entries[0], PaperFigure("fig2", "A figure", second)))
    shell("small")
    assert "About table1" in seen[0]


def test_only_the_named_figures_are_made(shell: Shell) -> None:
    assert "table1" not in shell("small", "--only", "journal-fig3").out
    both = shell("small", "--only", "fig2", "--only", "table1").out
    assert both.index("About table1") < both.index("About fig2"), "figures are not in the paper's order"


def test_json_prints_nothing_but_json(shell: Shell) -> None:
    outcome = shell("small", "--json", "--quick")
    assert (outcome.code, outcome.err) == (0, "")
    printed = json.loads(outcome.out)
    assert printed["paper"] == "small"
    assert printed["command"] == "paceline reproduce small --json --quick"
    assert printed["device"] == "cpu"
    assert [row["ours"] for row in printed["rows"]] == [1.5, 3.25]
    assert printed["rows"][0]["note"] == "quick: True, device: cpu, folder: None"
    (shell.folder / "kept.json").write_text(outcome.out)
    assert read(shell.folder / "kept.json").figures[1].rows[0].ours == 3.25


def test_the_data_folder_reaches_the_figures(shell: Shell) -> None:
    (shell.folder / "sets").mkdir()
    printed = json.loads(shell("small", "--json", "--data", "sets").out)
    assert printed["rows"][0]["note"].endswith("folder: sets")


def test_a_report_can_be_drawn_again_from_its_results(shell: Shell) -> None:
    outcome = shell("small", "--report", "some/where")
    assert outcome.err == "Written: some/where/index.html\n"
    assert shell.files() == {"some/where/index.html", "some/where/small.json"}
    page = (shell.folder / "some/where/index.html").read_text()
    assert "About fig2 [of it]" in page
    again = shell("--from", "some/where", "--report", "again")
    assert again.code == 0
    assert (shell.folder / "again/index.html").read_text() == page
    assert shell.files() == {"some/where/index.html", "some/where/small.json", "again/index.html"}


def test_trainings_are_kept_and_not_repeated(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.has(paper_of(PaperFigure("learns", "Real gradients", trains)))
    first = shell("small", "--keep", "kept.jsonl")
    assert first.code == 0, first.err
    assert first.err == "learns (1 of 1): 0 of 1 trainings; mlp, bsp, rate 0.1, seed 0\n"
    assert "kept.jsonl" in shell.files()

    def never(*_: object) -> None:
        raise AssertionError("the training was repeated")

    monkeypatch.setattr("paceline.reproduce.shared.runs.learn", never)
    second = shell("small", "--keep", "kept.jsonl")
    assert (second.code, second.out, second.err) == (0, first.out, "")


def test_on_a_terminal_the_bar_disappears_before_a_table_is_printed(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.has(paper_of(PaperFigure("learns", "Real gradients", trains), SMALL.entries[0]))
    monkeypatch.setattr(shared.errors, "_force_terminal", True)
    outcome = shell("small")
    assert outcome.code == 0
    assert "About table1" in outcome.out
    assert "\x1b" not in outcome.out
    assert "trainings;" not in outcome.err


# From files


def results(paper: str, *ids: str) -> Results:
    made = tuple(Figure(name, f"About {name}", (Row(name, "x", 1.0, 2.0, "s", "gpu"),)) for name in ids)
    return Results(paper, f"paceline reproduce {paper}", "cuda", "2026-02-03", made)


@pytest.fixture
def kept(shell: Shell) -> Path:
    folder = shell.folder / "kept"
    folder.mkdir()
    (folder / "a.json").write_bytes(results("r2sp", "fig1", "fig2").as_json())
    (folder / "b.json").write_bytes(results("dssp", "fig2", "fig3").as_json())
    return folder


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(name: str) -> Paper:
        raise AssertionError("--from ran a figure")

    monkeypatch.setattr(papers, "paper", never)


@pytest.mark.usefixtures("nothing_runs")
def test_from_files_shows_all_results(shell: Shell, kept: Path) -> None:
    (kept / "other.json").write_text('{"name": "something else"}')
    (kept / "notes.txt").write_text("not looked at")
    (kept / "folder.json").mkdir()
    outcome = shell("--from", "kept")
    assert outcome.code == 0
    assert outcome.out.index("r2sp: paceline reproduce r2sp, on cuda") < outcome.out.index("dssp: ")
    assert outcome.out.count("About fig2") == 2
    assert "Note: kept/other.json does not hold results of `paceline reproduce`. It is left out." in outcome.err
    assert "Note: kept/folder.json cannot be read: Is a directory. It is left out." in outcome.err
    assert "notes.txt" not in outcome.err


@pytest.mark.usefixtures("nothing_runs")
def test_from_files_can_show_one_paper_or_one_figure(shell: Shell, kept: Path) -> None:
    assert [each["paper"] for each in json.loads(shell("--from", "kept", "--json").out)] == ["r2sp", "dssp"]
    assert json.loads(shell("dssp", "--from", "kept", "--json").out)["paper"] == "dssp"
    one = json.loads(shell("--from", "kept", "--only", "fig3", "--json").out)
    assert [figure["id"] for figure in one["figures"]] == ["fig3"]
    assert [row["id"] for row in one["rows"]] == ["fig3"]


def test_from_files_a_report_needs_no_torch(shell: Shell, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "torch")
    assert shell("--from", "kept", "--report", "page").code == 0
    page = (shell.folder / "page/index.html").read_text()
    assert page.count("About fig2") == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--from", "nowhere"), "--from: there is no folder 'nowhere'.\n"),
        (("--from", "empty"), "--from: 'empty' holds no results of `paceline reproduce`.\n"),
        (("x", "--from", "kept"), "--from: 'kept' has no results of 'x'. Choose from dssp, r2sp.\n"),
        (
            ("--from", "kept", "--only", "fig9"),
            "--only: 'kept' has no 'fig9'. Choose from fig1, fig2, fig3.\n",
        ),
    ],
)
def test_mistakes_with_from_files_are_reported(shell: Shell, kept: Path, args: tuple[str, ...], message: str) -> None:
    (shell.folder / "empty").mkdir()
    assert shell(*args) == Outcome(2, "", message)


# Mistakes


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = importlib.util.find_spec

    def found(wanted: str, package: str | None = None) -> Any:
        return None if wanted == name else real(wanted, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "Name a paper (r2sp, fl-r2sp, dssp, rlp or hips), or a folder of results with --from."),
        (("nsdi",), "There is no paper 'nsdi'. Choose from small."),
        (
            ("small", "--only", "fig22"),
            "A small paper has no table or figure 'fig22'. Did you mean 'fig2'? "
            "Choose from table1, fig2, journal-fig3.",
        ),
        (("small", "--device", "abacus"), "There is no device 'abacus'; choose cpu or cuda."),
        (("small", "--data", "nowhere"), "--data: there is no folder 'nowhere'."),
        (("small", "--data", "file"), "--data: there is no folder 'file'."),
        (
            ("small", "--keep", __file__),
            f"{__file__} holds no trainings. Name another file with --keep.",
        ),
        (
            ("small", "--keep", "nowhere/kept"),
            "--keep: 'nowhere/kept' cannot be written; name a plain file in a folder that exists.",
        ),
        (("small", "--report", "file"), "--report: the folder 'file' cannot be created: File exists."),
        (("small", "--report", "file/in"), "--report: the folder 'file/in' cannot be created: Not a directory."),
    ],
)
def test_mistakes_are_reported_in_a_sentence_before_anything_runs(
    shell: Shell, args: tuple[str, ...], message: str
) -> None:
    def never(request: Request) -> Figure:
        raise AssertionError("a figure ran")

    shell.has(Paper("small", "A small paper", tuple(PaperFigure(e.id, e.title, never, e.also) for e in SMALL.entries)))
    (shell.folder / "file").write_text("")
    assert shell(*args) == Outcome(2, "", message + "\n")


def test_jobs_are_at_least_one(shell: Shell) -> None:
    outcome = shell("small", "--jobs", "0")
    assert outcome.code == 2
    assert "--jobs" in outcome.err


def test_a_missing_cuda_device_is_reported(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert shell("small", "--device", "cuda") == Outcome(2, "", "There is no CUDA device here; use --device cpu.\n")


def test_a_missing_torch_is_reported(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "torch")
    assert shell("small") == Outcome(2, "", 'Reproducing a paper needs torch: pip install "paceline[torch]".\n')


def test_missing_data_ends_the_command_but_finished_figures_are_written(shell: Shell) -> None:
    shell.has(paper_of(SMALL.entries[0], PaperFigure("fig9", "More data", without_data), SMALL.entries[1]))
    outcome = shell("small", "--json", "--report", "page")
    message = "cifar10 is not in this folder: download it first."
    assert outcome.code == 2
    assert outcome.err == f"Written: page/index.html\n{message}\n"
    printed = json.loads(outcome.out)
    assert [row["id"] for row in printed["rows"]] == ["table1"]
    assert [figure["missing"] for figure in printed["figures"][1:]] == [[f"Not done: {message}"]] * 2


# Ctrl-C


def test_figures_done_before_an_interrupt_are_printed_and_written(shell: Shell) -> None:
    shell.has(paper_of(SMALL.entries[0], PaperFigure("fig9", "Long", interrupted), SMALL.entries[1]))
    outcome = shell("small", "--report", "page")
    assert outcome.code == 130
    assert "About table1" in outcome.out
    assert "About fig2" not in outcome.out
    assert outcome.err == "Written: page/index.html\nInterrupted: 1 of 3 are done. Missing: fig9, fig2.\n"
    left = read(shell.folder / "page/small.json")
    assert [figure.missing for figure in left.figures[1:]] == [("Interrupted before it was done.",)] * 2
    page = (shell.folder / "page/index.html").read_text()
    assert "About table1" in page
    assert page.count("Interrupted before it was done.") == 2


def test_json_holds_the_figures_done_before_an_interrupt(shell: Shell) -> None:
    shell.has(paper_of(SMALL.entries[0], PaperFigure("fig9", "Long", interrupted)))
    outcome = shell("small", "--json")
    assert (outcome.code, outcome.err) == (130, "Interrupted: 1 of 2 are done. Missing: fig9.\n")
    assert [row["id"] for row in json.loads(outcome.out)["rows"]] == ["table1"]


@pytest.mark.slow
def test_a_real_interrupt_stops_a_training(shell: Shell) -> None:
    def endless(request: Request) -> Figure:
        run = Run("lab-1mb", "bsp", "mlp", "digits", 0.1, 5000)
        run.schedule()  # takes long, so it is done before the interrupt is set
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        request.runs([run])
        raise AssertionError(f"the training ran for {time.monotonic() - began:.0f} s")

    shell.has(paper_of(SMALL.entries[0], PaperFigure("fig9", "Endless", endless)))
    outcome = shell("small", "--json", "--keep", "kept.jsonl")
    assert outcome.code == 130
    assert outcome.err.endswith("Finished trainings are kept. Run the same command again to continue.\n")
    assert [row["id"] for row in json.loads(outcome.out)["rows"]] == ["table1"]
    assert shell.files() == set(), "an unfinished training is not kept"


def test_parts_of_a_paper_without_a_figure_are_named(shell: Shell) -> None:
    """FedScale's appendix was missing without a word."""
    folder = Path("kept")
    folder.mkdir()
    (folder / "a.json").write_bytes(results("fl-r2sp", "table4").as_json())
    printed = " ".join(shell("--from", "kept").out.split())
    assert "Not reproduced: The appendix" in printed and "FedScale" in printed
    assert "Not reproduced" not in shell("--from", "kept", "--only", "table4").out
    assert "FedScale" in json.loads(shell("--from", "kept", "--json").out)["not_reproduced"][0]
    shell("--from", "kept", "--report", "page")
    assert "FedScale" in Path("page/index.html").read_text(encoding="utf-8")
