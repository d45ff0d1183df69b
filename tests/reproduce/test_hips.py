"""The HiPS paper: its formulas, the figures that it prints, and edge-disjoint rings beside them."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("torch")

from paceline.reproduce.hips.figures import RINGS, SHAPES, TABLE_3
from paceline.reproduce.shared.papers import paper
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure
from paceline.reproduce.shared.runs import Runs


@cache
def figure(name: str) -> Figure:
    (entry,) = paper("hips").named([name])
    return entry.make(Request(Runs(), quick=True))


@pytest.mark.slow
def test_calculated_values_of_the_paper_are_labelled() -> None:
    for name in ("table3", "fig6", "fig7"):
        assert figure(name).paper_heading == "paper's formula"
    assert figure("section4").paper_heading == "paper"


def test_the_papers_column_is_table_3_as_printed() -> None:
    rows = {row.what: row for row in figure("table3").rows}
    for (kind, scheme), formula in TABLE_3.items():
        for n, h in SHAPES:
            assert rows[f"{kind} ({n}, {h}): {scheme}"].paper == pytest.approx(formula(n, h), rel=1e-3)
    assert rows["BCube (4, 2): HiPS"].paper == rows["BCube (4, 2): HiPS"].ours == 0.9375  # 2 · 15/16 / 2


def test_the_figures_that_the_text_prints() -> None:
    found = {row.what.removesuffix(" on all networks"): (row.paper, row.ours) for row in figure("section4").rows}
    assert found["HiPS, least time saved over PSS/MS"] == (37.5, 37.5)
    assert found["HiPS, least time saved over RS"] == (50.0, 50.0)
    assert found["HiPS, most time saved over RS"] == (75.0, 75.0)
    assert found["HiPS, most time saved over PSS/MS"] == (73.3, 73.3)  # more if (8, 3) is simulated


def test_edge_disjoint_rings_are_beside_the_papers_schemes() -> None:
    rows = {row.what: row for row in figure("table3").rows}
    for kind, (n, h) in (("BCube", (4, 2)), ("Torus", (4, 2)), ("Torus", (8, 3)), ("Torus", (16, 4))):
        rings, hips = rows[f"{kind} ({n}, {h}): {RINGS}"], rows[f"{kind} ({n}, {h}): HiPS"]
        assert rings.ours == hips.ours and rings.paper is None and "Not in the paper" in rings.note
    assert rows[f"Torus (4, 2): {RINGS}"].where == "simulated"
    assert "No edge-disjoint rings are known for BCube (8, 3)." in figure("table3").missing
    assert any(row.what.endswith(f"over {RINGS}") and row.ours == 0 for row in figure("fig7").rows)
