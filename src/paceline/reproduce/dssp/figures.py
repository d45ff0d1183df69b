"""DSSP (Zhao et al., ICDCS 2019): the staleness threshold chosen at run time. Fig. 3, and table I with fig. 4."""

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
UNBOUNDED = "dssp:low=3,high=15,bounded=false"
#: Seconds to accuracy 0.67 and 0.68. The paper's DSSP runs ahead for as long as its controller says, again and again:
#: ours with bounded=false.
TABLE_1: dict[str, tuple[float | None, float | None]] = {
    "bsp": (6159.2, None),
    "asp": (2993.1, 3017.2),
    "ssp:staleness=3": (5678.2, None),
    "ssp:staleness=6": (5703.8, 6908.2),
    "ssp:staleness=15": (5564.9, 7255.6),
    UNBOUNDED: (3016.4, 3046.3),
    DSSP: (None, None),
}
SSPS = tuple(f"ssp:staleness={threshold}" for threshold in range(3, 16))


@dataclass(frozen=True)
class DsspCase:
    """A network trained for so many epochs; accuracy is tested every few rounds."""

    title: str
    like: Run
    targets: tuple[float, ...]  # of accuracy on the test set
    missing: tuple[str, ...] = ()


def table1(ask: Request) -> Figure:
    """Two unequal GPUs: time to a test accuracy. The paper's: ResNet-110, CIFAR-100, 0.67 and 0.68."""
    case = _mixed(ask)
    found = {policy: trained for policy in TABLE_1 if (trained := _seeds(ask, case.like, policy))}
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
            took = f"seeds: {len(trained)}, {trained[0].iteration_seconds:.3f} s an iteration"
            note = took if ours is not None else f"not reached: the best accuracy was {best:.3f}; {took}"
            what = f"{case.title}: {policy}, time to accuracy {target:g}"
            rows.append(Row("table1", what, paper, None if ours is None else round(ours, 1), "s", ask.where, note))
            rows.append(Row("table1", what, papers_ratio, ratio, "× ASP's time", ask.where, ""))
    curves = tuple(_accuracy(trained[0], policy) for policy, trained in found.items())
    plot = Plot(f"{case.title}: accuracy over time (fig. 4)", "seconds", "test accuracy", curves)
    return Figure("table1", "Two unequal GPUs: time to accuracy (table I, fig. 4)", tuple(rows), (plot,), case.missing)


def fig3(ask: Request) -> Figure:
    """Four equal workers: BSP, ASP, DSSP and the mean of SSP with thresholds from 3 to 15."""
    rows: list[Row] = []
    plots: list[Plot] = []
    missing: list[str] = []
    for case in _equal(ask):
        missing += case.missing
        ssps = SSPS[::4] if ask.quick else SSPS
        found = {policy: _seeds(ask, case.like, policy) for policy in ("bsp", "asp", DSSP, *ssps)}
        if not all(found.values()):
            missing.append(f"{case.title}: not all trainings were done.")
            continue
        target = case.targets[0]
        times = {policy: _time(trained, target) for policy, trained in found.items()}
        of_ssps = [times[policy] for policy in ssps]
        together = [time for time in of_ssps if time is not None]
        times["ssp, mean"] = mean(together) if len(together) == len(of_ssps) else None
        best = {policy: mean(each.best("accuracy") for each in trained) for policy, trained in found.items()}
        best["ssp, mean"] = mean(best[policy] for policy in ssps)
        for policy in ("bsp", "asp", "ssp, mean", DSSP):
            what = f"{case.title}: {policy}"
            ours = times[policy]
            drawn = "the paper's is drawn only"
            rows.append(Row("fig3", f"{what}, best accuracy", None, round(best[policy], 4), "", ask.where, drawn))
            note = drawn if ours is not None else f"not reached: the best was {best[policy]:.3f}"
            seconds = None if ours is None else round(ours, 1)
            rows.append(Row("fig3", f"{what}, time to {target:g}", None, seconds, "s", ask.where, note))
        curves = [
            _accuracy(found[policy][0], policy) for policy in ("bsp", "asp", DSSP, *ssps[:: max(1, len(ssps) // 3)])
        ]
        plots.append(Plot(f"{case.title}: accuracy over time", "seconds", "test accuracy", tuple(curves)))
    title = "Four equal workers: accuracy over time under each scheme"
    return Figure("fig3", title, tuple(rows), tuple(plots), tuple(dict.fromkeys(missing)))


def _mixed(ask: Request) -> DsspCase:
    cluster = "dssp-mixed"
    if ask.quick or ask.lacks_cifar:
        why = "--quick" if ask.quick else ask.lacks_cifar
        said = f"ResNet-110 on CIFAR-100 was not trained ({why}): an MLP learns the bundled digits."
        return DsspCase("MLP on digits", _run(cluster, "mlp", "digits", 54, 1437, 0.01, 4), (0.93,), (said,))
    if not ask.lacks("cifar100"):
        like = _run(cluster, "resnet110", "cifar100", 300, 50_000, 0.05, 50, ask.precision)
        return DsspCase("ResNet-110", like, (0.67, 0.68))
    said = f"{ask.lacks('cifar100')}. ResNet-20 was trained on 10,000 images of CIFAR-10, for 30 epochs."
    like = _run(cluster, "resnet20", "cifar10", 30, 10_000, 0.05, 10, ask.precision)
    return DsspCase("ResNet-20", like, (0.5, 0.55), (said,))


def _equal(ask: Request) -> list[DsspCase]:
    small, deep = "dssp-homogeneous-alexnet", "dssp-homogeneous-resnet"
    if ask.quick or ask.lacks_cifar:
        why = "--quick" if ask.quick else ask.lacks_cifar
        said = f"AlexNet and ResNets were not trained ({why}): an MLP learns the bundled digits."
        return [DsspCase("MLP on digits", _run(small, "mlp", "digits", 60, 1437, 0.05, 2), (0.9,), (said,))]
    cases = [DsspCase("AlexNet, small", _run(small, "alexnet-small", "cifar10", 30, 20_000, 0.01, 4), (0.48,))]
    if not ask.lacks("cifar100"):
        of = _run(deep, "resnet110", "cifar100", 300, 50_000, 0.05, 20, ask.precision)
        said = "ResNet-50 was not trained: it is for larger images. ResNet-110 was."
        return [*cases, DsspCase("ResNet-110", of, (0.65,), (said,))]
    said = f"{ask.lacks('cifar100')}. ResNet-20 was trained on 20,000 images of CIFAR-10, for 30 epochs."
    of = _run(deep, "resnet20", "cifar10", 30, 20_000, 0.05, 4, ask.precision)
    return [*cases, DsspCase("ResNet-20", of, (0.5,), (said,))]


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
    """With the paper's decay: times 0.1 after two thirds of the epochs, and again after five sixths."""
    workers = load_cluster(cluster).workers
    rounds = epochs * samples // sum(worker.batch for worker in workers)
    decay = ((epochs * 2 / 3, 0.1), (epochs * 5 / 6, 0.1))
    goal = Goal("accuracy", 1.1, every=every)  # never reached: the whole run is of interest
    return Run(cluster, "bsp", network, data, rate, rounds, samples, goal=goal, decay=decay, precision=precision)


def _seeds(ask: Request, like: Run, policy: str) -> list[Trained]:
    wanted = [msgspec.structs.replace(like, policy=policy, seed=seed) for seed in ask.seeds]
    found = ask.runs(wanted)
    return [found[run] for run in wanted if run in found]


def _time(trained: Sequence[Trained], target: float) -> float | None:
    """The mean over the seeds; None unless all reached it."""
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
