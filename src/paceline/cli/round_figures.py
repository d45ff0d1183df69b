"""The table of how workers and links spend their time in rounds: of `paceline simulate` and `paceline lab`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from paceline.observe.table import duration, ruled
from paceline.simulate import ClusterSpec, SimulationResult
from paceline.simulate.link_use import LinkUse, burst_seconds
from paceline.simulate.network import DIRECTIONS

IDLE = "idle: the share of the time in which a worker computes nothing. ≤: that of the idlest worker."
WAITS = "waits: the part of it in which a worker waits for others."
PEAK = (
    "peak: the largest mean rate of all servers' links together over any {seconds}. In that time they carry one update "
    "or model of each worker."
)


@dataclass(frozen=True)
class RoundFigures:
    """How the workers and the servers' links spend their time under one policy, in rounds of local steps."""

    policy: str
    idle: tuple[float, ...]  # by worker: the share of the time in which it computes nothing
    waiting: float | None  # the mean share in which workers wait for others; None if they compute meanwhile
    mean_rates: tuple[float, float] | None  # bytes per second on the servers' links, in and out; None: there are none
    peak_rates: tuple[float, float] | None  # the same in the busiest stretch of time

    @property
    def mean_idle(self) -> float:
        return sum(self.idle) / len(self.idle)

    def as_json(self) -> dict[str, Any]:
        """Return the figures for --json, with rates in bytes per second."""
        return {
            "idle_by_worker": dict(enumerate(self.idle)),
            "waiting_share": self.waiting,
            "mean_rates": dict(zip(DIRECTIONS, self.mean_rates, strict=True)) if self.mean_rates else None,
            "peak_rates": dict(zip(DIRECTIONS, self.peak_rates, strict=True)) if self.peak_rates else None,
        }


def figures_of(spec: ClusterSpec, policy: str, result: SimulationResult, use: LinkUse) -> RoundFigures:
    """Return the figures of one run."""
    report = result.report
    since, until = result.warmed_up_at, result.simulated_seconds
    idle = tuple(max(0.0, 1.0 - share) for share in result.computing)
    waiting = None if spec.overlap else report.blocking_seconds / report.mean_iteration_seconds
    if spec.colocate:
        return RoundFigures(policy, idle, waiting, None, None)
    into, out = (spec.capacity(direction) for direction in DIRECTIONS)
    means = (into * use.mean("in", since, until), out * use.mean("out", since, until))
    peak_in, peak_out = (use.peak(way, burst_seconds(spec, way), since, until) for way in DIRECTIONS)
    peaks = (into * peak_in, out * peak_out)
    return RoundFigures(policy, idle, waiting, means, peaks)


def description(spec: ClusterSpec) -> str:
    """Return in words when and how workers exchange, such as "50 local steps, updates of 133 MB (int4)"."""
    parts = [f"{spec.local_steps} local steps"] if spec.local_steps > 1 else []
    if spec.updates:
        parts.append(f"updates of {spec.update_bytes / 1e6:,.3g} MB ({spec.updates})")
    return ", ".join([*parts, *(["overlapped"] if spec.overlap else [])])


def table_of(rows: Sequence[RoundFigures]) -> Table:
    """Return the table of what workers and links do. The rates are in Mbit/s."""
    table = ruled(None)
    table.add_column("policy", overflow="fold", min_width=10)
    has_links, waits = rows[0].mean_rates is not None, rows[0].waiting is not None
    headings = ["idle", *(["waits"] if waits else [])]
    headings += ["Mbit/s in", "peak", "Mbit/s out", "peak"] if has_links else []
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row.mean_idle:.1%} ≤{max(row.idle):.1%}"]
        if row.waiting is not None:
            cells.append(f"{row.waiting:.1%}")
        if row.mean_rates and row.peak_rates:
            for mean, peak in zip(row.mean_rates, row.peak_rates, strict=True):
                cells += [f"{8 * mean / 1e6:.3g}", f"{8 * peak / 1e6:.3g}"]
        table.add_row(row.policy, *cells)
    return table


def legend(spec: ClusterSpec) -> str:
    """Return the explanation of the table."""
    parts = [IDLE, *([] if spec.overlap else [WAITS])]
    into, out = (duration(burst_seconds(spec, way)) for way in DIRECTIONS)
    seconds = into if into == out else f"{into} (in) or {out} (out)"
    return " ".join(parts if spec.colocate else [*parts, PEAK.format(seconds=seconds)])
