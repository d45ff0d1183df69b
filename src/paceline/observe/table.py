"""A table that compares runs, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from paceline.observe.summary import Report


@dataclass(frozen=True)
class ComparisonRow:
    """A run in the table."""

    policy: str
    apply: str
    limit_seconds: float | None  # None: there is no floor to compare the run with
    report: Report


def ruled(title: str | None) -> Table:
    """Return an empty table in paceline's style: a title, and a line below the headings."""
    return Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        collapse_padding=True,
        show_edge=False,
    )


def comparison(rows: Sequence[ComparisonRow], title: str, width: int) -> Table:
    """Return a table of runs.

    "× bsp" is the speedup over the first run, and "× floor" the ratio to the cluster's limit. The columns "waits"
    (blocking time) and "network" (push and pull) are left out if the terminal is narrow. "staleness" is the mean and
    the maximum.
    """
    narrow = width < 100
    table = ruled(title)
    headings = ["iteration", "", f"× {rows[0].policy.partition(':')[0]}", "× floor", "samples/s", "staleness"]
    table.add_column("policy", overflow="fold", min_width=10)  # the only column that is wrapped
    for heading in headings if narrow else [*headings, "waits", "network"]:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    slowest = max(row.report.mean_iteration_seconds for row in rows)
    quickest = min(row.report.mean_iteration_seconds for row in rows)
    first = rows[0].report.mean_iteration_seconds
    for row in rows:
        report = row.report
        seconds = report.mean_iteration_seconds
        colour = "green" if seconds <= 1.005 * quickest and len(rows) > 1 else "blue"
        cells: list[RenderableType] = [
            Text(row.policy + (" (streamed)" if row.apply == "streamed" else "")),
            duration(seconds),
            Text("█" * max(1, round(10 * seconds / slowest)), style=colour),
            f"{first / seconds:.2f}",
            f"{seconds / row.limit_seconds:.2f}" if row.limit_seconds else "–",
            f"{report.samples_per_second:,.0f}",
            f"{report.mean_staleness:.1f} ≤{report.max_staleness}",
            duration(report.blocking_seconds),
            duration(report.communication_seconds),
        ]
        table.add_row(*(cells[:-2] if narrow else cells))
    return table


def duration(seconds: float) -> str:
    """Return a time with three significant digits and a suitable unit."""
    if seconds < 1e-6 or seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:  # 0.9995 s would be shown as 1e+03 ms
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"
