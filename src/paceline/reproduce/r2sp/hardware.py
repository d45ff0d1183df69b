"""How long an iteration takes under each scheme (R²SP paper: figures 7a, 11 and 12)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Row
from paceline.reproduce.shared.simulated import DRAWN, JITTER, MODELS, SCHEMES, iterations, report, row, throttled
from paceline.simulate import ClusterSpec, load_cluster

if TYPE_CHECKING:
    from paceline.reproduce.shared.request import Request

ADDED = {
    "DSSP": "dssp",
    "R²SP, 3 groups": "r2sp:groups=3",
    "R²SP, 4 groups": "r2sp:groups=4",
    "BSP, pipelined": "bsp:pipeline=true",
}
#: What is to be said where a thing shows first.
NOTES = {
    (
        "ResNet32",
        "ASP",
    ): f"{DRAWN} Whoever is bound to nothing begins in lockstep and leaves it slowly: where the network "
    "counts, ASP, SSP and DSSP get quicker the longer they run.",
    (
        "AlexNet",
        "R²SP",
    ): "The text says “around 30%”, and the introduction that iterations take 30% less. Ours gain more: "
    "the fitted links put all of BSP's communication time down to the links, and R²SP keeps them full.",
}
JITTERS = (0.0, JITTER, 0.2)
INTENSIVE = ("AlexNet", "VGG16")  # as the paper calls them
GBIT = (80, 40, 20, 10, 5, 2, 1)  # of the paper's 10: what is drawn; rows are of what is not quicker than that
RELAX = (0.01, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def fig7a(ask: Request) -> Figure:
    """Hardware efficiency: iteration times by BSP's."""
    add = partial(row, "fig7a")
    rows: list[Row] = []
    for model in MODELS:
        for jitter in JITTERS if model == "VGG16" else (JITTER,):
            seconds = _seconds(ask, model, jitter)
            under = f"{model}, jitter {jitter:.0%}"
            rows.append(add(f"{under}: BSP", 1.0, 1.0, "× BSP", f"By definition; ours is {seconds['BSP']:.3g} s."))
            for scheme in list(SCHEMES | ADDED)[1:]:
                paper = 0.7 if scheme == "R²SP" and model in INTENSIVE else None
                note = NOTES.get((model, scheme), "Added by us." if scheme in ADDED else "" if paper else DRAWN)
                rows.append(add(f"{under}: {scheme}", paper, seconds[scheme] / seconds["BSP"], "× BSP", note))
            quickest = min(SCHEMES, key=lambda scheme: seconds[scheme])
            note = "" if quickest == "R²SP" else _late(seconds["R²SP"] / seconds[quickest] - 1, quickest)
            rows.append(add(f"{under}: the quickest of the paper's four", "R²SP", quickest, "", note))
    plots = (_by_model(ask), _by_jitter(ask))
    return Figure("fig7a", "Hardware efficiency on cluster A", tuple(rows), plots)


def _late(behind: float, quickest: str) -> str:
    return (
        f"R²SP takes {behind:.1%} longer: where the links are not always full, its ring waits for whoever is late, and "
        f"{quickest} for nobody."
    )


def _seconds(ask: Request, model: str, jitter: float) -> dict[str, float]:
    spec = load_cluster(f"r2sp-a-{MODELS[model]}").with_jitter(jitter)
    return {
        scheme: report(spec, policy, iterations(scheme, ask.quick)).mean_iteration_seconds
        for scheme, policy in (SCHEMES | ADDED).items()
    }


def _by_model(ask: Request) -> Plot:
    found = {model: _seconds(ask, model, JITTER) for model in MODELS}
    lines = tuple(
        PlotLine(scheme, tuple(found), tuple(seconds[scheme] / seconds["BSP"] for seconds in found.values()))
        for scheme in SCHEMES | ADDED
    )
    return Plot(f"An iteration, jitter {JITTER:.0%}", "", "× BSP", lines, "bars")


def _by_jitter(ask: Request) -> Plot:
    found = {f"{jitter:.0%}": _seconds(ask, "VGG16", jitter) for jitter in JITTERS}
    lines = tuple(
        PlotLine(scheme, tuple(found), tuple(seconds[scheme] / seconds["BSP"] for seconds in found.values()))
        for scheme in SCHEMES | ADDED
    )
    return Plot("An iteration of VGG16", "jitter", "× BSP", lines, "bars")


