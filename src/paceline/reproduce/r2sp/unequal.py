"""Unequal workers and their batches (R²SP paper: figure 5 and table II), on its cluster B."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING

from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Row
from paceline.reproduce.shared.simulated import DRAWN, report, row
from paceline.simulate import ClusterSpec, load_cluster

if TYPE_CHECKING:
    from paceline.reproduce.shared.request import Request

#: Instance type → its workers in cluster B; then table II: seconds blocked, samples a second, tuned batch.
KINDS = {"g2.2xlarge": (0, 1), "p2.xlarge": (2, 3), "g3.4xlarge": (4, 5, 6, 7)}
TABLE_2 = {"g2.2xlarge": (0.0, 429.0, 512.0), "p2.xlarge": (0.62, 628.0, 901.0), "g3.4xlarge": (0.82, 917.0, 1264.0)}
BATCHES = (128, 256, 512, 1000, 1500, 2000, 2500)
AS_LONG = {"p2.xlarge": 1500.0, "g3.4xlarge": 2200.0}  # the text to figure 5: as long as g2.2xlarge with 1000


def fig5(ask: Request) -> Figure:
    """Iteration time against batch size."""
    add = partial(row, "fig5")
    spec = load_cluster("r2sp-b")
    seconds = {kind: [_alone(spec, kind, batch) for batch in BATCHES] for kind in KINDS}
    rows: list[Row] = []
    for kind in KINDS:
        note = DRAWN
        if not rows:
            note += (
                " Ours follows from the speeds and overheads that table II was fitted with; what is shown is the line."
            )
        rows.append(add(f"{kind}: iteration with 1000 samples", None, seconds[kind][BATCHES.index(1000)], "s", note))
    for kind, batch in AS_LONG.items():
        rows.append(
            add(
                f"{kind}: samples for which it takes as long as g2.2xlarge for 1000",
                batch,
                _batch_for(seconds["g2.2xlarge"][BATCHES.index(1000)], seconds[kind]),
                "samples",
                "The paper says “around”.",
            )
        )
    off = max(_off_line(times) for times in seconds.values())
    rows.append(add("departure from a straight line, at most", "linear", round(100 * off, 6), "%", "By construction."))
    lines = tuple(PlotLine(kind, BATCHES, tuple(times)) for kind, times in seconds.items())
    plot = Plot("ResNet32, one worker alone", "batch size", "seconds an iteration", lines)
    missing = ("Figure 5b, Inception-v3: the paper gives no speed of these instances for it.",)
    return Figure("fig5", "Iteration time against batch size", tuple(rows), (plot,), missing)


def table2(ask: Request) -> Figure:
    """Batch-size tuning."""
    add = partial(row, "table2")
    spec = load_cluster("r2sp-b")
    plain, tuned = (report(spec, policy, 80) for policy in ("r2sp", "r2sp:tune_batches=true"))
    fitted = "The cluster's overheads were fitted to these blocking times."
    rows: list[Row] = []
    for kind, workers in KINDS.items():
        blocked, speed, batch = TABLE_2[kind]
        before, after = (mean(each.blocking_by_worker[worker] for worker in workers) for each in (plain, tuned))
        rows += [
            add(f"{kind}: blocked, without tuning", blocked, before, "s", fitted if not rows else ""),
            add(f"{kind}: speed", speed, spec.workers[workers[0]].samples_per_second, "samples/s", "Taken from there."),
            add(f"{kind}: tuned batch", batch, mean(tuned.batch_sizes[worker] for worker in workers), "samples"),
            add(f"{kind}: blocked, with tuning", "eliminated", after, "s"),
        ]
    gain = tuned.samples_per_second / plain.samples_per_second
    note = "Added by us: samples that change the model in a second, by those without tuning."
    rows.append(add("samples a second, with tuning", None, gain, "× without", note))
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
        Plot("Blocked in an iteration", "", "seconds", lines, "bars"),
        Plot("Tuned batches", "", "samples", batches, "bars"),
    )
    return Figure("table2", "Batch-size tuning on cluster B, ResNet32", tuple(rows), plots)


def _alone(spec: ClusterSpec, kind: str, batch: int) -> float:
    worker = replace(spec.workers[KINDS[kind][0]], batch=batch)
    return report(replace(spec, workers=(worker,)), "asp", 8).mean_iteration_seconds


def _batch_for(seconds: float, times: list[float]) -> float:
    """Where the line through the first and the last point comes to so many seconds."""
    slope = (times[-1] - times[0]) / (BATCHES[-1] - BATCHES[0])
    return BATCHES[0] + (seconds - times[0]) / slope


def _off_line(times: list[float]) -> float:
    """How far the points are from the line through the first and the last, by their height."""
    slope = (times[-1] - times[0]) / (BATCHES[-1] - BATCHES[0])
    return max(
        abs(time - times[0] - slope * (batch - BATCHES[0])) / time for batch, time in zip(BATCHES, times, strict=True)
    )
