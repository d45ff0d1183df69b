"""Contention on the servers' links (R²SP paper: table I, and figures 1, 2, 8 and 9).

Pushes come in through the servers' downlink; pulls go out through their uplink.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING

from paceline.observe.summary import Summary
from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Row
from paceline.reproduce.shared.simulated import (
    JITTER,
    MODELS,
    PLOTTED,
    SCHEMES,
    TransferWatcher,
    iterations,
    report,
    row,
    share,
    watched,
)
from paceline.simulate import ClusterSpec, load_cluster
from paceline.simulate.network import Direction

if TYPE_CHECKING:
    from paceline.reproduce.shared.request import Request

#: Table I: seconds blocked by communication, seconds of an iteration, and the ratio of the two in per cent.
TABLE_1 = {
    "ResNet32": (0.11, 0.23, 47.8),
    "AlexNet": (2.89, 3.39, 85.2),
    "VGG16": (9.04, 9.74, 92.8),
    "Inception-v3": (1.27, 1.97, 64.5),
}
#: Figure 8: the share of gaps that are zero.
ZERO_GAPS: dict[str, float | str] = {"BSP": 15 / 16, "ASP": 0.75, "SSP(5)": 0.83, "R²SP": "almost none"}
WINDOW = 40.0  # seconds that figure 1 shows
COARSE = 0.01  # a gap below this share of an iteration counts as small
RESOLUTION = (
    "A gap is the time between the arrivals of two complete pushes. The paper does not say which gaps it counts as "
    "zero. Here a row counts gaps below one microsecond, and the next row gaps below 1% of an iteration."
)
WAYS: tuple[tuple[Direction, str], ...] = (("in", "downlink"), ("out", "uplink"))


def table1(request: Request) -> Figure:
    """Measure the share of an iteration that BSP spends on communication."""
    make_row = partial(row, "table1")
    rows: list[Row] = []
    ours: dict[str, tuple[float, float, float]] = {}
    fitted = "The links' rate was fitted to this table, so these rows check the fit and are no evidence."
    for model, (blocked, iteration, overhead) in TABLE_1.items():
        bsp = report(load_cluster(f"r2sp-table1-{MODELS[model]}"), "bsp", 12)
        blocked_seconds, seconds = bsp.communication_seconds + bsp.blocking_seconds, bsp.mean_iteration_seconds
        ours[model] = (blocked_seconds, seconds, 100 * blocked_seconds / seconds)
        rows += [
            make_row(f"{model}: blocked by communication", blocked, blocked_seconds, "s", fitted if not rows else ""),
            make_row(f"{model}: iteration", iteration, seconds, "s"),
            make_row(f"{model}: communication overhead", overhead, ours[model][2], "%"),
        ]
    lines = tuple(
        PlotLine(f"{what}, {whose}", tuple(table), tuple(values[at] for values in table.values()))
        for at, what in enumerate(("blocked", "iteration"))
        for whose, table in (("paper", TABLE_1), ("ours", ours))
    )
    plot = Plot("Under BSP, 8 workers and 2 servers", "", "seconds", lines, "bars")
    return Figure("table1", "Communication under BSP", tuple(rows), (plot,))


def fig1(request: Request) -> Figure:
    """Show the utilization of the servers' links under BSP."""
    make_row = partial(row, "fig1")
    spec = load_cluster("r2sp-table1-vgg16")
    watch = watched(spec, "bsp", 12)
    rows = [
        make_row(
            f"{name}: a worker's share while it transfers",
            1 / 8,
            mean(_rates(spec, watch, way)) / (spec.servers * spec.server_link),
            "of the links",
        )
        for way, name in WAYS
    ]
    rows += [
        make_row(f"{name}: idle", "more than 50", 100 * watch.idle(way), "% of the time", note)
        for (way, name), note in zip(
            WAYS,
            ("Each direction is idle during compute, and while all transfers use the other direction.", ""),
            strict=True,
        )
    ]
    plots = tuple(
        Plot(
            f"The servers' {name}",
            "seconds",
            "share in use",
            (_use(watch, way), _own(spec, watch, way, 1), _own(spec, watch, way, 2)),
            "steps",
        )
        for way, name in WAYS
    )
    return Figure("fig1", "Bandwidth of the servers' links, VGG16 under BSP", tuple(rows), plots)


def fig2(request: Request) -> Figure:
    """Measure what one worker gains when the seven others are switched off."""
    make_row = partial(row, "fig2")
    gains: dict[str, float] = {}
    rows = []
    for model, name in MODELS.items():
        spec = load_cluster(f"r2sp-table1-{name}")
        together, alone = (
            report(each, "bsp", 12).mean_iteration_seconds for each in (spec, replace(spec, workers=spec.workers[:1]))
        )
        gains[model] = 100 * (1 - alone / together)
        note = PLOTTED + f" {together:.3g} s with eight workers, {alone:.3g} s with one."
        rows.append(make_row(f"{model}: iteration time saved", None, gains[model], "%", note))
    low, high = min(gains.values()), max(gains.values())
    note = (
        "The paper's per cent are time saved (docs/reproduce.md). As a speed-up, our runs gain "
        f"{100 * low / (100 - low):.0f} to {100 * high / (100 - high):.0f}%. Ours save more, because the fitted links "
        "attribute all of the communication time to sharing, and a single worker does not share them."
    )
    rows.append(make_row("range over the four models", "25 to 60", f"{low:.0f} to {high:.0f}", "%", note))
    plot = Plot(
        "One worker instead of eight", "", "% of the iteration saved", (PlotLine("ours", *_points(gains)),), "bars"
    )
    return Figure("fig2", "Iterations without contention", tuple(rows), (plot,))


