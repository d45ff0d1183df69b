"""What schemes cost in samples, and what they save in seconds: trainings under the virtual clock.

Targets are training losses, as workers saw them, held for ten rounds: the cross-entropy alone. (The papers' losses have
a regularizer in them; VGG16's 2.3 would be chance without it.) Each comparison is made twice: at one learning rate for
all, and with every scheme at its own best of several, found with the first seed.
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
#: Those of the paper, and ours.
SCHEMES = (BSP, PIPELINED, Scheme("asp"), Scheme("ssp:staleness=5"), Scheme("dssp"), R2SP, *FEW)
CORRECTED = (BSP, PIPELINED, *(each for plain in (R2SP, *FEW) for each in (plain, Scheme(plain.policy, "full"))))
JITTERS = (0.05, 0.2)


@dataclass(frozen=True)
class TrainingCase:
    """A model on a cluster."""

    name: str
    like: Run  # all but the scheme, the rate and the seed
    target: float  # loss
    rates: tuple[float, ...]
    stands_for: str = ""  # what was not to be had, if anything

    @property
    def goal(self) -> Goal:
        return Goal("loss", self.target)

    @property
    def title(self) -> str:
        return f"{self.name} ({self.stands_for})" if self.stands_for else self.name


def paper_cases(ask: Request) -> tuple[list[TrainingCase], list[str]]:
    """The paper's models on its cluster A; and what could not be had."""
    if ask.quick or ask.lacks_cifar:
        why = "--quick" if ask.quick else ask.lacks_cifar
        missing = [f"Convolutional networks on CIFAR-10 were not trained ({why}): an MLP learns the bundled digits."]
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
            _run("r2sp-a-resnet32", "resnet32", "cifar10", 240, 0.9, precision=ask.precision),
            1.6,
            (0.01, 0.005, 0.02, 0.04),
        ),
    ]
    return cases, ["Inception-v3 on ImageNet is timed only (fig7a): the data is not to be had."]


def fig7b(ask: Request) -> Figure:
    """Statistical efficiency: rounds to the target, normalized by BSP's."""
    cases, missing = paper_cases(ask)
    rows: list[Row] = []
    plots: list[Plot] = []
    for case in cases:
        for how, table in _both(ask, case):
            base = _base(table)
            rows += [
                _row(
                    "fig7b", case, how, each, _ratio(each.rounds, base.rounds if base else None), "× BSP's rounds", ask
                )
                for each in table
            ]
            plots += _bars(f"{case.title}: rounds to loss {case.target:g}, {how}", table, lambda each: each.rounds)
    return Figure(
        "fig7b", "Statistical efficiency: rounds to the target loss", tuple(rows), tuple(plots), tuple(missing)
    )


def fig7c(ask: Request) -> Figure:
    """Overall efficiency: time to the target, normalized by BSP's, with jitter and without."""
    cases, missing = paper_cases(ask)
    rows: list[Row] = []
    plots: list[Plot] = []
    for case in cases:
        for how, table in _both(ask, case):
            rows += _times(case, how, table, ask)
            plots += _bars(f"{case.title}: s to loss {case.target:g}, {how}", table, lambda each: each.seconds)
        for jitter in JITTERS:
            like = msgspec.structs.replace(case.like, jitter=jitter)
            table = at_rate(ask.runs, like, SCHEMES, case.rates[0], ask.seeds, case.goal)
            rows += _times(case, f"rate {case.rates[0]:g}, jitter {jitter:.0%}", table, ask)
    title = "Overall efficiency: time to the target loss"
    return Figure("fig7c", title, tuple(rows), tuple(plots), tuple(missing))


def fig10(ask: Request) -> Figure:
    """Batch-size tuning on the unequal cluster B."""
    missing: list[str] = []
    if ask.quick or ask.lacks_cifar:
        case = TrainingCase(
            "ResNet32", _run("r2sp-b", "mlp", "digits", 80, 0.15), 0.2, (0.01, 0.02), "an MLP on digits"
        )
        missing.append(f"ResNet32 on CIFAR-10 was not trained ({'--quick' if ask.quick else ask.lacks_cifar}).")
    else:
        case = TrainingCase(
            "ResNet32",
            _run("r2sp-b", "resnet32", "cifar10", 500, 0.9, precision=ask.precision),
            1.4,
            (0.005, 0.01, 0.02),
        )
    schemes = (Scheme("r2sp"), Scheme("r2sp:tune_batches=true"))
    rows: list[Row] = []
    # A batch twice as large has twice the rate, which helps as long as a lower rate would be slower: so two of them.
    tables = [
        (f"rate {rate:g}", at_rate(ask.runs, case.like, schemes, rate, ask.seeds, case.goal)) for rate in case.rates[:2]
    ]
    tables.append(("own best rate", at_own_best(ask.runs, case.like, schemes, case.rates, ask.seeds, case.goal)))
    for how, table in tables:
        if len(table) < 2:
            missing.append(f"{case.title}, {how}: not all trainings were done.")
            continue
        plain, tuned = table
        saved = None if plain.seconds is None or tuned.seconds is None else 100 * (1 - tuned.seconds / plain.seconds)
        paper = 40.0 if how == tables[0][0] else None
        rows.append(_row("fig10", case, how, tuned, saved, "% less time than without tuning", ask, paper))
    wanted = [scheme.of(case.like, case.rates[0], 0) for scheme in schemes]
    found = ask.runs(wanted)
    curves = Plot(
        f"{case.title}: loss over time, cluster B, rate {case.rates[0]:g}",
        "seconds",
        "training loss",
        tuple(
            _curve(found[run], name) for run, name in zip(wanted, ("R²SP", "R²SP, tuned"), strict=True) if run in found
        ),
    )
    return Figure("fig10", "Batch-size tuning in a heterogeneous cluster", tuple(rows), (curves,), tuple(missing))


