"""FL-R²SP (ToN 2026, section VI-B): what a federation gains when its groups take turns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from statistics import mean
from typing import TypeAlias

import msgspec

from paceline.policies import make
from paceline.reproduce.shared.federation import Federated, Federation
from paceline.reproduce.shared.papers import Paper, PaperFigure
from paceline.reproduce.shared.phases import Phases, Span
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import TITLES, Figure, Plot, PlotLine, Row
from paceline.reproduce.shared.simulated import DRAWN, TransferWatcher, report, row, watched
from paceline.simulate import Cluster, load_cluster

BSP, BSP_FILTERED = "bsp:fraction=0.75,weights=mean", "filtered:policy=(bsp:fraction=0.75,weights=mean)"
FL, FL_PLAIN, PRINTED = "fl-r2sp", "fl-r2sp:filter=false", "fl-r2sp:moves=model"
MODELS = {"CNN": "cnn", "LSTM": "lstm", "ResNet20": "resnet20"}
#: Seconds with contention and without, and how many times slower that is.
TABLE_2 = {"CNN": (1.02, 0.03, 34.0), "LSTM": (0.43, 0.03, 14.3), "ResNet20": (1.98, 0.13, 15.2)}
#: Of BSP and FL-R²SP: a round, and until convergence.
TABLE_4 = {
    "CNN": ((10.69, 4098.81), (8.31, 3181.55), 22.4),
    "LSTM": ((9.41, 2695.38), (8.17, 2319.89), 13.9),
    "ResNet20": ((44.90, 9172.85), (36.75, 8158.34), 11.1),
}
#: Of BSP and FL-R²SP: a push, and a pull; and how much less both take together.
TABLE_5 = {
    "CNN": ((0.38, 2.73), (0.34, 0.38), 76.5),
    "LSTM": ((0.36, 2.12), (0.34, 0.36), 71.7),
    "ResNet20": ((1.19, 13.28), (0.47, 1.50), 86.3),
}
#: The α with which an outlier has more than 97% of its samples of one class, as the paper says its outliers have. With
#: the 0.1 that it states, if that is meant of each class, it is 66% on average.
ONE_CLASS = 0.01
SIZES = (2, 4, 8, 16, 32, 64)
FRACTIONS = (0.25, 0.5, 0.75, 0.9, 1.0)
CLIENTS = 128


# Time


def table2(ask: Request) -> Figure:
    """How much slower a client's transfers are than if it were alone."""
    add = partial(row, "table2")
    rows: list[Row] = []
    note = "Under BSP; of table V's 2.73 s, not of table II's, which are half as long: the paper does not say why."
    for model, (contended, alone, slower) in TABLE_2.items():
        spec = load_cluster(f"fl-{MODELS[model]}")
        both, one = _transfers(spec.name, BSP, ask.quick), 2 * spec.model_bytes / spec.workers[0].link
        rows += [
            add(f"{model}: push and pull, 128 clients", contended, sum(both), "s", note if not rows else ""),
            add(f"{model}: push and pull, one client", alone, one, "s"),
            add(f"{model}: slower by", slower, sum(both) / one, "×"),
        ]
    return Figure("table2", "What contention on the server's link costs", tuple(rows))


def table5(ask: Request) -> Figure:
    """Pushes and pulls, with the server's rate calibrated until BSP's are the paper's."""
    add = partial(row, "table5")
    rows: list[Row] = []
    lines = []
    fitted = "The server's rates were fitted to these two."
    for model, (bsp, fl, less) in TABLE_5.items():
        ours = [_transfers(f"fl-{MODELS[model]}", policy, ask.quick) for policy in (BSP, FL)]
        for scheme, paper, (push, pull) in zip(("BSP", "FL-R²SP"), (bsp, fl), ours, strict=True):
            rows += [
                add(f"{model}, {scheme}: push", paper[0], push, "s", fitted if not rows else ""),
                add(f"{model}, {scheme}: pull", paper[1], pull, "s"),
            ]
            lines.append(PlotLine(f"{model}, {scheme}", ("push", "pull"), (push, pull)))
        for what, paper_less, parts in (
            ("push and pull", less, [sum(each) for each in ours]),
            ("pull", round(100 * (1 - fl[1] / bsp[1]), 1), [each[1] for each in ours]),
        ):
            rows.append(add(f"{model}: {what}, less than BSP's", paper_less, 100 * (1 - parts[1] / parts[0]), "%"))
    plot = Plot("Transfers of a round", "", "seconds", tuple(lines), "bars")
    return Figure("table5", "Time to push and pull, 128 clients", tuple(rows), (plot,))


