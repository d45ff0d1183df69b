"""The final report of a finished run: one run in lines, or several runs in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from paceline.observe.live_state import INTERNAL_METRICS
from paceline.observe.metric_history import Curve, Target
from paceline.observe.summary import Report
from paceline.observe.table import ruled

SHOWN = {"accuracy", *INTERNAL_METRICS}  # metrics with a line of their own, and those that no script has reported
FEW = 16  # up to this number of workers, each one's updates are listed


@dataclass(frozen=True)
class FinishedRun:
    """A finished run."""

    policy: str
    report: Report
    seconds: float  # from the first worker's joining to the last update
    loss: float | None = None  # the last one
    accuracy: float | None = None  # from 0 to 1, if the script has reported it
    curves: Mapping[str, Curve] = field(default_factory=dict)  # of every metric that the script has reported
    target: Target | None = None  # that a metric should reach

    @property
    def seconds_to_target(self) -> float | None:
        """The seconds until a metric reached the target, or None if it never did."""
        return self.target.seconds(self.curves) if self.target else None

    @property
    def waiting_share(self) -> float:
        """The share of the workers' time in which they waited for a Grant or a Turn."""
        report = self.report
        return report.blocking_seconds / report.mean_iteration_seconds if report.mean_iteration_seconds else 0.0


def lines(run: FinishedRun) -> list[str]:
    """Return the figures of a run as plain lines."""
    figures = _figures(run)
    width = max(len(name) for name, _ in figures)
    return [f"{name:<{width}}  {value}" for name, value in figures]


def closing(run: FinishedRun) -> RenderableType:
    """Return the figures of a run for a terminal. A long value is wrapped."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _figures(run):
        grid.add_row(name, Text(value))
    return grid


def side_by_side(runs: Sequence[FinishedRun], title: str | None = None) -> Table:
    """Return a table of several runs. Columns without any value, such as loss or accuracy, are left out."""
    table = ruled(title)
    columns = {
        "accuracy": ["" if run.accuracy is None else f"{run.accuracy:.1%}" for run in runs],
        "loss": ["" if run.loss is None else f"{run.loss:.3g}" for run in runs],
        "seconds": [f"{run.seconds:.1f}" for run in runs],
        runs[0].report.rate_unit if runs else "": [f"{run.report.samples_per_second:,.0f}" for run in runs],
        "waiting": [f"{run.waiting_share:.0%}" for run in runs],
        "staleness": [f"{run.report.mean_staleness:.1f} ≤{run.report.max_staleness}" for run in runs],
        "lost": [str(run.report.lost) if run.report.lost else "" for run in runs],
    }
    if runs and (target := runs[0].target):
        del columns["loss"]  # the table should fit a terminal of 80 characters
        columns = {f"to {target}": [_seconds_or_never(run.seconds_to_target) for run in runs]} | columns
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    table.add_column("policy", overflow="fold", min_width=10)  # the only column that is wrapped
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for run, *cells in zip(runs, *columns.values(), strict=True):
        table.add_row(Text(run.policy), *cells)
    return table


def _figures(run: FinishedRun) -> list[tuple[str, str]]:
    """Return the name and the value of each figure that is known."""
    report = run.report
    discarded = f", and {report.discarded:,} discarded by the policy" if report.discarded else ""
    figures = [
        ("policy", run.policy),
        ("updates", f"{report.updates:,}{discarded}"),
    ]
    if 1 < len(report.updates_by_worker) <= FEW:
        each = (f"{worker}: {count:,}" for worker, count in report.updates_by_worker.items())
        figures.append(("by worker", "  ".join(each)))
    if report.clipped:
        each = (f"{count:,} of worker {worker}" for worker, count in list(report.clipped.items())[:FEW])
        figures.append(("clipped", f"{sum(report.clipped.values()):,} updates: {', '.join(each)}"))
    figures += [
        ("seconds", f"{run.seconds:.1f}"),
        (report.rate_unit, f"{report.samples_per_second:,.0f}"),
        ("waiting", f"{run.waiting_share:.0%} of the workers' time"),
        ("staleness", f"{report.mean_staleness:.1f}, at most {report.max_staleness}"),
    ]
    if run.loss is not None:
        figures.append(("loss", f"{run.loss:.3g}"))
    if run.accuracy is not None:
        figures.append(("accuracy", f"{run.accuracy:.1%}"))
    figures += [(name, f"{curve[-1][1]:.3g}") for name, curve in run.curves.items() if curve and name not in SHOWN]
    if run.target:
        figures.append((f"to {run.target}", _seconds_or_never(run.seconds_to_target)))
    if report.lost or report.returned:
        figures.append(("faults", f"workers lost {_times(report.lost)}, returned {_times(report.returned)}"))
    return figures


def _seconds_or_never(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")
