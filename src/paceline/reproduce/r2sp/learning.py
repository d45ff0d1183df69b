"""Trainings under the virtual clock: rounds and seconds to a target loss (R²SP paper: figures 7b, 7c and 10).

A target is a training loss, as the workers see it, that holds for ten rounds. It is the cross-entropy alone. The
paper's losses include a regularizer; without it, VGG16's 2.3 would be chance. Each comparison is made twice: at one
learning rate for all schemes, and with every scheme at its own best of several rates, chosen with the first seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from paceline.reproduce.shared.compare import Scheme, SchemeResult, at_own_best, at_rate
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Plot, PlotLine, Row, Value
from paceline.reproduce.shared.runs import Run, Trained
from paceline.simulate.task import Goal, Precision

BSP = Scheme("bsp")
PIPELINED = Scheme("bsp:pipeline=true")
R2SP = Scheme("r2sp")
FEW = (Scheme("r2sp:groups=3"), Scheme("r2sp:groups=4"))
#: The schemes of the paper, and ours.
SCHEMES = (BSP, PIPELINED, Scheme("asp"), Scheme("ssp:staleness=5"), Scheme("dssp"), R2SP, *FEW)
CORRECTED = (BSP, PIPELINED, *(each for plain in (R2SP, *FEW) for each in (plain, Scheme(plain.policy, "full"))))
JITTERS = (0.05, 0.2)
PAPERS_RATE = 0.01  # the learning rate of the paper's CIFAR-10 models


@dataclass(frozen=True)
class TrainingCase:
    """A model on a cluster."""

    name: str
    template: Run  # everything except the scheme, the rate and the seed
    target: float  # loss
    rates: tuple[float, ...]
    note: str = ""  # what is trained in place of the named model, or on which data

    @property
    def goal(self) -> Goal:
        return Goal("loss", self.target)

    @property
    def title(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name


def paper_cases(request: Request) -> tuple[list[TrainingCase], list[str]]:
    """Return the paper's models on its cluster A, and a sentence for each part that is not trained."""
    if request.quick or request.lacks_cifar:
        why = "--quick" if request.quick else request.lacks_cifar
        missing = [f"CIFAR-10 networks were not trained ({why}). An MLP on the bundled digits replaces them."]
        cases = [
            TrainingCase(name, _run(cluster, "mlp", "digits", 50, 0.28), 0.3, (0.01, 0.02, 0.04), "an MLP on digits")
            for name, cluster in (("AlexNet", "r2sp-a-alexnet"), ("VGG16", "r2sp-a-vgg16"))
        ]
        return cases, missing
    cases = [
        TrainingCase(
            "AlexNet", _run("r2sp-a-alexnet", "alexnet", "cifar10", 330, 1.4), 1.5, (0.01, 0.0025, 0.00125, 0.000625)
        ),
        TrainingCase("VGG16", _run("r2sp-a-vgg16", "vgg16", "cifar10", 200, 0.9), 1.0, (0.01, 0.005, 0.02, 0.0025)),
        TrainingCase(
            "ResNet32",
            _run("r2sp-a-resnet32", "resnet32", "cifar10", 240, 0.9, precision=request.precision),
            1.6,
            (0.01, 0.005, 0.02, 0.04),
        ),
    ]
    return cases, ["Inception-v3 on ImageNet is only timed (fig7a), because the data is not available."]


def fig7b(request: Request) -> Figure:
    """Compare statistical efficiency: rounds to the target loss, relative to BSP's."""
    cases, missing = paper_cases(request)
    rows: list[Row] = []
    plots: list[Plot] = []
    for case in cases:
        for how, table in _at_both_rates(request, case):
            base = _base(table)
            rows += [
                _row(
                    "fig7b",
                    case,
                    how,
                    each,
                    _ratio(each.rounds, base.rounds if base else None),
                    "× BSP's rounds",
                    request,
                )
                for each in table
            ]
            plots += _bars(f"{case.title}: rounds to loss {case.target:g}, {how}", table, lambda each: each.rounds)
    return Figure(
        "fig7b", "Statistical efficiency: rounds to the target loss", tuple(rows), tuple(plots), tuple(missing)
    )