def fig16(ask: Request) -> Figure:
    """Who is in which phase when."""
    add = partial(row, "fig16")
    rows, plots = [], []
    for scheme, policy in (("BSP", BSP), ("FL-R²SP", FL)):
        spans, since, until = _phases("fl-cnn", policy, 8)
        shares = {
            phase: sum(max(0.0, min(each.end, until) - max(each.begin, since)) for each in spans if each.phase == phase)
            for phase in ("train", "push", "wait", "pull")
        }
        whole = sum(shares.values())
        rows += [
            add(f"CNN, {scheme}: {phase}", None, 100 * share / whole, "% of the time", DRAWN)
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


def fig17(ask: Request) -> Figure:
    """The server's uplink, at the rates that the paper states."""
    add = partial(row, "fig17")
    rows, plots = [], []
    for model, name in MODELS.items():
        watches = [watched(load_cluster(f"fl-{name}-literal"), policy, _rounds(ask.quick)) for policy in (BSP, FL)]
        peaks = [_peak(watch, 0.1) for watch in watches]
        paper, note = (round(1 / 3, 2), "The paper: around a third.") if model == "ResNet20" else (None, DRAWN)
        rows.append(add(f"{model}: peak, FL-R²SP's of BSP's", paper, peaks[1] / peaks[0], "×", note))
        rows += [
            add(f"{model}, {scheme}: peak over 0.1 s", None, 10 * peak, "Gbit/s")
            for scheme, peak in zip(("BSP", "FL-R²SP"), peaks, strict=True)
        ]
        if model == "ResNet20":
            lines = [_uplink(scheme, watch) for scheme, watch in zip(("BSP", "FL-R²SP"), watches, strict=True)]
            plots.append(Plot("ResNet20: the server's uplink", "seconds", "Gbit/s", tuple(lines), "steps"))
    return Figure("fig17", "The server's uplink over time", tuple(rows), tuple(plots))


def fig18(ask: Request) -> Figure:
    """How large a group should be."""
    add = partial(row, "fig18")
    rows, lines = [], []
    for model, name in MODELS.items():
        seconds = {}
        for size in SIZES:
            # As printed, a group of two waits for both; ours would drop a straggler, and be as quick as any.
            fraction = 1.0 if size == 2 else 0.75
            policy = f"fl-r2sp:groups={CLIENTS // size},fraction={fraction:g},filter=false"
            seconds[size] = report(load_cluster(f"fl-{name}"), policy, _rounds(ask.quick)).mean_iteration_seconds
        best = min(seconds, key=seconds.__getitem__)
        rows += [add(f"{model}: groups of {size}", None, each, "s a round", DRAWN) for size, each in seconds.items()]
        rows.append(add(f"{model}: best size", 32, best, "clients"))
        dropping = report(
            load_cluster(f"fl-{name}"), f"fl-r2sp:groups={CLIENTS // 2},filter=false", _rounds(ask.quick)
        ).mean_iteration_seconds
        rows.append(add(f"{model}: groups of 2 that drop a straggler", None, dropping, "s a round", "Ours."))
        lines.append(
            PlotLine(
                model, tuple(float(size) for size in SIZES), tuple(each / seconds[best] for each in seconds.values())
            )
        )
    plot = Plot("Round time by group size", "clients in a group", "× the best", tuple(lines), log=True)
    return Figure("fig18", "Group size", tuple(rows), (plot,))


# Learning


@dataclass(frozen=True)
class FederatedCase:
    """A model, and what it learns."""

    name: str
    like: Federation  # all but the policy and the seed
    note: str = ""
    core: bool = False  # only with BSP and FL-R²SP, filtered and not

    @property
    def title(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name

    @property
    def schemes(self) -> dict[str, str]:
        return {name: policy for name, policy in SCHEMES.items() if policy in CORE or not self.core}


def cases(ask: Request) -> tuple[list[FederatedCase], list[str]]:
    """What is trained, and what could not be had."""
    if ask.quick or ask.lacks_cifar:
        why = "--quick" if ask.quick else ask.lacks_cifar
        like = Federation("fl-cnn", BSP, "mlp", "digits", 14, 10, rate=0.02, samples=64, every=1)
        return [FederatedCase("CNN", like, "an MLP on digits")], [f"The paper's models were not trained ({why})."]
    found = [
        FederatedCase("CNN", Federation("fl-cnn", BSP, "cnn", "cifar10", 120, 100, every=2)),
        FederatedCase(
            "CNN", Federation("fl-cnn", BSP, "cnn", "cifar10", 120, 100, odd=ONE_CLASS, every=2), "97% one class", True
        ),
        FederatedCase("ResNet20", Federation("fl-resnet20", BSP, "resnet20", "cifar10", 60, 100, every=2)),
    ]
    missing = []
    if not ask.lacks("speech"):
        found.append(FederatedCase("LSTM", Federation("fl-lstm", BSP, "lstm", "speech", 80, 100, rate=0.05, every=2)))
    elif not (lacks := ask.lacks("fashion-mnist")):
        missing.append("Speech Commands is not there: the LSTM reads Fashion-MNIST's images row by row.")
        like = Federation("fl-lstm", BSP, "lstm", "fashion-mnist", 80, 100, rate=0.05, every=2)
        found.append(FederatedCase("LSTM", like, "Fashion-MNIST by rows"))
    else:
        missing.append(f"The LSTM was not trained: {lacks}")
    return found, missing


SCHEMES = {
    "BSP": BSP,
    "BSP, filtered": BSP_FILTERED,
    "FL-R²SP, not filtered": FL_PLAIN,
    "FL-R²SP": FL,
    "FL-R²SP, as printed": PRINTED,
    "ASP": "asp:weights=mean",
    "SAFA": "safa:fraction=0.75",
    "FedBuff": "fedbuff:k=12,rate=0.25",
}
CORE = (BSP, BSP_FILTERED, FL_PLAIN, FL)

BySeed: TypeAlias = dict[int, Federated]


def fig15(ask: Request) -> Figure:
    """The accuracy that each scheme ends with; and whom the filter finds."""
    rows: list[Row] = []
    plots: list[Plot] = []
    chosen, missing = cases(ask)
    for case in chosen:
        found = _trained(ask, case, case.schemes.values())
        bars = {}
        if left := [scheme for scheme, policy in case.schemes.items() if policy not in found]:
            missing.append(f"{case.title}: not trained: {'; '.join(left)}.")
        if not found:
            continue
        for scheme, policy in case.schemes.items():
            if runs := found.get(policy):
                final = bars[scheme] = 100 * mean(run.final for run in runs.values())
                note = f"seeds: {len(runs)}; the paper's is drawn only"
                rows.append(
                    Row("fig15", f"{case.title}: {scheme}, final accuracy", None, round(final, 2), "%", ask.where, note)
                )
        if pair := _paired(found, BSP_FILTERED, FL):
            what = f"{case.title}: FL-R²SP's final accuracy, beyond filtered BSP's"
            rows.append(Row("fig15", what, "comparable", _gained(*pair), "points", ask.where))
        for scheme, plain, filtered in (("BSP", BSP, BSP_FILTERED), ("FL-R²SP", FL_PLAIN, FL)):
            if pair := _paired(found, plain, filtered):
                what = f"{case.title}: {scheme}, what the filter gains"
                note = f"seeds: {len(pair[0])}"
                rows.append(Row("fig15", what, "around 10", _gained(*pair), "points", ask.where, note))
            if judged := found.get(filtered):
                rows += _judged(ask, case, scheme, judged.values())
        if not case.core:
            like = msgspec.structs.replace(case.like, outliers=0.0)
            if clean := _trained(ask, FederatedCase(case.name, like), (FL,)).get(FL):
                wronged = 100 * mean(run.wronged for run in clean.values())
                what = f"{case.title}: FL-R²SP, blacklisted where there are no outliers"
                note = f"seeds: {len(clean)}"
                rows.append(Row("fig15", what, None, round(wronged, 2), "% of the clients", ask.where, note))
        bars_line = PlotLine("", tuple(bars), tuple(bars.values()))
        plots.append(Plot(f"{case.title}: final accuracy", "", "%", (bars_line,), "bars"))
        curves = [
            _curve(scheme, next(iter(found[policy].values())))
            for scheme, policy in case.schemes.items()
            if policy in found
        ]
        plots.append(Plot(f"{case.title}: accuracy over time", "seconds", "test accuracy", tuple(curves)))
    return Figure("fig15", "Accuracy, with outliers filtered and not", tuple(rows), tuple(plots), tuple(missing))


def table4(ask: Request) -> Figure:
    """A round, and the time to an accuracy that BSP and FL-R²SP both come to."""
    add = partial(row, "table4")
    rows: list[Row] = []
    for model, (bsp, fl, _) in TABLE_4.items():
        ours = [
            report(load_cluster(f"fl-{MODELS[model]}"), each, _rounds(ask.quick)).mean_iteration_seconds
            for each in (BSP, FL)
        ]
        note = "The time to compute was fitted to this one, together with table V." if not rows else ""
        rows += [
            add(f"{model}, BSP: a round", bsp[0], ours[0], "s", note),
            add(f"{model}, FL-R²SP: a round", fl[0], ours[1], "s"),
            add(
                f"{model}: a round, less than BSP's",
                round(100 * (1 - fl[0] / bsp[0]), 1),
                100 * (1 - ours[1] / ours[0]),
                "%",
            ),
        ]
    chosen, missing = cases(ask)
    for case in chosen:
        found = _trained(ask, case, CORE)
        if not (pair := _paired(found, BSP_FILTERED, FL)):
            missing.append(f"{case.title}: not all trainings were done.")
            continue
        # A point below what the worse of the two ends with: both come to it, and mean it.
        target = min(run.final for runs in pair for run in runs) - 0.01
        papers = TABLE_4[case.name]
        pairs = (("filtered BSP", BSP_FILTERED, FL), ("BSP", BSP, FL), ("BSP, neither filtered", BSP, FL_PLAIN))
        for beside, bsp_policy, fl_policy in pairs:
            pair = _paired(found, bsp_policy, fl_policy)
            times = [_mean_time(runs, target) for runs in pair]
            if bsp_policy == BSP_FILTERED:
                for scheme, paper, seconds in zip(("BSP, filtered", "FL-R²SP"), papers[:2], times, strict=True):
                    what = f"{case.title}, {scheme}: time to {100 * target:.1f}%"
                    rows.append(Row("table4", what, paper[1], seconds and round(seconds, 1), "s", ask.where))
            if len(times) == 2 and times[0] and times[1]:
                less = round(100 * (1 - times[1] / times[0]), 1)
                what = f"{case.title}: FL-R²SP's time to {100 * target:.1f}%, less than that of {beside}"
                rows.append(Row("table4", what, papers[2], less, "%", ask.where, f"seeds: {len(pair[0])}"))
    return Figure("table4", "Round time and time to converge", tuple(rows), missing=tuple(missing))


def fractions(ask: Request) -> Figure:
    """A sweep of C, which the paper has in its appendix."""
    add = partial(row, "fractions")
    rows, points = [], []
    for fraction in FRACTIONS:
        policy = f"fl-r2sp:fraction={fraction:g},filter=false"
        seconds = report(load_cluster("fl-cnn"), policy, _rounds(ask.quick)).mean_iteration_seconds
        points.append(seconds)
        rows.append(add(f"CNN: C = {fraction:g}, a round", None, seconds, "s", "In the paper's appendix only."))
        rows.append(add(f"CNN: C = {fraction:g}, updates that count", None, _counted(policy, ask.quick), "a second"))
    plot = Plot(
        "The fraction that a group waits for", "C", "seconds a round", (PlotLine("CNN", FRACTIONS, tuple(points)),)
    )
    return Figure("fractions", "The fraction C", tuple(rows), (plot,))


# Pieces


def _rounds(quick: bool) -> int:
    return 24 if quick else 60


@cache
def _transfers(cluster: str, policy: str, quick: bool) -> tuple[float, float]:
    """What a push and a pull take, on average."""
    watch = watched(load_cluster(cluster), policy, _rounds(quick))
    return mean(each.seconds for each in watch.settled("in")), mean(each.seconds for each in watch.settled("out"))


@cache
def _counted(policy: str, quick: bool) -> float:
    """Updates that change the model, in a second."""
    spec = load_cluster("fl-cnn")
    found = report(spec, policy, _rounds(quick))
    return found.samples_per_second / spec.workers[0].batch


@cache
def _phases(cluster: str, policy: str, rounds: int) -> tuple[tuple[Span, ...], float, float]:
    """All phases of a run, and between when and when two rounds of it lie."""
    watch = Phases()
    run = Cluster(load_cluster(cluster), make(policy), rounds, 0, observer=watch).run()
    until = 0.9 * run.simulated_seconds
    return tuple(watch.spans), until - 2 * run.report.mean_iteration_seconds, until


def _place(client: int, groups: int = 8) -> int:
    """Where a client is drawn: beside the others of its group."""
    return client % groups * (CLIENTS // groups) + client // groups


def _peak(watch: TransferWatcher, seconds: float) -> float:
    """The largest share of the uplink that was in use over so many seconds on end."""
    steps = [(begin, end, share) for (begin, share), (end, _) in pairwise(watch.uses["out"]) if end >= watch.since]
    best, area, first = 0.0, 0.0, 0
    for begin, end, share in steps:
        area += share * (end - begin)
        while end - steps[first][1] >= seconds:
            area -= steps[first][2] * (steps[first][1] - steps[first][0])
            first += 1
        best = max(best, area / max(seconds, end - steps[first][0]))
    return best


def _uplink(name: str, watch: TransferWatcher, most: float = 80.0) -> PlotLine:
    until = watch.since + most
    shown = [(time - watch.since, 10 * share) for time, share in watch.uses["out"] if watch.since <= time <= until]
    return PlotLine(name, tuple(time for time, _ in shown), tuple(share for _, share in shown))


def _trained(ask: Request, case: FederatedCase, policies: Iterable[str]) -> dict[str, BySeed]:
    """By policy: what its seeds came to, as far as they were run."""
    wanted = {
        policy: {seed: msgspec.structs.replace(case.like, policy=policy, seed=seed) for seed in ask.seeds}
        for policy in policies
    }
    found = ask.runs.federated(run for runs in wanted.values() for run in runs.values())
    done = {policy: {seed: found[run] for seed, run in runs.items() if run in found} for policy, runs in wanted.items()}
    return {policy: runs for policy, runs in done.items() if runs}


def _paired(found: dict[str, BySeed], *policies: str) -> list[list[Federated]]:
    """Of each of these policies the same seeds, so that they can be compared; nothing if there are none."""
    both = [found.get(policy, {}) for policy in policies]
    seeds = sorted(set.intersection(*(set(runs) for runs in both)))
    return [[runs[seed] for seed in seeds] for runs in both] if seeds else []


def _gained(before: Sequence[Federated], after: Sequence[Federated]) -> float:
    """In points of final accuracy."""
    return round(100 * (mean(run.final for run in after) - mean(run.final for run in before)), 2)


def _judged(ask: Request, case: FederatedCase, scheme: str, runs: Collection[Federated]) -> list[Row]:
    found, wronged = 100 * mean(run.found for run in runs), 100 * mean(run.wronged for run in runs)
    return [
        Row("fig15", f"{case.title}: {scheme}, outliers that the filter finds", None, round(found, 1), "%", ask.where),
        Row("fig15", f"{case.title}: {scheme}, others that it blacklists", None, round(wronged, 1), "%", ask.where),
    ]


def _mean_time(runs: Sequence[Federated], target: float) -> float | None:
    times = [run.time_to(target) for run in runs]
    reached = [time for time in times if time is not None]
    return mean(reached) if len(reached) == len(times) else None


def _curve(name: str, run: Federated) -> PlotLine:
    return PlotLine(name, tuple(time for time, _ in run.tests), tuple(accuracy for _, accuracy in run.tests))


PAPER = Paper(
    "fl-r2sp",
    TITLES["fl-r2sp"],
    (
        PaperFigure("table2", "What contention costs", table2),
        PaperFigure("fig15", "Accuracy, with outliers filtered and not", fig15),
        PaperFigure("table4", "Round time and time to converge", table4),
        PaperFigure("fig16", "Phases of all clients", fig16),
        PaperFigure("table5", "Time to push and pull", table5),
        PaperFigure("fig17", "The server's uplink over time", fig17),
        PaperFigure("fig18", "Group size", fig18),
        PaperFigure("fractions", "The fraction C", fractions),
    ),
)
