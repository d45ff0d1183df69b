"""The papers' learning figures, on cases that are small enough for a test."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from paceline.reproduce.dssp import figures
from paceline.reproduce.r2sp import learning, nlp
from paceline.reproduce.shared.compare import Scheme, SchemeResult
from paceline.reproduce.shared.papers import PAPERS, UnknownFigureError, paper
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Row
from paceline.reproduce.shared.runs import Run, Runs, Trained, TrainingCurve
from paceline.simulate.task import Goal
from workloads.making import write_cifar

#: Four workers. Compute takes as long as all of their pushes.
CLUSTER = """
[model]
bytes = 1e6
[servers]
count = 1
link = "8Mbit"
[[workers]]
count = 4
link = "8Mbit"
batch = 64
samples_per_second = 16.0
"""


@pytest.fixture
def quick_request() -> Request:
    return Request(Runs(), quick=True)


@pytest.fixture
def template(tmp_path: Path) -> Run:
    (tmp_path / "four.toml").write_text(CLUSTER)
    return Run(str(tmp_path / "four.toml"), "bsp", "mlp", "digits", 0.01, 40, goal=Goal("loss", 1.0))


def rows_of(figure: Figure) -> dict[str, Row]:
    for row in figure.rows:
        assert row.id == figure.id and row.where == "simulated"
        assert row.ours is None or isinstance(row.ours, str) or math.isfinite(row.ours)
        assert row.ours is not None or "not reached" in row.note
    return {f"{row.what}, {row.unit}": row for row in figure.rows}


@pytest.mark.slow
def test_rounds_and_times_are_relative_to_bsp(
    monkeypatch: pytest.MonkeyPatch, quick_request: Request, template: Run
) -> None:
    case = learning.TrainingCase("Tiny", template, 1.2, (0.03, 0.0001))
    monkeypatch.setattr(learning, "paper_cases", lambda request: ([case], ["Nothing larger."]))
    monkeypatch.setattr(learning, "SCHEMES", (learning.BSP, learning.PIPELINED, learning.R2SP))
    monkeypatch.setattr(learning, "JITTERS", (0.2,))
    rounds = learning.fig7b(quick_request)
    assert rounds.missing == ("Nothing larger.",)
    of = rows_of(rounds)
    assert of["Tiny: bsp, loss 1.2, rate 0.03, × BSP's rounds"].ours == 1.0
    assert of["Tiny: bsp:pipeline=true, loss 1.2, rate 0.03, × BSP's rounds"].ours == 1.0
    times = rows_of(learning.fig7c(quick_request))
    assert times["Tiny: bsp, loss 1.2, rate 0.03, % less time than BSP"].ours == 0.0
    piped = times["Tiny: bsp:pipeline=true, loss 1.2, rate 0.03, % less time than BSP"].ours
    turns = times["Tiny: r2sp, loss 1.2, own best rate, % less time than BSP"].ours
    assert isinstance(piped, float) and isinstance(turns, float)
    assert piped == pytest.approx(100 * (1 - 8 / 12), abs=4)  # 4 s of compute, and 4 s in each direction
    assert turns > piped  # 6 s: compute, and the worker's own transfers
    jittered = times["Tiny: r2sp, loss 1.2, rate 0.03, jitter 20%, % less time than BSP"].ours
    assert (
        isinstance(jittered, float) and jittered != times["Tiny: r2sp, loss 1.2, rate 0.03, % less time than BSP"].ours
    )


def test_the_papers_gain_from_tuning_is_beside_the_papers_learning_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The 40% stood beside a rate of 0.005."""
    write_cifar(tmp_path, "cifar10")

    def compared(
        runs: object, template: Run, schemes: list[Scheme], rate: float, *others: object
    ) -> list[SchemeResult]:
        return [SchemeResult(each, 0.0, 9, 9, 9.0, 1.0, 3, 3, 1.0, 7.0) for each in schemes]

    monkeypatch.setattr(learning, "at_rate", compared)
    monkeypatch.setattr(learning, "at_own_best", compared)
    rows = learning.fig10(Request(Runs(stop_at=lambda: True), folder=tmp_path)).rows
    assert [row.what.rsplit(", ")[-1] for row in rows if row.paper == 40.0] == ["rate 0.01"]


