"""The parts of a round (fig. 16), and how group size (fig. 18) and the fraction C change its length."""

from __future__ import annotations

from functools import cache, partial

from paceline.policies import make
from paceline.reproduce.fl_r2sp.schemes import BSP, CLIENTS, FL, MODELS, rounds
from paceline.reproduce.shared.phases import Phases, Span
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Plot, PlotLine
from paceline.reproduce.shared.simulated import PLOTTED, report, row
from paceline.simulate import Cluster, load_cluster

SIZES = (2, 4, 8, 16, 32, 64)
NO_FEDSCALE = "The appendix's experiments on the FedScale benchmark were not run, because its data is not available."
FRACTIONS = (0.25, 0.5, 0.75, 0.9, 1.0)


def fig16(request: Request) -> Figure:
    """Show when each client trains, pushes, waits and pulls."""
    make_row = partial(row, "fig16")
    rows, plots = [], []
    for scheme, policy in (("BSP", BSP), ("FL-R²SP", FL)):
        spans, since, until = _phases("fl-cnn", policy, 8)
        shares = {
            phase: sum(max(0.0, min(each.end, until) - max(each.begin, since)) for each in spans if each.phase == phase)
            for phase in ("train", "push", "wait", "pull")
        }
        total = sum(shares.values())
        rows += [
            make_row(f"CNN, {scheme}: {phase}", None, 100 * share / total, "% of the time", PLOTTED)
            for phase, share in shares.items()
        ]
        lines = [
            PlotLine(
                phase,
                tuple(at for each in shown for at in (max(each.begin, since), min(each.end, until))),
                tuple(float(_place(each.client)) for each in shown for _ in range(2)),
            )
            for phase in shares
            if (shown := [each for each in spans if each.phase == phase and each.end > since and each.begin < until])
        ]
        plots.append(
            Plot(f"CNN, {scheme}: two rounds of 128 clients", "seconds", "client, by group", tuple(lines), "spans")
        )
    return Figure("fig16", "Phases of all clients", tuple(rows), tuple(plots))


def fig18(request: Request) -> Figure:
    """Compare round times over the size of a group."""
    make_row = partial(row, "fig18")
    rows, lines = [], []
    for model, name in MODELS.items():
        seconds = {}
        for size in SIZES:
            policy = f"fl-r2sp:groups={CLIENTS // size},filter=false"
            seconds[size] = _round_seconds(f"fl-{name}", policy, request.quick)
        best = min(seconds, key=seconds.__getitem__)
        rows += [
            make_row(f"{model}: groups of {size}", None, each, "s per round", PLOTTED) for size, each in seconds.items()
        ]
        rows.append(make_row(f"{model}: best size", 32, best, "clients"))
        one_of_two = f"fl-r2sp:groups={CLIENTS // 2},fraction=0.5,filter=false"
        dropping = _round_seconds(f"fl-{name}", one_of_two, request.quick)
        note = "Added by us."
        rows.append(make_row(f"{model}: groups of 2 that drop a straggler", None, dropping, "s per round", note))
        sizes = tuple(float(size) for size in SIZES)
        lines.append(PlotLine(model, sizes, tuple(each / seconds[best] for each in seconds.values())))
    plot = Plot("Round time by group size", "clients in a group", "× the best", tuple(lines), log=True)
    return Figure("fig18", "Group size", tuple(rows), (plot,))


def fractions(request: Request) -> Figure:
    """Compare round times over C, the fraction of its clients that a group waits for (in the paper's appendix)."""
    make_row = partial(row, "fractions")
    rows, points = [], []
    note = "The paper's value is in its appendix."
    for fraction in FRACTIONS:
        policy = f"fl-r2sp:fraction={fraction:g},filter=false"
        seconds = _round_seconds("fl-cnn", policy, request.quick)
        points.append(seconds)
        rows.append(make_row(f"CNN: C = {fraction:g}, round time", None, seconds, "s", note))
        applied = _applied_per_second(policy, request.quick)
        rows.append(make_row(f"CNN: C = {fraction:g}, applied updates", None, applied, "per second"))
    line = PlotLine("CNN", FRACTIONS, tuple(points))
    plot = Plot("The fraction that a group waits for", "C", "seconds per round", (line,))
    return Figure("fractions", "The fraction C", tuple(rows), (plot,), (NO_FEDSCALE,))


def _round_seconds(cluster: str, policy: str, quick: bool) -> float:
    return report(load_cluster(cluster), policy, rounds(quick)).mean_iteration_seconds


@cache
def _applied_per_second(policy: str, quick: bool) -> float:
    """Return the updates that change the CNN per second."""
    spec = load_cluster("fl-cnn")
    found = report(spec, policy, rounds(quick))
    return found.samples_per_second / spec.workers[0].batch


@cache
def _phases(cluster: str, policy: str, rounds: int) -> tuple[tuple[Span, ...], float, float]:
    """Return all phases of a run, and the begin and the end of a window of two rounds within it."""
    watch = Phases()
    run = Cluster(load_cluster(cluster), make(policy), rounds, 0, observer=watch).run()
    until = 0.9 * run.simulated_seconds
    return tuple(watch.spans), until - 2 * run.report.mean_iteration_seconds, until


def _place(client: int, groups: int = 8) -> int:
    """Return the row in which a client is drawn: next to the other clients of its group."""
    return client % groups * (CLIENTS // groups) + client // groups
