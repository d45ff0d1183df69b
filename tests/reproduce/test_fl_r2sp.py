"""FL-R²SP's tables and figures: what they must show, and that their trainings are kept."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from paceline.policies import make
from paceline.reproduce.fl_r2sp.accuracy import fig15
from paceline.reproduce.fl_r2sp.convergence import TABLE_4, table4
from paceline.reproduce.fl_r2sp.round_times import FRACTIONS, SIZES, fig16, fig18, fractions
from paceline.reproduce.fl_r2sp.schemes import FL, MODELS
from paceline.reproduce.fl_r2sp.transfers import TABLE_5, fig17, table2, table5
from paceline.reproduce.shared import papers
from paceline.reproduce.shared.draw import can_draw, svg
from paceline.reproduce.shared.federation import Federated, Federation, federate
from paceline.reproduce.shared.phases import Phases
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure
from paceline.reproduce.shared.runs import Runs
from paceline.simulate import Cluster, load_cluster

SMALL = Federation("fl-cnn", FL, "mlp", "digits", 4, 2, clients=32, samples=32, every=1)


@pytest.fixture
def quick_request() -> Request:
    return Request(Runs(stop_at=lambda: True), quick=True)


def ours(figure: Figure, what: str) -> float:
    (found,) = (row.ours for row in figure.rows if row.what == what)
    assert isinstance(found, float | int)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_taking_turns_makes_transfers_short(quick_request: Request, model: str) -> None:
    """The server's rate is calibrated so that BSP matches table V."""
    figure = table5(quick_request)
    push, pull = TABLE_5[model][0]
    assert ours(figure, f"{model}, BSP: push") == pytest.approx(push, rel=0.05)
    assert ours(figure, f"{model}, BSP: pull") == pytest.approx(pull, rel=0.05)
    assert ours(figure, f"{model}: push and pull, time saved over BSP") >= 70
    assert ours(figure, f"{model}: pull, time saved over BSP") >= 80


@pytest.mark.parametrize("model", MODELS)
def test_the_servers_uplink_has_lower_peaks(quick_request: Request, model: str) -> None:
    assert 0 < ours(fig17(quick_request), f"{model}: peak of FL-R²SP relative to BSP") <= 0.4


@pytest.mark.parametrize("model", MODELS)
def test_groups_can_be_too_small_and_too_large(quick_request: Request, model: str) -> None:
    figure = fig18(quick_request)
    seconds = [ours(figure, f"{model}: groups of {size}") for size in SIZES]
    assert min(seconds) < 0.99 * seconds[0]
    assert min(seconds) < 0.95 * seconds[-1]
    assert ours(figure, f"{model}: best size") in SIZES[1:-1]


@pytest.mark.parametrize("model", MODELS)
def test_rounds_take_as_long_as_in_table_4(quick_request: Request, model: str) -> None:
    figure = table4(quick_request)
    (bsp, _), (fl, _), _ = TABLE_4[model]
    assert ours(figure, f"{model}, BSP: round time") == pytest.approx(bsp, rel=0.03)  # fitted
    assert ours(figure, f"{model}, FL-R²SP: round time") == pytest.approx(fl, rel=0.15)  # not fitted


def test_without_contention_a_client_is_limited_by_its_own_link(quick_request: Request) -> None:
    assert ours(table2(quick_request), "CNN: push and pull, one client") == pytest.approx(2 * 222e3 / 12.5e6)


def test_a_higher_fraction_takes_longer(quick_request: Request) -> None:
    figure = fractions(quick_request)
    seconds = [ours(figure, f"CNN: C = {fraction:g}, round time") for fraction in FRACTIONS]
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
def test_phases_can_be_drawn(quick_request: Request) -> None:
    figure = fig16(quick_request)
    assert len(figure.plots) == 2
    for at, plot in enumerate(figure.plots):
        drawn = svg(plot, f"p{at}")
        assert all(phase in drawn for phase in ("train", "push", "wait", "pull"))


def test_missing_trainings_are_reported(quick_request: Request) -> None:
    for make_figure in (fig15, table4):
        figure = make_figure(quick_request)
        assert any("not trained" in sentence or "not all" in sentence for sentence in figure.missing)
        assert not [row for row in figure.rows if "final accuracy" in row.what]


def test_entries_are_found_by_name_in_the_papers_order() -> None:
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


def test_a_federation_is_deterministic() -> None:
    assert federate(SMALL, None, "cpu") == federate(SMALL, None, "cpu")


def test_times_and_shares_follow_from_the_kept_result() -> None:
    run = Federated(
        "", tuple((float(at), value) for at, value in enumerate((0.1, 0.5, 0.6, 0.7, 0.7, 0.8, 0.9))), (), 1.0, 10,
        (1, 2), {2: (0.1,), 5: (0.2,)}, "rounds", "cpu",
    )  # fmt: skip
    assert run.final == pytest.approx((0.6 + 0.7 + 0.7 + 0.8 + 0.9) / 5)
    assert run.time_to(0.6) == 3.0  # the mean of 0.5, 0.6 and 0.7
    assert run.time_to(0.95) is None
    assert run.detected == 0.5
    assert run.wrongly_blacklisted == 1 / 8
