"""ResNet-20 on CIFAR-10 to its final test accuracy: the whole recipe, as people train it (not a figure of the paper).

Momentum 0.9, weight decay 0.0005, random crops and mirror images, and a learning rate that is divided by ten after a
half and after three quarters of 80 epochs. The usual rate for 128 samples is 0.1. A round of eight workers has 512, so
the rate is 0.4, after one epoch at a tenth and one at a half of it. All schemes have the same rate, and weights as in a
real job: a round moves the model as far as one step of data-parallel training.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import msgspec

from paceline.reproduce.shared.accuracy import AccuracyCase, accuracy_line
from paceline.reproduce.shared.compare import Scheme, measured
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure, Plot, Row
from paceline.reproduce.shared.runs import Run, Trained
from paceline.simulate.task import Goal

BSP = Scheme("bsp:weights=mean")
#: R²SP has staleness correction, as it has by default in a real job with momentum.
SCHEMES = (
    BSP,
    Scheme("bsp:pipeline=true,weights=mean"),
    Scheme("asp:weights=mean"),
    Scheme("r2sp:weights=mean", "full"),
    Scheme("r2sp:groups=3,weights=mean", "full"),
)
CLUSTER, JITTER, BATCH = "resnet20-100mbit", 0.05, 512


def recipe(request: Request) -> Figure:
    """Compare the time to a test accuracy, and the final accuracy, of schemes that train the same recipe."""
    chosen = _recipe(request)
    found: dict[Scheme, list[Trained]] = {}
    template, seeds = chosen.template, request.seeds
    wanted = {scheme: [scheme.of(template, template.rate, seed) for seed in seeds] for scheme in SCHEMES}
    trained = request.runs(run for runs in wanted.values() for run in runs)
    for scheme, runs in wanted.items():
        if done := [trained[run] for run in runs if run in trained]:
            found[scheme] = done
    missing = list(chosen.missing)
    if left_out := [scheme.name for scheme in SCHEMES if len(found.get(scheme, ())) < len(seeds)]:
        missing.append(f"Not all seeds were trained of {'; '.join(left_out)}.")
    rows = [row for target in chosen.targets for row in _times(chosen, target, found, request)]
    rows += _final(chosen, found, request)
    curves = tuple(accuracy_line(runs[0], scheme.name) for scheme, runs in found.items())
    plot = Plot(f"{chosen.title}: test accuracy over time", "seconds", "test accuracy", curves)
    return Figure("recipe", f"{chosen.title}: time to a test accuracy", tuple(rows), (plot,), tuple(missing))


def _recipe(request: Request) -> AccuracyCase:
    if request.quick or request.lacks_cifar:
        why = "--quick" if request.quick else request.lacks_cifar
        missing = f"ResNet-20 on CIFAR-10 was not trained ({why}). An MLP on the bundled digits replaces it."
        return AccuracyCase(
            "MLP on digits", _run("mlp", "digits", 1437, 30, 5, 0.2, augment=False), (0.9, 0.92), (missing,)
        )
    template = _run("resnet20", "cifar10", 50_000, 80, 49, 0.4, augment=True)
    return AccuracyCase("ResNet-20", msgspec.structs.replace(template, precision=request.precision), (0.9, 0.91))


def _run(network: str, data: str, samples: int, epochs: int, every: int, rate: float, augment: bool) -> Run:
    """Return a template. Its accuracy is tested after every so many rounds."""
    decay = ((0.0, 0.1), (1.0, 5.0), (2.0, 2.0), (epochs / 2, 0.1), (epochs * 3 / 4, 0.1))
    goal = Goal("accuracy", 1.1, every=every)  # out of reach, so that the run does not stop early
    rounds = epochs * samples // BATCH
    return Run(
        CLUSTER,
        BSP.policy,
        network,
        data,
        rate,
        rounds,
        goal=goal,
        decay=decay,
        momentum=0.9,
        weight_decay=5e-4,
        augment=augment,
        jitter=JITTER,
    )


def _times(chosen: AccuracyCase, target: float, found: dict[Scheme, list[Trained]], request: Request) -> list[Row]:
    goal = Goal("accuracy", target)
    results = {scheme: measured(runs, scheme, goal) for scheme, runs in found.items()}
    base = results[BSP].seconds if BSP in results else None
    rows = []
    for scheme, each in results.items():
        what = f"{chosen.title}: {scheme.name}, time to {target:.0%}"
        note = f"{each.reached} of {each.seeds} seeds"
        if each.seconds is None:
            rows.append(Row("recipe", what, None, None, "s", request.where, f"{note}; the best was {each.best:.4f}"))
            continue
        note += f", {each.rounds:.0f} rounds, {each.iteration_seconds:.3f} s each, staleness {each.staleness:.1f}"
        rows.append(Row("recipe", what, None, round(each.seconds, 1), "s", request.where, note))
        if base:
            rows.append(Row("recipe", what, None, round(base / each.seconds, 3), "× as fast as BSP", request.where))
    return rows


def _final(chosen: AccuracyCase, found: dict[Scheme, list[Trained]], request: Request) -> list[Row]:
    base = _accuracies(found.get(BSP, ()))
    rows = []
    for scheme, runs in found.items():
        final = _accuracies(runs)
        if not final:
            continue
        what = f"{chosen.title}: {scheme.name}, final test accuracy"
        note = "seeds: " + ", ".join(f"{each:.2%}" for each in final)
        rows.append(Row("recipe", what, None, round(100 * mean(final), 2), "%", request.where, note))
        if base:
            more = 100 * (mean(final) - mean(base))
            rows.append(Row("recipe", what, None, round(more, 2), "points above BSP", request.where))
    return rows


def _accuracies(runs: Sequence[Trained]) -> list[float]:
    return [each.learned.tested[1] for each in runs if each.learned.tested]
