"""Iteration times under each scheme (R²SP paper: figures 7a, 11 and 12)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Row
from paceline.reproduce.shared.simulated import JITTER, MODELS, PLOTTED, SCHEMES, iterations, report, row, throttled
from paceline.simulate import ClusterSpec, load_cluster

if TYPE_CHECKING:
    from paceline.reproduce.shared.request import Request

ADDED = {
    "DSSP": "dssp",
    "R²SP, 3 groups": "r2sp:groups=3",
    "R²SP, 4 groups": "r2sp:groups=4",
    "BSP, pipelined": "bsp:pipeline=true",
}
ASP_NOTE = (
    f"{PLOTTED} Under ASP, SSP and DSSP, workers begin in lockstep and drift apart slowly. Where the network is the "
    "bottleneck, these schemes become faster the longer they run."
)
R2SP_NOTE = (
    "The text says “around 30%”, which is 30% less time. Ours gain more, because the "
    "fitted links attribute all of BSP's communication time to the links, and R²SP keeps them full."
)
#: Explanations, each at the first row that needs it.
NOTES = {("ResNet32", "ASP"): ASP_NOTE, ("AlexNet", "R²SP"): R2SP_NOTE}
JITTERS = (0.0, JITTER, 0.2)
INTENSIVE = ("AlexNet", "VGG16")  # the paper calls these communication-intensive
GBIT = (80, 40, 20, 10, 5, 2, 1)  # all are drawn; rows show the paper's 10 Gbit/s and below
RELAX = (0.01, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def fig7a(request: Request) -> Figure:
    """Compare hardware efficiency: iteration times relative to BSP's."""
    make_row = partial(row, "fig7a")
    rows: list[Row] = []
    for model in MODELS:
        for jitter in JITTERS if model == "VGG16" else (JITTER,):
            seconds = _seconds(request, model, jitter)
            under = f"{model}, jitter {jitter:.0%}"
            rows.append(
                make_row(f"{under}: BSP", 1.0, 1.0, "× BSP", f"By definition; our BSP takes {seconds['BSP']:.3g} s.")
            )
            for scheme in list(SCHEMES | ADDED)[1:]:
                paper = 0.7 if scheme == "R²SP" and model in INTENSIVE else None
                note = NOTES.get((model, scheme), "Added by us." if scheme in ADDED else "" if paper else PLOTTED)
                rows.append(make_row(f"{under}: {scheme}", paper, seconds[scheme] / seconds["BSP"], "× BSP", note))
            fastest = min(SCHEMES, key=lambda scheme: seconds[scheme])
            note = "" if fastest == "R²SP" else _explain_late_ring(seconds["R²SP"] / seconds[fastest] - 1, fastest)
            rows.append(make_row(f"{under}: the fastest of the paper's four", "R²SP", fastest, "", note))
    plots = (_by_model(request), _by_jitter(request))
    return Figure("fig7a", "Hardware efficiency on cluster A", tuple(rows), plots)


def _explain_late_ring(behind: float, fastest: str) -> str:
    return (
        f"R²SP takes {behind:.1%} longer. Where the links are not always full, its ring waits for late workers, and "
        f"{fastest} does not."
    )


def _seconds(request: Request, model: str, jitter: float) -> dict[str, float]:
    spec = load_cluster(f"r2sp-a-{MODELS[model]}").with_jitter(jitter)
    return {
        scheme: report(spec, policy, iterations(scheme, request.quick)).mean_iteration_seconds
        for scheme, policy in (SCHEMES | ADDED).items()
    }


def _by_model(request: Request) -> Plot:
    found = {model: _seconds(request, model, JITTER) for model in MODELS}
    lines = tuple(
        PlotLine(scheme, tuple(found), tuple(seconds[scheme] / seconds["BSP"] for seconds in found.values()))
        for scheme in SCHEMES | ADDED
    )
    return Plot(f"Iteration time, jitter {JITTER:.0%}", "", "× BSP", lines, "bars")


def _by_jitter(request: Request) -> Plot:
    found = {f"{jitter:.0%}": _seconds(request, "VGG16", jitter) for jitter in JITTERS}
    lines = tuple(
        PlotLine(scheme, tuple(found), tuple(seconds[scheme] / seconds["BSP"] for seconds in found.values()))
        for scheme in SCHEMES | ADDED
    )
    return Plot("Iteration time of VGG16", "jitter", "× BSP", lines, "bars")