def fig8(request: Request) -> Figure:
    """Compare the gaps between updates under each scheme."""
    make_row = partial(row, "fig8")
    rows: list[Row] = []
    plots = []
    for jitter in (0.0, JITTER):
        lines = []
        for scheme, policy in SCHEMES.items():
            gaps = _watch(request, scheme, policy, jitter).gaps
            iteration = 16 * mean(gaps)
            under, paper = f"{scheme}, jitter {jitter:.0%}", ZERO_GAPS[scheme]
            exact, coarse = share(gaps, 0, Summary.TOGETHER), share(gaps, 0, COARSE * iteration)
            note = RESOLUTION if scheme == "BSP" and not jitter else ""
            rows.append(make_row(f"{under}: gaps of 0", paper, exact, "of all gaps", note))
            note = _drift(paper, gaps) if isinstance(paper, float) and scheme != "BSP" else ""
            rows.append(make_row(f"{under}: gaps below 1% of an iteration", paper, coarse, "of all gaps", note))
            if scheme == "BSP":
                note = (
                    "" if jitter else "The paper says about 8 s, a whole iteration. Our iteration is fitted to table I."
                )
                rows.append(make_row(f"{under}: the longest gap", 8.0, max(gaps), "s", note))
            if scheme == "R²SP":
                near = share(gaps, 0.9 * iteration / 16, 1.1 * iteration / 16)
                rows.append(make_row(f"{under}: gaps of 1/16 of an iteration, ±10%", "almost all", near, "of all gaps"))
            lines.append(_distribution(scheme, gaps))
        plots.append(Plot(f"VGG16, jitter {jitter:.0%}", "seconds between updates", "share", tuple(lines), "steps"))
    return Figure("fig8", "Gaps between updates, VGG16", tuple(rows), tuple(plots))


def fig9(request: Request) -> Figure:
    """Compare the bandwidth that a worker has during its own transfers."""
    make_row = partial(row, "fig9")
    spec = load_cluster("r2sp-a-vgg16")
    rows: list[Row] = []
    lines = []
    for way, name in reversed(WAYS):
        rates = {
            scheme: mean(_rates(spec, _watch(request, scheme, policy, JITTER), way))
            for scheme, policy in SCHEMES.items()
        }
        for scheme, rate in rates.items():
            note = PLOTTED if scheme != "BSP" else f"By definition; BSP has {rate / 1e6:.0f} MB/s."
            if scheme == "R²SP":
                note += " Time spent waiting for the link does not count. At 4 × BSP a worker's own link is full."
            paper = 1.0 if scheme == "BSP" else None
            rows.append(make_row(f"{name}, {scheme}", paper, rate / rates["BSP"], "× BSP", note))
        lines.append(PlotLine(name, *_points({scheme: rate / rates["BSP"] for scheme, rate in rates.items()})))
    plot = Plot("A worker's bandwidth during its transfers, VGG16", "", "× BSP", tuple(lines), "bars")
    return Figure("fig9", "Bandwidth of a worker during its transfers, VGG16", tuple(rows), (plot,))


def _watch(request: Request, scheme: str, policy: str, jitter: float) -> TransferWatcher:
    return watched(load_cluster("r2sp-a-vgg16").with_jitter(jitter), policy, iterations(scheme, request.quick))


def _drift(paper: float, gaps: Sequence[float]) -> str:
    within = sorted(gaps)[round(paper * (len(gaps) - 1))]
    return f"Our workers begin in lockstep and drift apart: {paper:.0%} of the gaps are below {within:.2g} s."


def _rates(spec: ClusterSpec, watch: TransferWatcher, way: Direction) -> list[float]:
    """Return the bytes per second of each transfer after the warm-up."""
    return [spec.model_bytes / each.seconds for each in watch.settled(way)]


def _use(watch: TransferWatcher, way: Direction) -> PlotLine:
    """Return the line of all workers together, from the end of the warm-up on."""
    since = watch.warm_up_end
    before = [use for time, use in watch.uses[way] if time <= since]
    within = [(time - since, use) for time, use in watch.uses[way] if since < time <= since + WINDOW]
    return _steps("all workers", before[-1], within)


def _own(spec: ClusterSpec, watch: TransferWatcher, way: Direction, number: int) -> PlotLine:
    """Return the line of one worker: its mean rate during each transfer. Numbers begin at 1, as in the paper."""
    links = spec.servers * spec.server_link
    within: list[tuple[float, float]] = []
    for each in watch.settled(way):
        if each.worker == number - 1 and each.began <= watch.warm_up_end + WINDOW:
            within += [
                (each.began - watch.warm_up_end, spec.model_bytes / each.seconds / links),
                (min(each.ended - watch.warm_up_end, WINDOW), 0.0),
            ]
    return _steps(f"worker {number}", 0.0, within)


def _steps(name: str, first: float, then: Sequence[tuple[float, float]]) -> PlotLine:
    points = [(0.0, first), *then, (WINDOW, then[-1][1] if then else first)]
    return PlotLine(name, tuple(x for x, _ in points), tuple(y for _, y in points))


def _distribution(name: str, values: Sequence[float], max_points: int = 200) -> PlotLine:
    """Return the cumulative distribution of the values, with at most `max_points` points."""
    ordered = sorted(values)
    last = len(ordered) - 1
    at = sorted({round(last * i / max_points) for i in range(max_points + 1)})
    points = {ordered[i]: (i + 1) / len(ordered) for i in at}  # of equal values, the last one counts
    return PlotLine(name, (0.0, *points), (0.0, *points.values()))


def _points(values: dict[str, float]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    return tuple(values), tuple(values.values())