def test_a_missed_target_has_a_note_and_no_number(
    monkeypatch: pytest.MonkeyPatch, quick_request: Request, template: Run
) -> None:
    case = learning.TrainingCase("Tiny", msgspec.structs.replace(template, rounds=12), 0.1, (0.01,))
    monkeypatch.setattr(learning, "paper_cases", lambda request: ([case], []))
    monkeypatch.setattr(learning, "SCHEMES", (learning.BSP, learning.R2SP))
    figure = learning.fig7b(quick_request)
    assert [row.ours for row in figure.rows] == [None] * 4
    assert all("loss 0.1 not reached by 1 of 1 seed; the best was" in row.note for row in figure.rows)


@pytest.mark.slow
def test_correction_needs_fewer_samples_than_none(
    monkeypatch: pytest.MonkeyPatch, quick_request: Request, template: Run
) -> None:
    template = msgspec.structs.replace(template, momentum=0.9)
    case = learning.TrainingCase("Tiny", template, 1.2, (0.02,))
    monkeypatch.setattr(learning, "optimizer_cases", lambda request: ([case], []))
    of = rows_of(learning.optimizers(quick_request))
    full = of["Tiny: r2sp --correct full, loss 1.2, own best, × BSP's samples"].ours
    none = of["Tiny: r2sp, loss 1.2, own best, × BSP's samples"].ours
    assert isinstance(full, float) and full < 1.15
    assert none is None or (isinstance(none, float) and none >= full)
    sooner = of["Tiny: r2sp --correct full, loss 1.2, own best, × as fast as BSP"].ours
    assert isinstance(sooner, float) and sooner > 1.4


@pytest.mark.slow
def test_trainings_that_were_left_out_cause_no_errors() -> None:
    request = Request(Runs(stop_at=lambda: True), quick=True)
    for make in (learning.fig7b, learning.fig7c, learning.fig10, learning.optimizers, figures.table1, figures.fig3):
        assert make(request).rows == ()
    assert len(request.runs.left_out) > 20


@pytest.mark.slow
@pytest.mark.matrix
def test_two_unequal_workers_as_in_dssps_table(monkeypatch: pytest.MonkeyPatch, quick_request: Request) -> None:
    of = rows_of(figures.table1(quick_request))

    def times(policy: str) -> float:
        value = of[f"MLP on digits: {policy}, time to accuracy 0.93, × ASP"].ours
        assert isinstance(value, float)
        return value

    assert times(figures.PRINTED) == pytest.approx(1.0, abs=0.05)
    for policy in ("bsp", "ssp:staleness=3", "ssp:staleness=6", "ssp:staleness=15"):
        assert times(policy) > 1.6


def test_missing_transformers_are_reported(monkeypatch: pytest.MonkeyPatch, quick_request: Request) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    figure = nlp.fig14(replace(quick_request, quick=False))
    assert "paceline[transformers]" in figure.missing[0]
    assert {row.where for row in figure.rows} == {"simulated"}


def test_schemes_that_were_not_trained_are_named(monkeypatch: pytest.MonkeyPatch, quick_request: Request) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    figure = nlp.fig14(replace(quick_request, quick=False, runs=Runs(stop_at=lambda: True)))
    for name in ("BERT", "T5-small"):
        (sentence,) = [line for line in figure.missing if line.startswith(name)]
        assert all(scheme.name in sentence for scheme in nlp.SCHEMES)
    assert {row.where for row in figure.rows} == {"simulated"}


