"""The HTML page is self-contained, complete and properly escaped."""

from __future__ import annotations

import builtins
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.reproduce.shared import draw, report
from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Results, Row

NASTY = "<script>alert(\"x\")</script> & 'y' $10^2$"
BARS = Plot(
    "Bars <b>",
    "model & size",
    "× BSP",
    (PlotLine("ours", ("a", "b"), (1.0, None)), PlotLine("théirs", ("b",), (2.0,))),
    "bars",
)
LINES = Plot(
    "R²SP's gain",
    "ratio",
    "",
    (PlotLine("one", (0.1, 1.0, 10.0), (1.0, None, 2.0)), PlotLine("two", (1.0,), (1.5,))),
    log=True,
)
STEPS = Plot(
    "Links", "s", "share", tuple(PlotLine(f"worker {n}", (0.0, 1.0, 2.0), (0.0, 1.0, 1.0)) for n in range(9)), "steps"
)
SINGLE = Plot("One", "", "", (PlotLine("", ("x",), (1.0,)),), "bars")

ROWS = (
    Row("fig1", "seconds", 9.74, 9.7412345, "s", "simulated", "The rate was fitted."),
    Row("fig1", "samples", 1264.0, 1261.25, "samples", "lab"),
    Row("fig1", "a range", "25 to 60", "35 to 69", "%", "gpu"),
    Row("fig1", "not given", None, 0.000123456, "", "simulated", "Drawn only."),
    Row("fig1", NASTY, NASTY, NASTY, NASTY, "simulated", NASTY),
)
RESULTS = Results(
    "r2sp",
    f"paceline reproduce r2sp --only {NASTY}",
    "cpu",
    "2026-02-03",
    (
        Figure("fig1", "A figure", ROWS, (BARS, LINES, STEPS, SINGLE)),
        Figure(NASTY, NASTY, (), (), ("ImageNet is not here.", NASTY)),
    ),
)
EMPTY = {"meta", "path", "use", "rect"}


class Seen(HTMLParser):
    """A parsed page: its elements, their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "an element was not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag not in EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


@pytest.fixture(scope="module")
def text() -> str:
    pytest.importorskip("matplotlib")
    return report.page([RESULTS, RESULTS])


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuses(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuses)


def test_the_page_is_self_contained(text: str) -> None:
    assert "http" not in text
    assert "src=" not in text
    assert "@import" not in text
    seen = Seen(text)
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(seen.tags)
    ids = [value for name, value in seen.attributes if name == "id"]
    assert len(ids) == len(set(ids)), "two plots share a name"
    for name, value in seen.attributes:
        if name in ("href", "xlink:href"):
            assert value.startswith("#")
            assert value[1:] in ids
    for used in re.findall(r"url\(([^)]*)\)", text):
        assert used.startswith("#")
        assert used[1:] in ids


def test_the_page_holds_all_values(text: str) -> None:
    words = Seen(text).text
    for row in ROWS:
        for what in (row.what, report.shown(row.paper), report.shown(row.ours), row.unit, row.where, row.note):
            assert not what or what in words, what
    for fact in ("9.741", "1,261", "0.0001235", "25 to 60", "–", "2026-02-03", "cpu", RESULTS.command):
        assert fact in words
    assert "ImageNet is not here." in words
    assert words.count(f"{NASTY}: {NASTY}") == 2


def test_all_text_is_escaped(text: str) -> None:
    assert "<script" not in text
    assert "<b>" not in text
    assert "Bars <b>" in Seen(text).text, "a plot's title is missing"


def test_plots_are_beside_the_table_and_take_the_pages_colours(text: str) -> None:
    seen = Seen(text)
    assert seen.tags.count("svg") == 2 * 4
    assert draw.INK not in text
    assert "currentColor" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert re.search(r"\.sides\.drawn \{ grid-template-columns", text)
    assert ("aria-label", "R²SP's gain") in seen.attributes
    for label in ("ours", "théirs", "× BSP", "model & size", "worker 8", "0.1", "10"):
        assert label in seen.text, label


def test_the_same_results_make_the_same_page(text: str) -> None:
    assert report.page([RESULTS, RESULTS]) == text


def test_without_matplotlib_there_are_tables_and_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_matplotlib(monkeypatch)
    path = report.write([RESULTS], tmp_path / "some" / "folder")
    assert path == tmp_path / "some" / "folder" / "index.html"
    text = path.read_text(encoding="utf-8")
    assert "<svg" not in text
    assert "pip install 'paceline[plot]'" in unescape(text)
    assert "9.741" in Seen(text).text


def test_with_matplotlib_there_is_no_hint(text: str) -> None:
    assert "pip install" not in text


def test_an_empty_page_is_valid() -> None:
    Seen(report.page([]))
    Seen(report.page([Results("r2sp", "", "cpu", "", ())]))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        ("grows", "grows"),
        (0.0, "0"),
        (15, "15"),
        (0.46334, "0.4633"),
        (1264.4, "1,264"),
        (-2000.0, "-2,000"),
    ],
)
def test_values_have_four_significant_digits(value: float | str | None, shown: str) -> None:
    assert report.shown(value) == shown


def test_bars_with_long_names_are_horizontal_and_show_their_values() -> None:
    pytest.importorskip("matplotlib")
    names = tuple(f"r2sp:groups={count} --correct full" for count in range(2, 6))
    vertical, horizontal = (
        draw.svg(SINGLE, "one"),
        draw.svg(Plot("Time", "scheme", "s", (PlotLine("", names, (12.25, None, 3.5, 1155.99)),), "bars"), "two"),
    )
    for text in (*names, "12.25", "–", "3.5", "1156", "Time", "scheme"):
        assert f">{text}<" in horizontal
    assert ">1<" not in vertical.replace(">1.0<", "")


def test_the_common_prefix_of_rows_becomes_a_heading() -> None:
    of = [("VGG16: bsp", 1.0), ("VGG16: r2sp", 2.0), ("AlexNet: bsp", 1.0), ("whole", 3.0)]
    rows = tuple(Row("fig1", what, None, ours, "×", "gpu") for what, ours in of)
    text = report.page([Results("dssp", "", "cpu", "", (Figure("fig1", "A figure", rows),))])
    assert text.count("VGG16") == 1 and ">VGG16</th>" in text
    for what in ("bsp", "r2sp", "AlexNet: bsp", "whole"):
        assert f"<td>{what}</td>" in text
    assert "<h2>DSSP (ICDCS 2019)</h2>" in text