def fig11(ask: Request) -> Figure:
    """R²SP's gain over BSP as links are throttled."""
    add = partial(row, "fig11")
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
            rate = "the fitted rate" if gbit == 10 else f"1/{10 // gbit} of it"
            note = f"{DRAWN} The arithmetic gives {expected[gbit]:.2f}."
            rows.append(add(f"{model}, {rate} ({gbit} Gbit/s there)", None, gains[gbit], "× as quick", note))
        grows = gains[1] > gains[10]
        rows.append(
            add(
                f"{model}: from there to a tenth of it, the gain",
                "grows",
                f"{'grows' if grows else 'falls'} from {gains[10]:.2f} to {gains[1]:.2f}",
                "",
                "" if grows else _why(fitted, gains),
            )
        )
        lines += [
            PlotLine(model, tuple(gains), tuple(gains.values())),
            PlotLine(f"{model}, by arithmetic", tuple(expected), tuple(expected.values())),
        ]
    plot = Plot("R²SP's gain over BSP", "Gbit/s, with the fitted rate as 10", "× as quick", tuple(lines), log=True)
    return Figure("fig11", "R²SP's gain over BSP on throttled links", tuple(rows), (plot,))


def gain(spec: ClusterSpec) -> float:
    """BSP's time over R²SP's: (c + 2X) / max(c + 2S/b, X), for c seconds of computing and X = N·S/(K·B).

    With one server whose link is like a worker's, S/b is X/N.
    """
    c, X, own = _config(spec)
    return (c + 2 * X) / max(c + 2 * own, X)


def _config(spec: ClusterSpec) -> tuple[float, float, float]:
    worker = spec.workers[0]
    X = len(spec.workers) * spec.model_bytes / (spec.servers * spec.server_link)
    return worker.compute_seconds(), X, spec.one_way(worker)


def _why(spec: ClusterSpec, gains: dict[float, float]) -> str:
    c, X, own = _config(spec)
    best = max(gains, key=lambda gbit: gains[gbit])
    return (
        f"(c + 2X) / max(c + 2S/b, X), with c = {c:.2g} s to compute, X = N·S/(K·B) = {X:.3g} s and S/b = {own:.2g} s: "
        f"it grows until X = c + 2S/b, is greatest there ({gains[best]:.2f} at {best} Gbit/s, of those drawn), and "
        "goes back towards 2 when all there is is the network. Already at the fitted rate the servers' links are never "
        "idle under R²SP."
    )


def fig12(ask: Request) -> Figure:
    """The relaxation factor."""
    add = partial(row, "fig12")
    count = 60 if ask.quick else 200
    rows: list[Row] = []
    quickness, waits = [], []
    for model, shared in (("VGG16", False), ("VGG16", True), ("Inception-v3", True)):
        spec = load_cluster(f"r2sp-a-{MODELS[model]}").with_jitter(JITTER)
        found = {relax: report(spec, f"r2sp:relax={relax}", count, shared=shared) for relax in RELAX}
        seconds = {relax: each.mean_iteration_seconds for relax, each in found.items()}
        blocked = {relax: each.blocking_seconds for relax, each in found.items()}
        under = f"{model}, links {'shared' if shared else 'handed on'}"
        papers = model == "VGG16"
        for relax in (0.01, 0.8, 1.0):
            note = DRAWN if papers else "Added by us."
            rows.append(add(f"{under}, relaxation {relax:g}: iteration", None, seconds[relax], "s", note))
            rows.append(add(f"{under}, relaxation {relax:g}: blocked", None, blocked[relax], "s", note))
        best = min(seconds, key=lambda relax: seconds[relax])
        flat = max(seconds.values()) <= 1.01 * seconds[best]
        sweet = "none: all alike" if flat else best
        note = _shared(seconds, best) if shared else _handed(flat)
        rows.append(add(f"{under}: the quickest relaxation", 0.8 if papers else None, sweet, "", note))
        quickness.append(PlotLine(under, RELAX, tuple(each / seconds[best] for each in seconds.values())))
        waits.append(PlotLine(under, RELAX, tuple(blocked.values())))
    plots = (
        Plot(f"An iteration, jitter {JITTER:.0%}", "relaxation", "× the quickest", tuple(quickness)),
        Plot(f"Blocked in an iteration, jitter {JITTER:.0%}", "relaxation", "seconds", tuple(waits)),
    )
    return Figure("fig12", "The relaxation factor, cluster A", tuple(rows), plots)


def _handed(flat: bool) -> str:
    return (
        "Here the servers' links are handed from one worker to the next, so that a smaller gap adds no contention"
        + ("; and they are always full, so no gap could make an iteration shorter." if flat else ".")
        + " Least is 0.01, since a relaxation of 0 would leave no gap."
    )


def _shared(seconds: dict[float, float], best: float) -> str:
    near = [relax for relax, each in seconds.items() if each <= 1.02 * seconds[best]]
    return (
        "As in the paper's prototype, transfers that overlap share the links, so that smaller gaps bring contention "
        f"back; within 2% of the quickest: {min(near):g} to {max(near):g}."
    )