def fig7c(request: Request) -> Figure:
    """Compare overall efficiency: time to the target loss relative to BSP's, with jitter and without."""
    cases, missing = paper_cases(request)
    rows: list[Row] = []
    plots: list[Plot] = []
    for case in cases:
        for how, table in _at_both_rates(request, case):
            rows += _times(case, how, table, request)
            plots += _bars(f"{case.title}: s to loss {case.target:g}, {how}", table, lambda each: each.seconds)
        for jitter in JITTERS:
            template = msgspec.structs.replace(case.template, jitter=jitter)
            table = at_rate(request.runs, template, SCHEMES, case.rates[0], request.seeds, case.goal)
            rows += _times(case, f"rate {case.rates[0]:g}, jitter {jitter:.0%}", table, request)
    title = "Overall efficiency: time to the target loss"
    return Figure("fig7c", title, tuple(rows), tuple(plots), tuple(missing))


def fig10(request: Request) -> Figure:
    """Compare the time to the target loss with and without batch-size tuning, on the unequal cluster B."""
    missing: list[str] = []
    if request.quick or request.lacks_cifar:
        case = TrainingCase(
            "ResNet32", _run("r2sp-b", "mlp", "digits", 80, 0.15), 0.2, (0.01, 0.02), "an MLP on digits"
        )
        missing.append(f"ResNet32 on CIFAR-10 was not trained ({'--quick' if request.quick else request.lacks_cifar}).")
    else:
        case = TrainingCase(
            "ResNet32",
            _run("r2sp-b", "resnet32", "cifar10", 500, 0.9, precision=request.precision),
            1.4,
            (0.005, 0.01, 0.02),
        )
    schemes = (Scheme("r2sp"), Scheme("r2sp:tune_batches=true"))
    rows: list[Row] = []
    # Doubling a batch also doubles its learning rate, which helps only if the rate is low. So two rates are compared.
    tables = [
        (f"rate {rate:g}", at_rate(request.runs, case.template, schemes, rate, request.seeds, case.goal))
        for rate in case.rates[:2]
    ]
    tables.append(
        ("own best rate", at_own_best(request.runs, case.template, schemes, case.rates, request.seeds, case.goal))
    )
    for how, table in tables:
        if len(table) < 2:
            missing.append(f"{case.title}, {how}: not all trainings were done.")
            continue
        plain, tuned = table
        saved = None if plain.seconds is None or tuned.seconds is None else 100 * (1 - tuned.seconds / plain.seconds)
        paper = 40.0 if how == f"rate {PAPERS_RATE:g}" else None
        rows.append(_row("fig10", case, how, tuned, saved, "% less time than without tuning", request, paper))
    wanted = [scheme.of(case.template, PAPERS_RATE, 0) for scheme in schemes]
    found = request.runs(wanted)
    curves = Plot(
        f"{case.title}: loss over time, cluster B, rate {PAPERS_RATE:g}",
        "seconds",
        "training loss",
        tuple(
            _curve(found[run], name) for run, name in zip(wanted, ("R²SP", "R²SP, tuned"), strict=True) if run in found
        ),
    )
    return Figure("fig10", "Batch-size tuning in a heterogeneous cluster", tuple(rows), (curves,), tuple(missing))


def optimizers(request: Request) -> Figure:
    """Added by us: compare momentum and Adam, with and without staleness correction."""
    rows: list[Row] = []
    plots: list[Plot] = []
    cases, missing = optimizer_cases(request)
    for case in cases:
        table = at_own_best(request.runs, case.template, CORRECTED, case.rates, request.seeds, case.goal)
        base = _base(table)
        for each in table:
            rows.append(
                _row(
                    "optimizers",
                    case,
                    "own best",
                    each,
                    _ratio(each.samples, base.samples if base else None),
                    "× BSP's samples",
                    request,
                )
            )
            speedup = _ratio(base.seconds if base else None, each.seconds)
            rows.append(_row("optimizers", case, "own best", each, speedup, "× as fast as BSP", request))
        plots += _bars(f"{case.title}: s to loss {case.target:g}", table, lambda each: each.seconds)
    title = "Momentum and Adam: the cost of staleness, and the gain from correcting it"
    return Figure("optimizers", title, tuple(rows), tuple(plots), tuple(missing))


