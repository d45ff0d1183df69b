"""FL-R²SP's tables and figures: what they must show, and that their trainings are kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest

from paceline.policies import make
from paceline.reproduce.fl_r2sp.accuracy import fig15
from paceline.reproduce.fl_r2sp.convergence import TABLE_4, table4
from paceline.reproduce.fl_r2sp.resnet20 import resnet20
from paceline.reproduce.fl_r2sp.round_times import FRACTIONS, SIZES, fig16, fig18, fractions
from paceline.reproduce.fl_r2sp.schemes import BSP, BSP_FILTERED, CORE, FL, FL_PLAIN, MODELS
from paceline.reproduce.fl_r2sp.trainings import cases, resnet20_case
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


@cache
def quick(make: Callable[[Request], Figure]) -> Figure:
    """Return a figure without trainings. Several tests look at it."""
    return make(Request(Runs(stop_at=lambda: True), quick=True))


def ours(figure: Figure, what: str) -> float:
    (found,) = (row.ours for row in figure.rows if row.what == what)
    assert isinstance(found, float | int)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_taking_turns_makes_transfers_short(model: str) -> None:
    """The server's rate is calibrated so that BSP matches table V."""
    figure = quick(table5)
    push, pull = TABLE_5[model][0]
    assert ours(figure, f"{model}, BSP: push") == pytest.approx(push, rel=0.05)
    assert ours(figure, f"{model}, BSP: pull") == pytest.approx(pull, rel=0.05)
    assert ours(figure, f"{model}: push and pull, time saved over BSP") >= 70
    assert ours(figure, f"{model}: pull, time saved over BSP") >= 80


@pytest.mark.parametrize("model", MODELS)
def test_the_servers_uplink_has_lower_peaks(model: str) -> None:
    assert 0 < ours(quick(fig17), f"{model}: peak of FL-R²SP relative to BSP") <= 0.4


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_groups_can_be_too_small_and_too_large(model: str) -> None:
    figure = quick(fig18)
    seconds = [ours(figure, f"{model}: groups of {size}") for size in SIZES]
    assert min(seconds) < 0.99 * seconds[0]
    assert min(seconds) < 0.95 * seconds[-1]
    assert ours(figure, f"{model}: best size") in SIZES[1:-1]


@pytest.mark.parametrize("model", MODELS)
def test_rounds_take_as_long_as_in_table_4(model: str) -> None:
    figure = quick(table4)
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


SECONDS = {BSP: 100.0, BSP_FILTERED: 80.0, FL_PLAIN: 75.0, FL: 60.0}


class _Trained(Runs):
    """Trainings that are not carried out: each policy reaches 60% at a time of its own, and goes on to 61%."""

    def federated(self, runs: Iterable[Federation]) -> dict[Federation, Federated]:
        return {
            run: Federated(
                run.key,
                tuple((SECONDS[run.policy] * at / 3, 0.61 if at >= 3 else 0.3) for at in (1, 2, *range(3, 12))),
                (), 1.0, 128, tuple(range(32)), {}, "rounds", "cpu",
            )
            for run in runs
        }  # fmt: skip


@pytest.fixture
def gpu_request(monkeypatch: pytest.MonkeyPatch) -> Request:
    """A request on a GPU that has CIFAR-10, and neither Speech Commands nor Fashion-MNIST."""
    monkeypatch.setattr(Request, "lacks", lambda self, data: "" if data == "cifar10" else f"no {data}")
    return Request(_Trained(), device="cuda")


def test_resnet20_is_trained_under_the_papers_schemes_on_a_gpu(gpu_request: Request) -> None:
    case, _ = resnet20_case(gpu_request)
    assert case is not None and tuple(case.schemes.values()) == CORE
    assert (case.template.network, case.template.data, case.template.steps) == ("resnet20", "cifar10", 100)
    assert load_cluster(case.template.cluster).name == "fl-resnet20"
    figure = resnet20(gpu_request)
    assert {row.id for row in figure.rows} == {"resnet20"}
    assert ours(figure, "ResNet20: BSP, filtered, final accuracy") == 61.0
    assert any("one seed" in sentence for sentence in figure.missing)


def test_the_time_saved_is_given_with_each_comparison(gpu_request: Request) -> None:
    """The filter saves time too, so filtered FL-R²SP beside BSP that is not filtered says too much by itself."""
    saved = {row.what: row.ours for row in resnet20(gpu_request).rows if "saved" in row.what}
    assert saved == {
        "ResNet20: FL-R²SP's time to 60.0%, saved over filtered BSP": 25.0,
        "ResNet20: FL-R²SP's time to 60.0%, saved over BSP, FL-R²SP alone filtered": 40.0,
        "ResNet20: FL-R²SP's time to 60.0%, saved over BSP, neither filtered": 25.0,
    }


def test_resnet20_is_missing_without_a_gpu(quick_request: Request, gpu_request: Request) -> None:
    for request, why in ((quick_request, "--quick"), (replace(gpu_request, device="cpu"), "--device cuda")):
        figure = resnet20(request)
        assert not figure.rows
        (sentence,) = figure.missing
        assert "ResNet20 was not trained" in sentence and why in sentence


def test_keyword_spotting_is_missing_without_its_data(quick_request: Request, gpu_request: Request) -> None:
    assert any("Speech Commands" in sentence for sentence in cases(quick_request)[1])
    (sentence,) = cases(gpu_request)[1]
    assert sentence.startswith("Keyword spotting was not trained, because Google's Speech Commands was not found.")