def test_delayed_workers_slow_a_barrier_most(quick_request: Request) -> None:
    """Four of eight workers take half a second or a second longer. BSP waits for them, R²SP in part, ASP never."""
    figure = nlp.fig14(quick_request)
    assert "--quick" in figure.missing[0]
    times = {row.what: float(row.ours) for row in figure.rows if row.ours is not None}
    for name in ("BERT", "T5-small"):
        of = {
            policy: times[f"{name}: {policy}, iteration time"]
            for policy in ("bsp", "asp", "safa", "r2sp --correct full")
        }
        assert of["bsp"] == 1.0
        assert of["asp"] < of["safa"] < of["r2sp --correct full"] < 1.0


def test_dssps_own_networks_are_trained_if_their_data_is_there(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    request = Request(Runs(), folder=tmp_path)
    table, (_, equal) = figures._mixed(request), figures._equal(request)
    assert (
        (table.template.network, table.template.data)
        == ("resnet20", "cifar10")
        == (equal.template.network, equal.template.data)
    )
    assert "train.bin" in table.missing[0] and "ResNet-20" in table.missing[0]
    write_cifar(tmp_path, "cifar100")
    table, (_, equal) = figures._mixed(request), figures._equal(request)
    assert (
        (table.template.network, table.template.data)
        == ("resnet110", "cifar100")
        == (equal.template.network, equal.template.data)
    )
    assert table.missing == ()
    assert table.template.decay == ((200.0, 0.1), (250.0, 0.1))  # as in the paper, of 300 epochs


def test_thresholds_bind_on_dssps_four_equal_workers(quick_request: Request) -> None:
    """ASP, every SSP and DSSP were one and the same training. Now each makes the fastest worker wait differently."""
    (case,) = figures._equal(quick_request)
    policies = ("bsp", "asp", figures.DSSP, figures.PRINTED, *figures.ssps_of(quick_request))
    orders = {msgspec.structs.replace(case.template, policy=policy).schedule().order for policy in policies}
    assert len(orders) == len(policies)


def test_thresholds_bind_for_dssps_resnet_too(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    _, case = figures._equal(Request(Runs(), folder=tmp_path))
    policies = ("asp", "ssp:staleness=3", figures.DSSP, figures.PRINTED)
    orders = {msgspec.structs.replace(case.template, policy=policy).schedule().order for policy in policies}
    assert len(orders) == len(policies)


def test_a_target_that_some_seeds_miss_says_how_many_reached_it(quick_request: Request) -> None:
    def run(seed: int, best: float) -> Trained:
        template = msgspec.structs.replace(figures._equal(quick_request)[0].template, seed=seed)
        curve = TrainingCurve("", (1.0,), (1,), {0: best}, "", "cpu")
        return Trained(template, curve, (2.0,), 1.0, 0.0)

    three = [run(0, 0.95), run(1, 0.8), run(2, 0.91)]
    assert figures._time(three, 0.9) is None
    assert (
        figures._reached(three, 0.9) == "reached by 2 of 3 seeds, after 2.0 s on average; the best accuracy was 0.950"
    )
    assert figures._reached(three, 0.99) == "reached by 0 of 3 seeds; the best accuracy was 0.950"
    assert figures._reached(three, 0.8) == ""


def test_missing_data_is_reported(tmp_path: Path) -> None:
    request = Request(Runs(), folder=tmp_path)
    cases, missing = learning.paper_cases(request)
    assert {case.template.data for case in cases} == {"digits"}
    assert "data_batch_1.bin" in missing[0] and str(tmp_path) in missing[0]


def test_figures_and_papers_are_found_by_name() -> None:
    for name in PAPERS:
        known = paper(name)
        assert len({entry.id for entry in known.entries}) == len(known.entries)
    r2sp = paper("r2sp")
    assert [entry.id for entry in r2sp.named(["fig13", "table1"])] == ["table1", "fig12"]
    assert [entry.id for entry in r2sp.named(["ton-fig9", "infocom-fig9"])] == ["fig8", "fig9"]
    with pytest.raises(UnknownFigureError, match="Did you mean 'fig7a'"):
        r2sp.named(["fig7aa"])
    with pytest.raises(UnknownFigureError, match="Choose from r2sp, fl-r2sp, dssp, rlp, hips"):
        paper("hops")
