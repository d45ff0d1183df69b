"""The R²SP paper's timing results agree with the formulas, and with the paper where the simulation is fitted to it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch")

import msgspec

from paceline.reproduce.r2sp.hardware import gain
from paceline.reproduce.r2sp.theory import RATIOS, even, expected
from paceline.reproduce.shared.papers import paper
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Row
from paceline.reproduce.shared.runs import Runs
from paceline.reproduce.shared.simulated import MODELS, SCHEMES, TransferWatcher, report, throttled, watched
from paceline.simulate import load_cluster

#: The figures that need no training.
TIMED = ("fig1", "fig2", "fig5", "fig7a", "fig8", "fig9", "fig11", "fig12", "map", "staleness", "table1", "table2")


def made(name: str) -> Figure:
    (entry,) = paper("r2sp").named([name])
    return entry.make(Request(Runs(), quick=True))


figure = cache(made)


def found(name: str, what: str) -> Row:
    """Return the one row whose description matches the regular expression."""
    rows = [row for row in figure(name).rows if re.search(what, row.what)]
    assert len(rows) == 1, [row.what for row in rows]
    return rows[0]


def ours(name: str, what: str) -> float:
    value = found(name, what).ours
    assert isinstance(value, float | int)
    return value


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, float):
        yield value


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMED)
def test_every_figure_is_complete(name: str) -> None:
    found = figure(name)
    assert found.id == name
    assert found.rows
    assert found.plots
    assert {row.id for row in found.rows} == {name}, "rows of a results file are matched to figures by id"
    assert {row.where for row in found.rows} == {"simulated"}
    assert all(math.isfinite(each) for each in numbers(msgspec.to_builtins(found)))
    assert len({row.what for row in found.rows}) == len(found.rows)
    for row in found.rows:
        assert row.ours is not None
        assert row.paper is not None or row.note, "a note must say why the paper has no value"
    for plot in found.plots:
        assert all(len(line.x) == len(line.y) > 0 for line in plot.lines)


@pytest.mark.parametrize("name", ["fig1", "fig8", "staleness"])
def test_a_figure_is_deterministic(name: str) -> None:
    report.cache_clear()
    watched.cache_clear()
    assert made(name) == figure(name)


def test_table_1_matches_because_the_links_were_fitted_to_it() -> None:
    for row in figure("table1").rows:
        assert row.ours == pytest.approx(row.paper, rel=0.01)
    assert "fitted" in figure("table1").rows[0].note


def test_under_bsp_each_of_eight_workers_has_an_eighth_of_links_that_idle_half_of_the_time() -> None:
    for way in ("downlink", "uplink"):
        assert ours("fig1", f"{way}: a worker's share") == pytest.approx(1 / 8, rel=0.01)
        assert 50 < ours("fig1", f"{way}: idle") < 60
    for plot in figure("fig1").plots:
        everyone, first, second = plot.lines
        assert plot.kind == "steps"
        assert max(y for y in everyone.y if y is not None) == pytest.approx(1.0)
        assert first.y == second.y
        assert first.x[0] == 0.0
        assert first.x[-1] == 40.0


@pytest.mark.parametrize("model", MODELS)
def test_one_worker_alone_has_its_own_link_to_itself(model: str) -> None:
    spec = load_cluster(f"r2sp-table1-{MODELS[model]}")
    worker = spec.workers[0]
    X = len(spec.workers) * spec.model_bytes / (spec.servers * spec.server_link)
    c, own = worker.compute_seconds(), spec.one_way(worker)
    assert ours("fig2", model) == pytest.approx(100 * (1 - (c + 2 * own) / (c + 2 * X)), rel=0.02)


def test_time_is_linear_in_the_batch() -> None:
    assert ours("fig5", "deviation") == pytest.approx(0.0, abs=1e-3)
    assert ours("fig5", "p2.xlarge: batch") == pytest.approx(1500, rel=0.1)
    assert ours("fig5", "g3.4xlarge: batch") == pytest.approx(2200, rel=0.1)
    assert figure("fig5").missing


def test_r2sp_is_fastest_where_communication_dominates() -> None:
    for model in ("AlexNet", "VGG16"):
        assert found("fig7a", f"{model}, jitter 5%: R²SP$").paper == 0.7
        assert ours("fig7a", f"{model}, jitter 5%: R²SP$") < 0.5
        assert found("fig7a", f"{model}, jitter 5%: the fastest").ours == "R²SP"
    assert ours("fig7a", "VGG16, jitter 0%: R²SP$") == pytest.approx(1 / gain(load_cluster("r2sp-a-vgg16")), rel=0.02)
    assert ours("fig7a", "VGG16, jitter 0%: R²SP, 4") == pytest.approx(
        ours("fig7a", "VGG16, jitter 0%: R²SP$"), rel=0.01
    )
    assert sum(row.what.startswith("VGG16, jitter 20%") for row in figure("fig7a").rows) == 9
    assert not any(row.what.startswith("AlexNet, jitter 20%") for row in figure("fig7a").rows)
    slower = found("fig7a", "ResNet32, jitter 5%: the fastest")
    assert slower.ours == "R²SP" or "longer" in slower.note


def test_bsps_updates_coincide_and_r2sps_are_evenly_spaced() -> None:
    assert ours("fig8", "BSP, jitter 0%: gaps of 0") == pytest.approx(15 / 16)
    assert ours("fig8", "BSP, jitter 5%: gaps of 0") == 0.0
    assert ours("fig8", "BSP, jitter 5%: gaps below") == pytest.approx(15 / 16, abs=0.03)
    assert ours("fig8", "BSP, jitter 0%: the longest") == pytest.approx(9.74, rel=0.01)
    for jitter in ("0%", "5%"):
        assert ours("fig8", f"R²SP, jitter {jitter}: gaps below") < 0.02
        assert ours("fig8", f"R²SP, jitter {jitter}: gaps of 1/16") > 0.95
    for plot in figure("fig8").plots:
        for line in plot.lines:
            assert list(line.x) == sorted(line.x)
            assert list(line.y) == sorted(line.y)  # type: ignore[type-var]
            assert line.y[-1] == 1.0


def test_a_worker_that_transfers_in_turn_has_its_whole_link() -> None:
    for way in ("uplink", "downlink"):
        assert ours("fig9", f"{way}, BSP") == 1.0
        assert 3.5 < ours("fig9", f"{way}, R²SP") < 4.1  # 16 workers share the links of 4 servers under BSP
        assert 1.0 < ours("fig9", f"{way}, ASP") < ours("fig9", f"{way}, R²SP")


def test_tuned_batches_match_table_2() -> None:
    for kind, (blocked, batch) in {"g2": (0.0, 512), "p2": (0.62, 901), "g3": (0.82, 1264)}.items():
        assert ours("table2", f"{kind}.*without tuning") == pytest.approx(blocked, rel=0.03, abs=0.005)
        assert ours("table2", f"{kind}.*tuned batch") == pytest.approx(batch, rel=0.02)
        assert ours("table2", f"{kind}.*, with tuning") < 0.02
    assert ours("table2", "samples per second") > 1.8


@pytest.mark.parametrize("model", ["AlexNet", "VGG16"])
@pytest.mark.parametrize("gbit", [10, 5, 2, 1])
def test_the_speed_up_on_throttled_links_matches_the_formula(model: str, gbit: int) -> None:
    spec = throttled(load_cluster(f"r2sp-a-{MODELS[model]}"), gbit / 10)
    c = spec.workers[0].compute_seconds()
    X = 16 * spec.model_bytes / (4 * spec.server_link)
    by_hand = (c + 2 * X) / max(c + 2 * X * 4 / 16, X)
    assert gain(spec) == pytest.approx(by_hand)
    assert ours("fig11", rf"{model}.*\({gbit} Gbit/s") == pytest.approx(by_hand, rel=0.01)


def test_a_falling_speed_up_is_explained() -> None:
    for model in ("AlexNet", "VGG16"):
        row = found("fig11", f"{model}: the speed-up")
        assert row.paper == "grows"
        assert str(row.ours).startswith("falls")
        assert "(c + 2X) / max(c + 2S/b, X)" in row.note


def test_relaxation_trades_contention_against_waiting() -> None:
    assert found("fig12", "VGG16, links handed on: the fastest").ours == "none: all alike"
    X = 16 * 552e6 / (4 * load_cluster("r2sp-a-vgg16").server_link)
    assert ours("fig12", "VGG16, links handed on, relaxation 0.8: iteration") == pytest.approx(X, rel=0.01)
    little, usual, full = (
        [ours("fig12", f"VGG16, links shared, relaxation {relax}: {what}") for what in ("iteration", "blocked")]
        for relax in ("0.01", "0.8", "1")
    )
    assert little[0] > 1.3 * usual[0], "smaller gaps bring contention back"
    assert full[1] > usual[1], "larger gaps make early workers wait"


def test_staleness_is_within_the_theoretical_bounds() -> None:
    for model in MODELS:
        assert ours("staleness", f"{model}, BSP: mean") == 0.0
        assert ours("staleness", f"{model}, R²SP: worst") == 15
    for model in ("ResNet32", "Inception-v3"):
        assert ours("staleness", f"{model}, R²SP: mean") == pytest.approx(15.0, abs=0.01)
    assert ours("staleness", "VGG16, R²SP: mean") < 14
    assert "newer" in found("staleness", "VGG16, R²SP: mean").note
    assert ours("staleness", "VGG16, R²SP with links shared") == pytest.approx(15.0, abs=0.01)
    assert 15 < ours("staleness", r"SSP\(1\)") <= 45


def test_the_map_follows_the_formula() -> None:
    over_pipelined, _ = figure("map").plots
    lines = {line.name: line for line in over_pipelined.lines}
    for name, (workers, servers) in {
        "8 workers": (8, 2),
        "16 workers": (16, 4),
        "16 workers, 1 server": (16, 1),
    }.items():
        by_formula = [expected(even(workers, servers, ratio)) for ratio in RATIOS]
        for simulated, formula in zip(lines[name].y, by_formula, strict=True):
            assert simulated is not None
            assert formula <= simulated <= 1.07 * formula  # pipelined BSP takes C/16 longer, for the last slice
    assert ours("map", "16 workers, 4 servers, ratio 1: over pipelined") == pytest.approx(4 / 3, rel=0.05)
    assert ours("map", "largest") == pytest.approx(1.83, abs=0.05)
    assert found("map", "^2 workers: compute").ours == "none", (
        "two workers' own transfers take as long as the links are busy"
    )


def test_a_watcher_counts_whole_rounds() -> None:
    watch = TransferWatcher()
    for time in (1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0):
        watch.arrived(time, 0, 1, 32)
    assert watch.gaps == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def test_a_watcher_measures_idle_links() -> None:
    watch = TransferWatcher()
    watch.used(0.0, "in", 0.0)
    for begins, ends in ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (7.0, 8.0)):
        watch.pushing(begins, 0)
        watch.used(begins, "in", 0.5)
        watch.used(begins, "in", 1.0)
        watch.used(ends, "in", 0.0)
        watch.arrived(ends, 0, 1, 32)
    assert watch.warm_up_end == 4.0
    assert watch.idle("in") == pytest.approx(0.5)
    assert watch.idle("out") == pytest.approx(1.0)
    assert [each.seconds for each in watch.settled("in")] == [1.0, 1.0]


def test_the_schemes_are_the_papers_four() -> None:
    assert list(SCHEMES) == ["BSP", "ASP", "SSP(5)", "R²SP"]
