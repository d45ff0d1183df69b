"""The table that compares runs."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from paceline.observe.summary import Gaps, Report
from paceline.observe.table import ComparisonRow, comparison, duration

REPORT = Report(
    mean_iteration_seconds=9.74,
    samples_per_second=12_345.6,
    blocking_seconds=0.0123,
    blocking_by_worker={},
    communication_seconds=9.04,
    max_staleness=15,
    mean_staleness=10.82,
    max_progress_gap=1,
    update_gaps=Gaps(0.0, 0.1, 0.2, 0.3),
    batch_sizes={},
    updates=10,
    discarded=0,
    warm_up_iterations=0,
)
LONG = "groups:count=2,inner=(bsp:fraction=0.5),outer=(ssp:staleness=2)"


def rendered(rows: list[ComparisonRow], width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, legacy_windows=False)
    console.print(comparison(rows, "our lab", width))
    return out.getvalue()


def rows(*policies: str) -> list[ComparisonRow]:
    return [
        ComparisonRow(policy, "whole", 4.87, replace(REPORT, mean_iteration_seconds=9.74 / (i + 1)))
        for i, policy in enumerate(policies)
    ]


@pytest.mark.parametrize("policies", [("bsp",), ("bsp", "r2sp:tune_batches=true"), ("bsp", LONG), (LONG, "bsp")])
@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_nothing_is_truncated(policies: tuple[str, ...], width: int) -> None:
    text = rendered(rows(*policies), width)
    assert "…" not in text
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= width
    headings = lines[1]
    first = policies[0].partition(":")[0]
    for heading in ("policy", "iteration", f"× {first}", "× floor", "samples/s", "staleness"):
        assert heading in headings
    assert ("waits" in headings and "network" in headings) == (width >= 100)
    squeezed = "".join(line.split(" ")[0] for line in lines[3:])
    for policy in policies:
        assert policy in squeezed


def test_the_figures() -> None:
    text = rendered(rows("bsp", "r2sp"), 120)
    bsp, r2sp = text.splitlines()[-2:]
    for figure in ("9.74 s", "1.00", "2.00", "12,346", "10.8 ≤15", "12.3 ms", "9.04 s"):
        assert figure in bsp
    assert "4.87 s" in r2sp
    assert bsp.count("█") == 2 * r2sp.count("█") == 10


def test_a_streamed_run_is_marked() -> None:
    assert "r2sp (streamed)" in rendered([ComparisonRow("r2sp", "streamed", 1.0, REPORT)], 120)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1e-9, "0 s"),
        (5e-6, "5 µs"),
        (0.000123, "123 µs"),
        (0.0123, "12.3 ms"),
        (0.282, "282 ms"),
        (0.9999, "1 s"),
        (9.744, "9.74 s"),
        (99.96, "100 s"),
        (1234.5, "1234 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