def optimizer_cases(request: Request) -> tuple[list[TrainingCase], list[str]]:
    """Return cases with momentum 0.9 and with Adam, and a sentence for each part that is not trained."""
    if request.quick or request.lacks_cifar:
        why = "--quick" if request.quick else request.lacks_cifar
        mlp = _run("r2sp-a-alexnet", "mlp", "digits", 50, 0.2)
        rates = ((0.004, 0.002), (0.002, 0.0005))
        missing = [f"CIFAR-10 networks were not trained ({why})."]
        return _momentum_and_adam("MLP", mlp, 0.25, rates, "digits"), missing
    data = "14,000 images"
    alexnet = _run("r2sp-a-alexnet", "alexnet-small", "cifar10", 450, 0.4, 14_000)
    resnet = _run("r2sp-a-alexnet", "resnet20", "cifar10", 300, 0.4, 14_000, request.precision)
    of_alexnet = ((0.002, 0.001, 0.0005, 0.004, 0.00025), (0.001, 0.0005, 0.00025, 0.0001, 0.00005))
    of_resnet = ((0.008, 0.004, 0.016, 0.002, 0.001), (0.001, 0.002, 0.0005, 0.00025))
    return [
        *_momentum_and_adam("AlexNet, small", alexnet, 0.5, of_alexnet, data),
        *_momentum_and_adam("ResNet20", resnet, 0.5, of_resnet, data),
    ], []


def _momentum_and_adam(
    name: str, template: Run, target: float, rates: tuple[tuple[float, ...], tuple[float, ...]], note: str
) -> list[TrainingCase]:
    momentum, adam = (msgspec.structs.replace(template, **of) for of in ({"momentum": 0.9}, {"optimizer": "Adam"}))
    return [
        TrainingCase(f"{name}, momentum 0.9", momentum, target, rates[0], note),
        TrainingCase(f"{name}, Adam", adam, target, rates[1], note),
    ]


def _run(
    cluster: str,
    network: str,
    data: str,
    rounds: int,
    stop: float,
    samples: int = 0,
    precision: Precision = "float32",
) -> Run:
    """Return a template for the runs of a case. They stop at the loss `stop`, a little below the target."""
    goal = Goal("loss", stop)
    return Run(cluster, "bsp", network, data, 0.01, rounds, goal=goal, samples=samples, precision=precision)


def _at_both_rates(
    request: Request, case: TrainingCase, schemes: Sequence[Scheme] = ()
) -> list[tuple[str, list[SchemeResult]]]:
    """Return the results of all schemes at the shared rate, and at each scheme's own best rate."""
    rate, schemes = case.rates[0], schemes or SCHEMES
    return [
        (f"rate {rate:g}", at_rate(request.runs, case.template, schemes, rate, request.seeds, case.goal)),
        ("own best rate", at_own_best(request.runs, case.template, schemes, case.rates, request.seeds, case.goal)),
    ]


def _times(case: TrainingCase, how: str, table: Sequence[SchemeResult], request: Request) -> list[Row]:
    rows, base = [], _base(table)
    for each in table:
        ratio = _ratio(each.seconds, base.seconds if base else None)
        paper = 25.0 if (case.name, each.scheme, how) == ("VGG16", R2SP, f"rate {PAPERS_RATE:g}") else None
        saved = None if ratio is None else 100 * (1 - ratio)
        rows.append(_row("fig7c", case, how, each, saved, "% less time than BSP", request, paper))
    return rows


def _row(
    id: str,
    case: TrainingCase,
    how: str,
    each: SchemeResult,
    ours: float | None,
    unit: str,
    request: Request,
    paper: Value = None,
) -> Row:
    seeds = f"{each.seeds} seed" + ("s" if each.seeds > 1 else "")
    if each.seconds is None:
        note = (
            f"loss {case.target:g} not reached by {each.seeds - each.reached} of {seeds}; the best was {each.best:.3g}"
        )
    else:
        took = f"{each.seconds:.1f} s, {each.rounds:.0f} rounds"
        note = f"{took}, rate {each.rate:g}, {seeds}, staleness {each.staleness:.1f}"
    what = f"{case.title}: {each.scheme.name}, loss {case.target:g}, {how}"
    return Row(id, what, paper, None if ours is None else round(ours, 3), unit, request.where, note)


def _base(table: Sequence[SchemeResult]) -> SchemeResult | None:
    """Return BSP's result, the base of all ratios; None if BSP was not trained."""
    return next((each for each in table if each.scheme == BSP), None)


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _bars(title: str, table: Sequence[SchemeResult], value: Callable[[SchemeResult], float | None]) -> list[Plot]:
    """Return a plot with a bar per scheme; an empty list if nothing was trained."""
    bars = PlotLine("", tuple(each.scheme.name for each in table), tuple(value(each) for each in table))
    return [Plot(title, "", "", (bars,), kind="bars")] if table else []


def _curve(trained: Trained, name: str, max_points: int = 100) -> PlotLine:
    step = max(1, len(trained.seconds) // max_points)
    return PlotLine(name, trained.seconds[::step], trained.learned.loss[::step])