def optimizers(ask: Request) -> Figure:
    """Ours: momentum and Adam, with staleness corrected for and not."""
    rows: list[Row] = []
    plots: list[Plot] = []
    cases, missing = optimizer_cases(ask)
    for case in cases:
        table = at_own_best(ask.runs, case.like, CORRECTED, case.rates, ask.seeds, case.goal)
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
                    ask,
                )
            )
            sooner = _ratio(base.seconds if base else None, each.seconds)
            rows.append(_row("optimizers", case, "own best", each, sooner, "× sooner than BSP", ask))
        plots += _bars(f"{case.title}: s to loss {case.target:g}", table, lambda each: each.seconds)
    title = "Momentum and Adam: what staleness costs, and what knowing it in advance saves"
    return Figure("optimizers", title, tuple(rows), tuple(plots), tuple(missing))


def optimizer_cases(ask: Request) -> tuple[list[TrainingCase], list[str]]:
    """Momentum 0.9 and Adam, on the cluster where AlexNet's traffic counts most."""
    if ask.quick or ask.lacks_cifar:
        why = "--quick" if ask.quick else ask.lacks_cifar
        mlp = _run("r2sp-a-alexnet", "mlp", "digits", 50, 0.2)
        rates = ((0.004, 0.002), (0.002, 0.0005))
        missing = [f"Convolutional networks on CIFAR-10 were not trained ({why})."]
        return _momentum_and_adam("MLP", mlp, 0.25, rates, "digits"), missing
    some = "14,000 images"
    alexnet = _run("r2sp-a-alexnet", "alexnet-small", "cifar10", 450, 0.4, 14_000)
    resnet = _run("r2sp-a-alexnet", "resnet20", "cifar10", 300, 0.4, 14_000, ask.precision)
    of_alexnet = ((0.002, 0.001, 0.0005, 0.004, 0.00025), (0.001, 0.0005, 0.00025, 0.0001, 0.00005))
    of_resnet = ((0.008, 0.004, 0.016, 0.002, 0.001), (0.001, 0.002, 0.0005, 0.00025))
    return [
        *_momentum_and_adam("AlexNet, small", alexnet, 0.5, of_alexnet, some),
        *_momentum_and_adam("ResNet20", resnet, 0.5, of_resnet, some),
    ], []


def _momentum_and_adam(
    name: str, like: Run, target: float, rates: tuple[tuple[float, ...], tuple[float, ...]], on: str
) -> list[TrainingCase]:
    momentum, adam = (msgspec.structs.replace(like, **of) for of in ({"momentum": 0.9}, {"optimizer": "Adam"}))
    return [
        TrainingCase(f"{name}, momentum 0.9", momentum, target, rates[0], on),
        TrainingCase(f"{name}, Adam", adam, target, rates[1], on),
    ]


# Pieces


def _run(
    cluster: str,
    network: str,
    data: str,
    rounds: int,
    stop: float,
    samples: int = 0,
    precision: Precision = "float32",
) -> Run:
    """stop: a loss a little below the target, at which there is no need to go on."""
    goal = Goal("loss", stop)
    return Run(cluster, "bsp", network, data, 0.01, rounds, goal=goal, samples=samples, precision=precision)


def _both(ask: Request, case: TrainingCase, schemes: Sequence[Scheme] = ()) -> list[tuple[str, list[SchemeResult]]]:
    rate, schemes = case.rates[0], schemes or SCHEMES
    return [
        (f"rate {rate:g}", at_rate(ask.runs, case.like, schemes, rate, ask.seeds, case.goal)),
        ("own best rate", at_own_best(ask.runs, case.like, schemes, case.rates, ask.seeds, case.goal)),
    ]


def _times(case: TrainingCase, how: str, table: Sequence[SchemeResult], ask: Request) -> list[Row]:
    rows, base = [], _base(table)
    for each in table:
        sooner = _ratio(base.seconds if base else None, each.seconds)
        paper = 25.0 if (case.name, each.scheme, how) == ("VGG16", R2SP, f"rate {case.rates[0]:g}") else None
        faster = None if sooner is None else 100 * (sooner - 1)
        rows.append(_row("fig7c", case, how, each, faster, "% faster than BSP", ask, paper))
    return rows


def _row(
    id: str,
    case: TrainingCase,
    how: str,
    each: SchemeResult,
    ours: float | None,
    unit: str,
    ask: Request,
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
    return Row(id, what, paper, None if ours is None else round(ours, 3), unit, ask.where, note)


def _base(table: Sequence[SchemeResult]) -> SchemeResult | None:
    """BSP's, which others are compared with; None where it was not run."""
    return next((each for each in table if each.scheme == BSP), None)


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _bars(title: str, table: Sequence[SchemeResult], of: Callable[[SchemeResult], float | None]) -> list[Plot]:
    """One picture; none of what was not run."""
    bars = PlotLine("", tuple(each.scheme.name for each in table), tuple(of(each) for each in table))
    return [Plot(title, "", "", (bars,), kind="bars")] if table else []


def _curve(trained: Trained, name: str, most: int = 100) -> PlotLine:
    step = max(1, len(trained.seconds) // most)
    return PlotLine(name, trained.seconds[::step], trained.learned.loss[::step])