def fig11(request: Request) -> Figure:
    """Compare R²SP's speed-up over BSP as the links are throttled."""
    make_row = partial(row, "fig11")
    rows: list[Row] = []
    lines = []
    for model in INTENSIVE:
        fitted = load_cluster(f"r2sp-a-{MODELS[model]}")
        gains: dict[float, float] = {}
        expected: dict[float, float] = {}
        for gbit in GBIT:
            spec = throttled(fitted, gbit / 10)
            bsp, r2sp = (
                report(spec, policy, count).mean_iteration_seconds for policy, count in (("bsp", 12), ("r2sp", 24))
            )
            gains[gbit], expected[gbit] = bsp / r2sp, gain(spec)
        for gbit in (each for each in GBIT if each <= 10):
            rate = "the fitted rate" if gbit == 10 else f"1/{10 // gbit} of the fitted rate"
            note = f"{PLOTTED} The formula gives {expected[gbit]:.2f}."
            rows.append(make_row(f"{model}, {rate} ({gbit} Gbit/s in the paper)", None, gains[gbit], "× as fast", note))
        grows = gains[1] > gains[10]
        rows.append(
            make_row(
                f"{model}: the speed-up from the fitted rate to a tenth of it",
                "grows",
                f"{'grows' if grows else 'falls'} from {gains[10]:.2f} to {gains[1]:.2f}",
                "",
                "" if grows else _explain_fall(fitted, gains),
            )
        )
        lines += [
            PlotLine(model, tuple(gains), tuple(gains.values())),
            PlotLine(f"{model}, by formula", tuple(expected), tuple(expected.values())),
        ]
    plot = Plot("R²SP's speed-up over BSP", "Gbit/s, with the fitted rate as 10", "× as fast", tuple(lines), log=True)
    return Figure("fig11", "R²SP's speed-up over BSP on throttled links", tuple(rows), (plot,))


def gain(spec: ClusterSpec) -> float:
    """Return BSP's time over R²SP's: (c + 2X) / max(c + 2S/b, X), for c seconds of compute and X = N·S/(K·B).

    With one server whose link is as fast as a worker's, S/b is X/N.
    """
    c, X, own = _quantities(spec)
    return (c + 2 * X) / max(c + 2 * own, X)


def _quantities(spec: ClusterSpec) -> tuple[float, float, float]:
    """Return c, X and S/b: see `gain`."""
    worker = spec.workers[0]
    X = len(spec.workers) * spec.model_bytes / (spec.servers * spec.server_link)
    return worker.compute_seconds(), X, spec.one_way(worker)


def _explain_fall(spec: ClusterSpec, gains: dict[float, float]) -> str:
    """Explain why the speed-up falls as the links become slower."""
    c, X, own = _quantities(spec)
    best = max(gains, key=lambda gbit: gains[gbit])
    return (
        f"The speed-up is (c + 2X) / max(c + 2S/b, X), with c = {c:.2g} s of compute, X = N·S/(K·B) = {X:.3g} s and "
        f"S/b = {own:.2g} s. It grows until X = c + 2S/b (the largest one drawn is {gains[best]:.2f}, at {best} "
        "Gbit/s), and then falls towards 2 as the network takes all of the time. Under R²SP the servers' links are "
        "never idle even at the fitted rate."
    )


def fig12(request: Request) -> Figure:
    """Compare iteration and blocking times over the relaxation factor."""
    make_row = partial(row, "fig12")
    count = 60 if request.quick else 200
    rows: list[Row] = []
    times, waits = [], []
    for model, shared in (("VGG16", False), ("VGG16", True), ("Inception-v3", True)):
        spec = load_cluster(f"r2sp-a-{MODELS[model]}").with_jitter(JITTER)
        found = {relax: report(spec, f"r2sp:relax={relax}", count, shared=shared) for relax in RELAX}
        seconds = {relax: each.mean_iteration_seconds for relax, each in found.items()}
        blocked = {relax: each.blocking_seconds for relax, each in found.items()}
        under = f"{model}, links {'shared' if shared else 'handed on'}"
        in_paper = model == "VGG16"
        for relax in (0.01, 0.8, 1.0):
            note = PLOTTED if in_paper else "Added by us."
            rows.append(make_row(f"{under}, relaxation {relax:g}: iteration", None, seconds[relax], "s", note))
            rows.append(make_row(f"{under}, relaxation {relax:g}: blocked", None, blocked[relax], "s", note))
        best = min(seconds, key=lambda relax: seconds[relax])
        flat = max(seconds.values()) <= 1.01 * seconds[best]
        fastest = "none: all alike" if flat else best
        note = _explain_shared(seconds, best) if shared else _explain_handed_on(flat)
        rows.append(make_row(f"{under}: the fastest relaxation", 0.8 if in_paper else None, fastest, "", note))
        times.append(PlotLine(under, RELAX, tuple(each / seconds[best] for each in seconds.values())))
        waits.append(PlotLine(under, RELAX, tuple(blocked.values())))
    plots = (
        Plot(f"Iteration time, jitter {JITTER:.0%}", "relaxation", "× the fastest", tuple(times)),
        Plot(f"Blocked per iteration, jitter {JITTER:.0%}", "relaxation", "seconds", tuple(waits)),
    )
    return Figure("fig12", "The relaxation factor, cluster A", tuple(rows), plots)


def _explain_handed_on(flat: bool) -> str:
    return (
        "The servers' links are handed from one worker to the next, so a smaller gap adds no contention."
        + (" The links are always full, so no gap could shorten an iteration." if flat else "")
        + " The smallest value is 0.01, because a relaxation of 0 would leave no gap."
    )


def _explain_shared(seconds: dict[float, float], best: float) -> str:
    near = [relax for relax, each in seconds.items() if each <= 1.02 * seconds[best]]
    return (
        "As in the paper's prototype, overlapping transfers share the links, so smaller gaps bring contention back. "
        f"Within 2% of the fastest: {min(near):g} to {max(near):g}."
    )
