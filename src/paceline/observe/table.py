"""Runs side by side, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.observe.summary import Report


@dataclass(frozen=True)
class Row:
    """One run to be shown."""

    policy: str
    apply: str
    limit_seconds: float
    report: Report


def comparison(rows: Sequence[Row], title: str) -> Table:
    """A table of runs. "× bsp" is how many times faster than the first; "× floor" how near to the cluster's limit."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for heading, justify in (
        ("policy", "left"),
        ("iteration", "right"),
        ("", "left"),
        (f"× {_first_word(rows[0].policy)}", "right"),
        ("× floor", "right"),
        ("samples/s", "right"),
        ("waits", "right"),
        ("network", "right"),
        ("staleness", "right"),
    ):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    longest = max(row.report.mean_iteration_seconds for row in rows)
    first = rows[0].report.mean_iteration_seconds
    quickest = min(row.report.mean_iteration_seconds for row in rows)
    for row in rows:
        report = row.report
        seconds = report.mean_iteration_seconds
        best = seconds == quickest and len(rows) > 1
        name = row.policy + (" (streamed)" if row.apply == "streamed" else "")
        table.add_row(
            Text(name, style="bold green" if best else ""),
            duration(seconds),
            Text("█" * max(1, round(10 * seconds / longest)), style="green" if best else "blue"),
            f"{first / seconds:.2f}",
            f"{seconds / row.limit_seconds:.2f}",
            f"{report.samples_per_second:,.0f}",
            duration(report.blocking_seconds),
            duration(report.communication_seconds),
            f"{report.mean_staleness:.1f} (≤{report.max_staleness})",
        )
    return table


def duration(seconds: float) -> str:
    """Seconds with three digits that matter."""
    if seconds == 0 or seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def _first_word(policy: str) -> str:
    return policy.partition(":")[0]
