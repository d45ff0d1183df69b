"""Unequal workers and their batch sizes, on cluster B (R²SP paper: figure 5 and table II)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING

from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Row
from paceline.reproduce.shared.simulated import PLOTTED, report, row
from paceline.simulate import ClusterSpec, load_cluster

if TYPE_CHECKING:
    from paceline.reproduce.shared.request import Request

#: Instance types and their workers in cluster B.
KINDS = {"g2.2xlarge": (0, 1), "p2.xlarge": (2, 3), "g3.4xlarge": (4, 5, 6, 7)}
#: Seconds blocked, samples per second, tuned batch size.
TABLE_2 = {"g2.2xlarge": (0.0, 429.0, 512.0), "p2.xlarge": (0.62, 628.0, 901.0), "g3.4xlarge": (0.82, 917.0, 1264.0)}
BATCHES = (128, 256, 512, 1000, 1500, 2000, 2500)
AS_LONG = {
    "p2.xlarge": 1500.0,
    "g3.4xlarge": 2200.0,
}  # in the text: the batch that takes as long as 1000 samples on g2.2xlarge


def fig5(request: Request) -> Figure:
    """Measure the iteration time over the batch size."""
    make_row = partial(row, "fig5")
    spec = load_cluster("r2sp-b")
    seconds = {kind: [_alone(spec, kind, batch) for batch in BATCHES] for kind in KINDS}
    rows: list[Row] = []
    for kind in KINDS:
        note = PLOTTED
        if not rows:
            note += " Ours follows from the speeds and overheads that were fitted to table II."
        rows.append(
            make_row(f"{kind}: iteration with 1000 samples", None, seconds[kind][BATCHES.index(1000)], "s", note)
        )
    for kind, batch in AS_LONG.items():
        rows.append(
            make_row(
                f"{kind}: batch that takes as long as 1000 samples on g2.2xlarge",
                batch,
                _batch_for(seconds["g2.2xlarge"][BATCHES.index(1000)], seconds[kind]),
                "samples",
                "The paper says “around”.",
            )
        )
    off = max(_off_line(times) for times in seconds.values())
    rows.append(
        make_row("deviation from a straight line, at most", "linear", round(100 * off, 6), "%", "By construction.")
    )
    lines = tuple(PlotLine(kind, BATCHES, tuple(times)) for kind, times in seconds.items())
    plot = Plot("ResNet32, one worker alone", "batch size", "seconds per iteration", lines)
    missing = ("Figure 5b: the paper gives no speeds of these instances for Inception-v3.",)
    return Figure("fig5", "Iteration time against batch size", tuple(rows), (plot,), missing)


def table2(request: Request) -> Figure:
    """Compare blocking times with and without batch-size tuning."""
    make_row = partial(row, "table2")
    spec = load_cluster("r2sp-b")
    plain, tuned = (report(spec, policy, 80) for policy in ("r2sp", "r2sp:tune_batches=true"))
    fitted = "The cluster's overheads were fitted to these blocking times."
    rows: list[Row] = []
    for kind, workers in KINDS.items():
        blocked, speed, batch = TABLE_2[kind]
        before, after = (mean(each.blocking_by_worker[worker] for worker in workers) for each in (plain, tuned))
        rows += [
            make_row(f"{kind}: blocked, without tuning", blocked, before, "s", fitted if not rows else ""),
            make_row(
                f"{kind}: speed",
                speed,
                spec.workers[workers[0]].samples_per_second,
                "samples/s",
                "Taken from table II.",
            ),
            make_row(f"{kind}: tuned batch", batch, mean(tuned.batch_sizes[worker] for worker in workers), "samples"),
            make_row(f"{kind}: blocked, with tuning", "eliminated", after, "s"),
        ]
    gain = tuned.samples_per_second / plain.samples_per_second
    note = "Added by us. Only samples of applied updates count."
    rows.append(make_row("samples per second, with tuning", None, gain, "× without", note))
    kinds = tuple(KINDS)
    lines = tuple(
        PlotLine(name, kinds, tuple(mean(each.blocking_by_worker[worker] for worker in KINDS[kind]) for kind in kinds))
        for name, each in (("without tuning", plain), ("with tuning", tuned))
    )
    batches = (
        PlotLine("paper", kinds, tuple(TABLE_2[kind][2] for kind in kinds)),
        PlotLine("ours", kinds, tuple(mean(tuned.batch_sizes[worker] for worker in KINDS[kind]) for kind in kinds)),
    )
    plots = (
        Plot("Blocked per iteration", "", "seconds", lines, "bars"),
        Plot("Tuned batches", "", "samples", batches, "bars"),
    )
    return Figure("table2", "Batch-size tuning on cluster B, ResNet32", tuple(rows), plots)


def _alone(spec: ClusterSpec, kind: str, batch: int) -> float:
    worker = replace(spec.workers[KINDS[kind][0]], batch=batch)
    return report(replace(spec, workers=(worker,)), "asp", 8).mean_iteration_seconds


def _batch_for(seconds: float, times: list[float]) -> float:
    """Return the batch at which the line through the first and the last point reaches that many seconds."""
    slope = (times[-1] - times[0]) / (BATCHES[-1] - BATCHES[0])
    return BATCHES[0] + (seconds - times[0]) / slope


def _off_line(times: list[float]) -> float:
    """Return the largest relative distance of the points from the line through the first and the last one."""
    slope = (times[-1] - times[0]) / (BATCHES[-1] - BATCHES[0])
    return max(
        abs(time - times[0] - slope * (batch - BATCHES[0])) / time for batch, time in zip(BATCHES, times, strict=True)
    )
