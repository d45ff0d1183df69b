"""FL-R²SP's tables and figures: what they must show, and that they can be read."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from paceline.policies import make
from paceline.reproduce.fl_r2sp import figures
from paceline.reproduce.shared import papers
from paceline.reproduce.shared.draw import can_draw, svg
from paceline.reproduce.shared.federation import Federated, Federation, federate
from paceline.reproduce.shared.phases import Phases
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure
from paceline.reproduce.shared.runs import Runs
from paceline.simulate import Cluster, load_cluster

SMALL = Federation("fl-cnn", figures.FL, "mlp", "digits", 4, 2, clients=32, samples=32, every=1)


@pytest.fixture
def ask() -> Request:
    return Request(Runs(stop_at=lambda: True), quick=True)


def ours(figure: Figure, what: str) -> float:
    (found,) = (row.ours for row in figure.rows if row.what == what)
    assert isinstance(found, float | int)
    return found


@pytest.mark.parametrize("model", figures.MODELS)
def test_taking_turns_makes_transfers_short(ask: Request, model: str) -> None:
    """With the server's rate calibrated until BSP matches table V."""
    figure = figures.table5(ask)
    push, pull = figures.TABLE_5[model][0]
    assert ours(figure, f"{model}, BSP: push") == pytest.approx(push, rel=0.05)
    assert ours(figure, f"{model}, BSP: pull") == pytest.approx(pull, rel=0.05)
    assert ours(figure, f"{model}: push and pull, less than BSP's") >= 70
    assert ours(figure, f"{model}: pull, less than BSP's") >= 80


@pytest.mark.parametrize("model", figures.MODELS)
def test_the_servers_uplink_has_lower_peaks(ask: Request, model: str) -> None:
    assert 0 < ours(figures.fig17(ask), f"{model}: peak, FL-R²SP's of BSP's") <= 0.4


@pytest.mark.parametrize("model", figures.MODELS)
def test_groups_can_be_too_small_and_too_large(ask: Request, model: str) -> None:
    figure = figures.fig18(ask)
    seconds = [ours(figure, f"{model}: groups of {size}") for size in figures.SIZES]
    assert min(seconds) < 0.99 * seconds[0]
    assert min(seconds) < 0.95 * seconds[-1]
    assert ours(figure, f"{model}: best size") in figures.SIZES[1:-1]


@pytest.mark.parametrize("model", figures.MODELS)
def test_rounds_take_as_long_as_in_table_4(ask: Request, model: str) -> None:
    figure = figures.table4(ask)
    (bsp, _), (fl, _), _ = figures.TABLE_4[model]
    assert ours(figure, f"{model}, BSP: a round") == pytest.approx(bsp, rel=0.03)  # fitted
    assert ours(figure, f"{model}, FL-R²SP: a round") == pytest.approx(fl, rel=0.15)  # not fitted


def test_without_contention_a_client_takes_its_own_links_time(ask: Request) -> None:
    assert ours(figures.table2(ask), "CNN: push and pull, one client") == pytest.approx(2 * 222e3 / 12.5e6)


def test_a_higher_fraction_takes_longer(ask: Request) -> None:
    figure = figures.fractions(ask)
    seconds = [ours(figure, f"CNN: C = {fraction:g}, a round") for fraction in figures.FRACTIONS]
    assert seconds == sorted(seconds)


def test_phases_follow_one_another_without_gaps() -> None:
    watch = Phases()
    spec = load_cluster("fl-cnn")
    Cluster(replace(spec, workers=spec.workers[:16]), make("fl-r2sp:groups=4"), 6, 0, observer=watch).run()
    for client in range(16):
        spans = sorted((span for span in watch.spans if span.client == client), key=lambda span: span.begin)
        phases = [span.phase for span in spans]
        assert phases[:3] == ["train", "push", "wait"] or phases[:3] == ["pull", "train", "push"]
        for before, after in itertools.pairwise(spans):
            assert before.phase != after.phase
            assert after.begin >= before.end


@pytest.mark.skipif(not can_draw(), reason="matplotlib is not installed")
def test_phases_can_be_drawn(ask: Request) -> None:
    figure = figures.fig16(ask)
    assert len(figure.plots) == 2
    for at, plot in enumerate(figure.plots):
        drawn = svg(plot, f"p{at}")
        assert all(phase in drawn for phase in ("train", "push", "wait", "pull"))


def test_what_was_not_trained_is_said(ask: Request) -> None:
    for make_figure in (figures.fig15, figures.table4):
        figure = make_figure(ask)
        assert any("not trained" in said or "not all" in said for said in figure.missing)
        assert not [row for row in figure.rows if "final accuracy" in row.what]


def test_every_entry_is_known_by_its_name() -> None:
    assert [entry.id for entry in papers.paper("fl-r2sp").named(["fig18", "table2"])] == ["table2", "fig18"]


def test_a_federation_is_trained_once_and_kept(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    (found,) = Runs(kept=kept).federated([SMALL]).values()
    assert len(found.tests) >= 2 and len(found.outliers) == 8 and found.clients == 32
    again = Runs(kept=kept, stop_at=lambda: True)
    assert again.federated([SMALL]) == {SMALL: found}
    other = msgspec.structs.replace(SMALL, seed=1)
    assert again.federated([other]) == {}
    assert again.left_out == {other.key}


def test_the_same_federation_is_the_same_run() -> None:
    assert federate(SMALL, None, "cpu") == federate(SMALL, None, "cpu")


def test_times_and_shares_are_read_off_what_was_kept() -> None:
    run = Federated(
        "", tuple((float(at), value) for at, value in enumerate((0.1, 0.5, 0.6, 0.7, 0.7, 0.8, 0.9))), (), 1.0, 10,
        (1, 2), {2: (0.1,), 5: (0.2,)}, "rounds", "cpu",
    )  # fmt: skip
    assert run.final == pytest.approx((0.6 + 0.7 + 0.7 + 0.8 + 0.9) / 5)
    assert run.time_to(0.6) == 3.0  # the mean of 0.5, 0.6 and 0.7
    assert run.time_to(0.95) is None
    assert run.found == 0.5
    assert run.wronged == 1 / 8
