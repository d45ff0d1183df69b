"""DSSP (Zhao et al., ICDCS 2019): a staleness threshold chosen at run time. Figures 3 and 4, and table I."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import msgspec

from paceline.reproduce.shared.papers import Paper, PaperFigure
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import TITLES, Figure, Plot, PlotLine, Row
from paceline.reproduce.shared.runs import Run, Trained
from paceline.simulate import load_cluster
from paceline.simulate.task import Goal, Precision

DSSP = "dssp:low=3,high=15"
PRINTED = "dssp:low=3,high=15,bound=none"
#: Seconds to accuracy 0.67 and 0.68. The paper's DSSP lets a worker run ahead whenever its controller allows it, and
#: sets no bound on the total lead. That is our bound=none.
TABLE_1: dict[str, tuple[float | None, float | None]] = {
    "bsp": (6159.2, None),
    "asp": (2993.1, 3017.2),
    "ssp:staleness=3": (5678.2, None),
    "ssp:staleness=6": (5703.8, 6908.2),
    "ssp:staleness=15": (5564.9, 7255.6),
    PRINTED: (3016.4, 3046.3),
    DSSP: (None, None),
}
SSPS = tuple(f"ssp:staleness={threshold}" for threshold in range(3, 16))


@dataclass(frozen=True)
class DsspCase:
    """A network on a cluster. Its accuracy is tested every few rounds."""

    title: str
    template: Run  # everything except the policy and the seed
    targets: tuple[float, ...]  # accuracies on the test set
    missing: tuple[str, ...] = ()


def table1(request: Request) -> Figure:
    """Compare the time to a test accuracy on two unequal GPUs. In the paper: ResNet-110 on CIFAR-100, 0.67 and 0.68."""
    case = _mixed(request)
    found = {policy: trained for policy in TABLE_1 if (trained := _seeds(request, case.template, policy))}
    rows = []
    for column, target in enumerate(case.targets):
        times = {policy: _time(trained, target) for policy, trained in found.items()}
        asp, papers_asp = times.get("asp"), TABLE_1["asp"][column]
        for policy, trained in found.items():
            ours = times[policy]
            paper = TABLE_1[policy][column]
            ratio = None if ours is None or not asp else round(ours / asp, 3)
            papers_ratio = None if not paper or not papers_asp else round(paper / papers_asp, 3)
            best = max(each.best("accuracy") for each in trained)
            took = f"seeds: {len(trained)}, {trained[0].iteration_seconds:.3f} s per iteration"
            note = took if ours is not None else f"not reached: the best accuracy was {best:.3f}; {took}"
            what = f"{case.title}: {policy}, time to accuracy {target:g}"
            rows.append(Row("table1", what, paper, None if ours is None else round(ours, 1), "s", request.where, note))
            rows.append(Row("table1", what, papers_ratio, ratio, "× ASP", request.where, ""))
    curves = tuple(_accuracy(trained[0], policy) for policy, trained in found.items())
    plot = Plot(f"{case.title}: accuracy over time (fig. 4)", "seconds", "test accuracy", curves)
    return Figure("table1", "Two unequal GPUs: time to accuracy (table I, fig. 4)", tuple(rows), (plot,), case.missing)


def fig3(request: Request) -> Figure:
    """Compare BSP, ASP, DSSP, and the mean of SSP with thresholds from 3 to 15, on four equal workers."""
    rows: list[Row] = []
    plots: list[Plot] = []
    missing: list[str] = []
    for case in _equal(request):
        missing += case.missing
        ssps = SSPS[::4] if request.quick else SSPS
        found = {policy: _seeds(request, case.template, policy) for policy in ("bsp", "asp", DSSP, *ssps)}
        if not all(found.values()):
            missing.append(f"{case.title}: not all trainings were done.")
            continue
        target = case.targets[0]
        times = {policy: _time(trained, target) for policy, trained in found.items()}
        reached = [time for policy in ssps if (time := times[policy]) is not None]
        times["ssp, mean"] = mean(reached) if len(reached) == len(ssps) else None
        best = {policy: mean(each.best("accuracy") for each in trained) for policy, trained in found.items()}
        best["ssp, mean"] = mean(best[policy] for policy in ssps)
        for policy in ("bsp", "asp", "ssp, mean", DSSP):
            what = f"{case.title}: {policy}"
            ours = times[policy]
            plotted = "the paper only plots this"
            rows.append(Row("fig3", f"{what}, best accuracy", None, round(best[policy], 4), "", request.where, plotted))
            note = plotted if ours is not None else f"not reached: the best was {best[policy]:.3f}"
            seconds = None if ours is None else round(ours, 1)
            rows.append(Row("fig3", f"{what}, time to {target:g}", None, seconds, "s", request.where, note))
        curves = [
            _accuracy(found[policy][0], policy) for policy in ("bsp", "asp", DSSP, *ssps[:: max(1, len(ssps) // 3)])
        ]
        plots.append(Plot(f"{case.title}: accuracy over time", "seconds", "test accuracy", tuple(curves)))
    title = "Four equal workers: accuracy over time under each scheme"
    return Figure("fig3", title, tuple(rows), tuple(plots), tuple(dict.fromkeys(missing)))


def _mixed(request: Request) -> DsspCase:
    cluster = "dssp-mixed"
    if request.quick or request.lacks_cifar:
        why = "--quick" if request.quick else request.lacks_cifar
        missing = f"ResNet-110 on CIFAR-100 was not trained ({why}). An MLP on the bundled digits replaces it."
        return DsspCase("MLP on digits", _run(cluster, "mlp", "digits", 54, 1437, 0.01, 4), (0.93,), (missing,))
    if not request.lacks("cifar100"):
        template = _run(cluster, "resnet110", "cifar100", 300, 50_000, 0.05, 50, request.precision)
        return DsspCase("ResNet-110", template, (0.67, 0.68))
    missing = f"ResNet-20 was trained on 10,000 images of CIFAR-10, for 30 epochs: {request.lacks('cifar100')}."
    template = _run(cluster, "resnet20", "cifar10", 30, 10_000, 0.05, 10, request.precision)
    return DsspCase("ResNet-20", template, (0.5, 0.55), (missing,))


def _equal(request: Request) -> list[DsspCase]:
    small, deep = "dssp-homogeneous-alexnet", "dssp-homogeneous-resnet"
    if request.quick or request.lacks_cifar:
        why = "--quick" if request.quick else request.lacks_cifar
        missing = f"AlexNet and ResNets were not trained ({why}). An MLP on the bundled digits replaces them."
        return [DsspCase("MLP on digits", _run(small, "mlp", "digits", 60, 1437, 0.05, 2), (0.9,), (missing,))]
    cases = [DsspCase("AlexNet, small", _run(small, "alexnet-small", "cifar10", 30, 20_000, 0.01, 4), (0.48,))]
    if not request.lacks("cifar100"):
        template = _run(deep, "resnet110", "cifar100", 300, 50_000, 0.05, 20, request.precision)
        missing = "ResNet-50 was not trained, because it is made for larger images. ResNet-110 replaces it."
        return [*cases, DsspCase("ResNet-110", template, (0.65,), (missing,))]
    missing = f"ResNet-20 was trained on 20,000 images of CIFAR-10, for 30 epochs: {request.lacks('cifar100')}."
    template = _run(deep, "resnet20", "cifar10", 30, 20_000, 0.05, 4, request.precision)
    return [*cases, DsspCase("ResNet-20", template, (0.5,), (missing,))]


def _run(
    cluster: str,
    network: str,
    data: str,
    epochs: int,
    samples: int,
    rate: float,
    every: int,
    precision: Precision = "float32",
) -> Run:
    """Return a template with the paper's decay: the rate is multiplied by 0.1 after 2/3 and after 5/6 of the epochs."""
    workers = load_cluster(cluster).workers
    rounds = epochs * samples // sum(worker.batch for worker in workers)
    decay = ((epochs * 2 / 3, 0.1), (epochs * 5 / 6, 0.1))
    goal = Goal("accuracy", 1.1, every=every)  # out of reach, so that the run does not stop early
    return Run(cluster, "bsp", network, data, rate, rounds, samples, goal=goal, decay=decay, precision=precision)


def _seeds(request: Request, template: Run, policy: str) -> list[Trained]:
    wanted = [msgspec.structs.replace(template, policy=policy, seed=seed) for seed in request.seeds]
    found = request.runs(wanted)
    return [found[run] for run in wanted if run in found]


def _time(trained: Sequence[Trained], target: float) -> float | None:
    """Return the mean time to the target over the seeds; None if any seed missed it."""
    ends = [(each, each.reaches(Goal("accuracy", target))) for each in trained]
    times = [each.seconds[at] for each, at in ends if at is not None]
    return mean(times) if len(times) == len(trained) else None


def _accuracy(trained: Trained, name: str) -> PlotLine:
    points = sorted(trained.learned.accuracy.items())
    return PlotLine(name, tuple(trained.seconds[at] for at, _ in points), tuple(value for _, value in points))


PAPER = Paper(
    "dssp",
    TITLES["dssp"],
    (
        PaperFigure(
            "fig3",
            "Four equal workers: accuracy over time",
            fig3,
            ("fig3a", "fig3b", "fig3c", "fig3d", "fig3e", "fig3f"),
        ),
        PaperFigure("table1", "Two unequal GPUs: time to accuracy", table1, ("fig4",)),
    ),
)
