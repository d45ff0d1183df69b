"""RLP's figures, with the bundled digits in place of MNIST."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from paceline.reproduce.rlp.clusters import SEVERITIES, STEPS, paper_like, severe, stragglers
from paceline.reproduce.rlp.execution import TABLE_1, fig4, table1
from paceline.reproduce.shared.papers import paper
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.runs import Runs


@pytest.fixture
def quick_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Request:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    return Request(Runs(), quick=True)


def test_table_1_shows_how_the_policies_differ(quick_request: Request) -> None:
    figure = table1(quick_request)
    ours = {row.what: row.ours for row in figure.rows}
    steps = {
        name: [int(each) for each in str(ours[f"{name}: iterations of each worker"]).split()]
        for name in ("BSP", "ASP", "SSP, s = 8 as in the paper", "RLP")
    }
    assert max(steps["BSP"]) - min(steps["BSP"]) <= 1
    assert max(steps["ASP"]) > 3 * min(steps["ASP"])
    ssp = "SSP, s = 8 as in the paper"
    assert max(steps[ssp]) - min(steps[ssp]) == 8, "its slowest worker may be this far behind, and is"
    assert float(ours["ASP: idle time"] or 0) < 1e-6
    assert 30 < float(ours["BSP: idle time"] or 0) < 90
    assert 0 < float(ours["RLP: inference time"] or 0) < 50
    for name in ("BSP", "ASP", "RLP"):
        assert sum(steps[name]) == ours[f"{name}: iterations"]
    assert figure.missing == ("MNIST was not found. The bundled digits were used instead.",)
    papers = {row.what: row.paper for row in figure.rows}
    each = [int(number) for number in str(papers[f"{ssp}: iterations of each worker"]).split()]
    assert max(each) - min(each) == 7, "more than s = 2 or 5 allows"
    assert papers["RLP: iterations"] == sum(TABLE_1["rlp"][0]) == 380


def test_the_timeline_shows_when_each_worker_computes(quick_request: Request) -> None:
    plots = fig4(quick_request).plots
    assert [plot.kind for plot in plots] == ["spans"] * 4
    for plot in plots:
        for line in plot.lines:
            edges = [float(x) for x in line.x]
            assert edges == sorted(edges), "a worker computes two iterations at once"


@pytest.mark.parametrize("name", ["map", "unseen", "fig2", "fig3"])
def test_without_mnist_the_other_figures_report_what_is_missing(name: str, quick_request: Request) -> None:
    (entry,) = paper("rlp").named([name])
    figure = entry.make(quick_request)
    assert not figure.rows
    assert "--data" in figure.missing[0]


def test_the_number_of_stragglers_is_as_requested() -> None:
    for how_many in (0, 1, 4):
        _, sleeps = stragglers(3, how_many=how_many)
        assert sum(sleep[0] > 0 for sleep in sleeps) == how_many
    shares = [sum(sleep[0] > 0 for sleep in stragglers(seed)[1]) / 10 for seed in range(300)]
    assert 0.25 < sum(shares) / 300 < 0.35
    assert {paper_like(seed).hidden for seed in range(40)} == {0, 1, 2, 3}
    assert all(paper_like(seed).rate == 0.01 and not paper_like(seed).momentum for seed in range(5))


def test_the_clusters_of_the_map_become_more_severe() -> None:
    def wait(kind: str) -> float:
        """Return the mean step of the slowest worker, relative to the mean over all workers."""
        steps, sleeps = severe(kind)
        means = [step + sleep[0] * sleep[1] for step, sleep in zip(steps, sleeps, strict=True)]
        return max(means) / (sum(means) / 10)

    assert wait("even") < 1.1
    assert wait("3 of 10 sleep 4") > wait("3 of 10 sleep 1") > 1.3
    assert wait("table 1") == pytest.approx(max(STEPS) / (sum(STEPS) / 10), rel=0.02)
    assert len(SEVERITIES) == 6
