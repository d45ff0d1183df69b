"""Contention on the server's link: push and pull times (tables II and V), and the uplink over time (fig. 17)."""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise
from statistics import mean

from paceline.reproduce.fl_r2sp.schemes import BSP, FL, MODELS, rounds
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Row
from paceline.reproduce.shared.simulated import PLOTTED, TransferWatcher, row, watched
from paceline.simulate import load_cluster

#: Seconds with contention, seconds without, and the ratio of the two.
TABLE_2 = {"CNN": (1.02, 0.03, 34.0), "LSTM": (0.43, 0.03, 14.3), "ResNet20": (1.98, 0.13, 15.2)}
#: BSP's push and pull, FL-R²SP's push and pull, and by how many per cent the latter's sum is shorter.
TABLE_5 = {
    "CNN": ((0.38, 2.73), (0.34, 0.38), 76.5),
    "LSTM": ((0.36, 2.12), (0.34, 0.36), 71.7),
    "ResNet20": ((1.19, 13.28), (0.47, 1.50), 86.3),
}


def table2(request: Request) -> Figure:
    """Compare a client's transfers under BSP with those of a client that has the server to itself."""
    make_row = partial(row, "table2")
    rows: list[Row] = []
    note = "Under BSP. The paper's tables II and V disagree without explanation; our rates are fitted to table V."
    for model, (contended, alone, ratio) in TABLE_2.items():
        spec = load_cluster(f"fl-{MODELS[model]}")
        both, one = _transfers(spec.name, BSP, request.quick), 2 * spec.model_bytes / spec.workers[0].link
        rows += [
            make_row(f"{model}: push and pull, 128 clients", contended, sum(both), "s", note if not rows else ""),
            make_row(f"{model}: push and pull, one client", alone, one, "s"),
            make_row(f"{model}: slowdown", ratio, sum(both) / one, "×"),
        ]
    return Figure("table2", "The cost of contention on the server's link", tuple(rows))


def table5(request: Request) -> Figure:
    """Compare push and pull times. The server's rates are calibrated so that BSP's times match the paper's."""
    make_row = partial(row, "table5")
    rows: list[Row] = []
    lines = []
    fitted = "The server's rates were fitted to BSP's push and pull."
    for model, (bsp, fl, saved) in TABLE_5.items():
        ours = [_transfers(f"fl-{MODELS[model]}", policy, request.quick) for policy in (BSP, FL)]
        for scheme, paper, (push, pull) in zip(("BSP", "FL-R²SP"), (bsp, fl), ours, strict=True):
            rows += [
                make_row(f"{model}, {scheme}: push", paper[0], push, "s", fitted if not rows else ""),
                make_row(f"{model}, {scheme}: pull", paper[1], pull, "s"),
            ]
            lines.append(PlotLine(f"{model}, {scheme}", ("push", "pull"), (push, pull)))
        for what, papers_saved, parts in (
            ("push and pull", saved, [sum(each) for each in ours]),
            ("pull", round(100 * (1 - fl[1] / bsp[1]), 1), [each[1] for each in ours]),
        ):
            ours_saved = 100 * (1 - parts[1] / parts[0])
            rows.append(make_row(f"{model}: {what}, time saved over BSP", papers_saved, ours_saved, "%"))
    plot = Plot("Transfer times of a round", "", "seconds", tuple(lines), "bars")
    return Figure("table5", "Time to push and pull, 128 clients", tuple(rows), (plot,))


def fig17(request: Request) -> Figure:
    """Compare the load on the server's uplink, at the rates that the paper states."""
    make_row = partial(row, "fig17")
    rows, plots = [], []
    for model, name in MODELS.items():
        watches = [watched(load_cluster(f"fl-{name}-literal"), policy, rounds(request.quick)) for policy in (BSP, FL)]
        peaks = [_peak(watch, 0.1) for watch in watches]
        paper, note = (round(1 / 3, 2), "The paper says “around a third”.") if model == "ResNet20" else (None, PLOTTED)
        rows.append(make_row(f"{model}: peak of FL-R²SP relative to BSP", paper, peaks[1] / peaks[0], "×", note))
        rows += [
            make_row(f"{model}, {scheme}: peak over 0.1 s", None, 10 * peak, "Gbit/s")
            for scheme, peak in zip(("BSP", "FL-R²SP"), peaks, strict=True)
        ]
        if model == "ResNet20":
            lines = [_uplink(scheme, watch) for scheme, watch in zip(("BSP", "FL-R²SP"), watches, strict=True)]
            plots.append(Plot("ResNet20: the server's uplink", "seconds", "Gbit/s", tuple(lines), "steps"))
    return Figure("fig17", "The server's uplink over time", tuple(rows), tuple(plots))


@cache
def _transfers(cluster: str, policy: str, quick: bool) -> tuple[float, float]:
    """Return the mean seconds of a push and of a pull."""
    watch = watched(load_cluster(cluster), policy, rounds(quick))
    return mean(each.seconds for each in watch.settled("in")), mean(each.seconds for each in watch.settled("out"))


def _peak(watch: TransferWatcher, seconds: float) -> float:
    """Return the largest share of the uplink that was in use, averaged over a window of that many seconds."""
    begin_of_settled = watch.warm_up_end
    steps = [(begin, end, share) for (begin, share), (end, _) in pairwise(watch.uses["out"]) if end >= begin_of_settled]
    best, area, first = 0.0, 0.0, 0
    for begin, end, share in steps:
        area += share * (end - begin)
        while end - steps[first][1] >= seconds:
            area -= steps[first][2] * (steps[first][1] - steps[first][0])
            first += 1
        best = max(best, area / max(seconds, end - steps[first][0]))
    return best


def _uplink(name: str, watch: TransferWatcher, duration: float = 80.0) -> PlotLine:
    begin = watch.warm_up_end
    shown = [(time - begin, 10 * share) for time, share in watch.uses["out"] if begin <= time <= begin + duration]
    return PlotLine(name, tuple(time for time, _ in shown), tuple(share for _, share in shown))
