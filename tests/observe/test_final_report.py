"""The final report of a run."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from paceline.observe.final_report import FEW, FinishedRun, closing, lines, side_by_side
from paceline.observe.metric_history import Target
from paceline.observe.summary import Gaps, Report

REPORT = Report(
    mean_iteration_seconds=2.0,
    samples_per_second=12_345.6,
    blocking_seconds=0.25,
    blocking_by_worker={0: 0.5, 1: 0.0},
    communication_seconds=0.5,
    max_staleness=15,
    mean_staleness=10.82,
    max_progress_gap=1,
    update_gaps=Gaps(0.0, 0.1, 0.2, 0.3),
    batch_sizes={0: 32, 1: 32},
    updates=1480,
    discarded=0,
    warm_up_iterations=0,
    updates_by_worker={0: 1000, 1: 480},
)
LONG = "groups:count=2,inner=(bsp:fraction=0.5),outer=(ssp:staleness=2)"


def rendered(what: RenderableType, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, legacy_windows=False).print(what)
    return [text.rstrip() for text in out.getvalue().splitlines()]


def test_every_figure() -> None:
    report = replace(REPORT, discarded=3, lost=2, returned=1, clipped={0: 1, 3: 1_200})
    assert lines(FinishedRun("r2sp", report, 12.34, loss=0.4312, accuracy=0.975)) == [
        "policy     r2sp",
        "updates    1,480, and 3 discarded by the policy",
        "by worker  0: 1,000  1: 480",
        "clipped    1,201 updates: 1 of worker 0, 1,200 of worker 3",
        "seconds    12.3",
        "samples/s  12,346",
        "waiting    12% of the workers' time",
        "staleness  10.8, at most 15",
        "loss       0.431",
        "accuracy   97.5%",
        "faults     workers lost twice, returned once",
    ]


def test_figures_without_a_value_are_left_out() -> None:
    text = "\n".join(lines(FinishedRun("bsp", REPORT, 1.0)))
    for word in ("loss", "accuracy", "faults", "discarded", "clipped"):
        assert word not in text


def test_a_run_without_updates() -> None:
    nothing = replace(REPORT, mean_iteration_seconds=0.0, blocking_seconds=0.0, updates=0, updates_by_worker={})
    assert "waiting    0% of the workers' time" in lines(FinishedRun("bsp", nothing, 0.0))


@pytest.mark.parametrize(("workers", "named"), [(1, False), (2, True), (FEW, True), (FEW + 1, False)])
def test_the_updates_of_a_few_workers_are_listed(workers: int, named: bool) -> None:
    report = replace(REPORT, updates_by_worker=dict.fromkeys(range(workers), 5))
    assert any(text.startswith("by worker") for text in lines(FinishedRun("bsp", report, 1.0))) is named


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_terminal_shows_the_same_figures_and_truncates_nothing(width: int) -> None:
    run = FinishedRun(LONG, replace(REPORT, lost=3), 12.34, 0.4)
    text = rendered(closing(run), width)
    assert max(len(row) for row in text) <= width
    assert "".join("".join(text).split()) == "".join("".join(lines(run)).split())


def test_runs_side_by_side() -> None:
    runs = [
        FinishedRun("bsp", REPORT, 20.0, accuracy=0.981),
        FinishedRun("r2sp", replace(REPORT, blocking_seconds=0.0, lost=1), 12.34, accuracy=0.975),
    ]
    text = rendered(side_by_side(runs, "digits"))
    assert text[0] == "digits"
    assert text[1].split() == ["policy", "accuracy", "seconds", "samples/s", "waiting", "staleness", "lost"]
    assert text[3].split() == ["bsp", "98.1%", "20.0", "12,346", "12%", "10.8", "≤15"]
    assert text[4].split() == ["r2sp", "97.5%", "12.3", "12,346", "0%", "10.8", "≤15", "1"]


def test_a_column_without_values_is_left_out() -> None:
    text = rendered(side_by_side([FinishedRun("bsp", REPORT, 20.0), FinishedRun("asp", REPORT, 20.0, loss=0.25)]))
    assert text[0].split() == ["policy", "loss", "seconds", "samples/s", "waiting", "staleness"]
    assert text[2].split()[:2] == ["bsp", "20.0"]
    assert text[3].split()[:2] == ["asp", "0.25"]


def test_without_batch_sizes_the_rate_is_one_of_updates() -> None:
    run = FinishedRun("bsp", replace(REPORT, counts_samples=False), 1.0)
    assert "updates/s  12,346" in lines(run)
    assert "updates/s" in rendered(side_by_side([run]))[0] and "samples/s" not in rendered(side_by_side([run]))[0]


def test_a_table_without_runs() -> None:
    assert rendered(side_by_side([]))[0] == "policy"


def test_long_names_fit_in_eighty_columns() -> None:
    runs = [FinishedRun(LONG, replace(REPORT, lost=1), 20.0, 0.4, 0.9)]
    text = rendered(side_by_side(runs))
    assert max(len(row) for row in text) <= 80
    assert "…" not in "".join(text)
    assert "".join(row.split(" ")[0] for row in text[2:]) == LONG


def test_the_time_to_a_target() -> None:
    target, curve = Target("accuracy", 0.97), [(3.0, 0.5), (8.25, 0.98)]
    reached = FinishedRun("r2sp", REPORT, 12.3, 0.1, 0.98, {"accuracy": curve}, target)
    never = FinishedRun("bsp", REPORT, 12.3, 0.1, 0.96, {"accuracy": curve[:1]}, target)
    assert "to 97%     8.2 s" in lines(reached)
    assert "to 97%     never" in lines(never)
    table = rendered(side_by_side([never, reached]))
    assert table[0].split()[:4] == ["policy", "to", "97%", "accuracy"]
    assert table[2].split()[:2] == ["bsp", "never"]
    assert table[3].split()[:3] == ["r2sp", "8.2", "s"]
    assert not any("to 97%" in line for line in rendered(side_by_side([replace(never, target=None)] * 2)))


def test_a_comparison_with_a_target_fits_a_terminal_of_80_characters() -> None:
    target = Target("accuracy", 0.97)
    runs = [FinishedRun(f"{name}:weights=mean", REPORT, 33.6, 0.0374, 0.983, {}, target) for name in ("bsp", "r2sp")]
    table = rendered(side_by_side(runs))
    assert any(line.startswith("r2sp:weights=mean ") for line in table), "a name is not broken"
