"""DSSP (Zhao et al., ICDCS 2019): a staleness threshold chosen at run time. Figures 3 and 4, and table I."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean

import msgspec

from paceline.reproduce.shared.accuracy import AccuracyCase, accuracy_line
from paceline.reproduce.shared.papers import Paper, PaperFigure
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import TITLES, Figure, Plot, Row
from paceline.reproduce.shared.runs import Run, Trained
from paceline.simulate import load_cluster
from paceline.simulate.task import Goal, Precision

DSSP = "dssp:low=3,high=15"  # the progress gap is within `high`, as the paper's text promises
STALENESS = f"{DSSP},bound=staleness"  # our own bound
PRINTED = f"{DSSP},bound=none"  # the paper's algorithm as printed, which the paper must have measured
#: Seconds to accuracy 0.67 and 0.68.
TABLE_1: dict[str, tuple[float | None, float | None]] = {
    "bsp": (6159.2, None),
    "asp": (2993.1, 3017.2),
    "ssp:staleness=3": (5678.2, None),
    "ssp:staleness=6": (5703.8, 6908.2),
    "ssp:staleness=15": (5564.9, 7255.6),
    PRINTED: (3016.4, 3046.3),
    STALENESS: (None, None),
    DSSP: (None, None),
}
THRESHOLDS = (3, 6, 9, 12, 15)
QUICK_THRESHOLDS = (3, 9, 15)
PLOTTED = "the paper only plots this"


def table1(request: Request) -> Figure:
    """Compare the time to a test accuracy on two unequal GPUs. In the paper: ResNet-110 on CIFAR-100, 0.67 and 0.68."""
    case = _mixed(request)
    found = {policy: trained for policy, trained in _trained(request, case.template, TABLE_1).items() if trained}
    rows = []
    for column, target in enumerate(case.targets):
        asp, papers_asp = _time(found.get("asp", []), target), TABLE_1["asp"][column]
        for policy, trained in found.items():
            ours = _time(trained, target)
            paper = TABLE_1[policy][column]
            ratio = None if ours is None or not asp else round(ours / asp, 3)
            papers_ratio = None if not paper or not papers_asp else round(paper / papers_asp, 3)
            took = f"seeds: {len(trained)}, {trained[0].iteration_seconds:.3f} s per iteration"
            note = "; ".join(filter(None, (_reached(trained, target), _same(trained, found, policy), took)))
            what = f"{case.title}: {policy}, time to accuracy {target:g}"
            rows.append(Row("table1", what, paper, None if ours is None else round(ours, 1), "s", request.where, note))
            rows.append(Row("table1", what, papers_ratio, ratio, "× ASP", request.where, ""))
    curves = tuple(accuracy_line(trained[0], policy) for policy, trained in found.items())
    plot = Plot(f"{case.title}: accuracy over time (fig. 4)", "seconds", "test accuracy", curves)
    return Figure("table1", "Two unequal GPUs: time to accuracy (table I, fig. 4)", tuple(rows), (plot,), case.missing)


def fig3(request: Request) -> Figure:
    """Compare BSP, ASP, DSSP, and the mean of SSP with thresholds from 3 to 15, on four workers, one with the server.

    All are equal machines. The worker on the server's machine does not use the network, so thresholds bind.
    """
    rows: list[Row] = []
    plots: list[Plot] = []
    missing: list[str] = []
    ssps = ssps_of(request)
    for case in _equal(request):
        missing += case.missing
        found = _trained(request, case.template, ("bsp", "asp", DSSP, STALENESS, PRINTED, *ssps))
        if any(len(trained) < len(request.seeds) for trained in found.values()):
            missing.append(f"{case.title}: not all trainings were done.")
            continue
        pooled = [trained for policy in ssps for trained in found[policy]]
        name = f"ssp, mean of {len(ssps)} thresholds"
        compared = {"bsp": found["bsp"], "asp": found["asp"], name: pooled}
        compared |= {policy: found[policy] for policy in (DSSP, STALENESS, PRINTED)}
        for policy, trained in compared.items():
            what = f"{case.title}: {policy}"
            same = _same(trained, found, policy)
            note = "; ".join(filter(None, (PLOTTED, same)))
            best = round(mean(each.best("accuracy") for each in trained), 4)
            rows.append(Row("fig3", f"{what}, best accuracy", None, best, "", request.where, note))
            end = round(mean(each.seconds[-1] for each in trained), 2)
            rows.append(Row("fig3", f"{what}, time for all rounds", None, end, "s", request.where, PLOTTED))
            for target in case.targets:
                ours = _time(trained, target)
                seconds = None if ours is None else round(ours, 2)
                note = _reached(trained, target) or PLOTTED
                rows.append(Row("fig3", f"{what}, time to {target:g}", None, seconds, "s", request.where, note))
        curves = [accuracy_line(trained[0], policy) for policy, trained in found.items()]
        plots.append(Plot(f"{case.title}: accuracy over time", "seconds", "test accuracy", tuple(curves)))
    shown = ", ".join(policy.partition("=")[2] for policy in ssps)
    missing.append(f"SSP has the thresholds {shown}. The paper's mean is over all thirteen from 3 to 15.")
    title = "Four equal workers, one on the server's machine: accuracy over time under each scheme"
    return Figure("fig3", title, tuple(rows), tuple(plots), tuple(dict.fromkeys(missing)))


def ssps_of(request: Request) -> tuple[str, ...]:
    """Return the SSPs that figure 3 trains."""
    return tuple(f"ssp:staleness={each}" for each in (QUICK_THRESHOLDS if request.quick else THRESHOLDS))


def _mixed(request: Request) -> AccuracyCase:
    cluster = "dssp-mixed"
    if request.quick or request.lacks_cifar:
        why = "--quick" if request.quick else request.lacks_cifar
        missing = f"ResNet-110 on CIFAR-100 was not trained ({why}). An MLP on the bundled digits replaces it."
        return AccuracyCase("MLP on digits", _run(cluster, "mlp", "digits", 54, 1437, 0.01, 4), (0.93,), (missing,))
    if not request.lacks("cifar100"):
        template = _run(cluster, "resnet110", "cifar100", 300, 50_000, 0.05, 50, request.precision)
        return AccuracyCase("ResNet-110", template, (0.67, 0.68))
    missing = f"ResNet-20 was trained on 10,000 images of CIFAR-10, for 30 epochs: {request.lacks('cifar100')}."
    template = _run(cluster, "resnet20", "cifar10", 30, 10_000, 0.05, 10, request.precision)
    return AccuracyCase("ResNet-20", template, (0.5, 0.55), (missing,))


def _equal(request: Request) -> list[AccuracyCase]:
    small, deep = "dssp-homogeneous-alexnet", "dssp-homogeneous-resnet"
    assumed = (
        "Links have the paper's 100 Gbit/s. Computing times and their variation are assumptions, because the paper "
        "gives none; the cluster's file explains them."
    )
    if request.quick or request.lacks_cifar:
        why = "--quick" if request.quick else request.lacks_cifar
        missing = f"AlexNet and ResNets were not trained ({why}). An MLP on the bundled digits replaces them."
        template = _run(small, "mlp", "digits", 40, 1437, 0.02, 4, decays=False)
        return [AccuracyCase("MLP on digits", template, (0.9,), (missing, assumed))]
    alexnet = (
        "AlexNet: 20 epochs of 20,000 images at a rate of 0.01 replace the paper's 300 epochs of 50,000 at 0.001, "
        "both without decay. The paper gives no widths; our network has 2.6 MB and is timed as one of 10 MB."
    )
    template = _run(small, "alexnet-small", "cifar10", 20, 20_000, 0.01, 10, decays=False)
    cases = [AccuracyCase("AlexNet, small", template, (0.5, 0.55), (alexnet, assumed))]
    if not request.lacks("cifar100"):
        template = _run(deep, "resnet110", "cifar100", 300, 50_000, 0.05, 50, request.precision)
        missing = "ResNet-50 was not trained, because it is made for larger images. ResNet-110 replaces it."
        return [*cases, AccuracyCase("ResNet-110", template, (0.65,), (missing,))]
    missing = (
        "ResNet-20, 20 epochs of 20,000 images of CIFAR-10 with decays after 2/3 and 5/6 of them, replaces ResNet-50 "
        f"and ResNet-110, 300 epochs of CIFAR-100: {request.lacks('cifar100')}."
    )
    template = _run(deep, "resnet20", "cifar10", 20, 20_000, 0.05, 20, request.precision)
    return [*cases, AccuracyCase("ResNet-20", template, (0.5, 0.6), (missing,))]


def _run(
    cluster: str,
    network: str,
    data: str,
    epochs: int,
    samples: int,
    rate: float,
    every: int,
    precision: Precision = "float32",
    decays: bool = True,
) -> Run:
    """Return a template. The paper's ResNets multiply the rate by 0.1 after 2/3 and after 5/6 of the epochs."""
    workers = load_cluster(cluster).workers
    rounds = epochs * samples // sum(worker.batch for worker in workers)
    decay = ((epochs * 2 / 3, 0.1), (epochs * 5 / 6, 0.1)) if decays else ()
    goal = Goal("accuracy", 1.1, every=every)  # out of reach, so that the run does not stop early
    return Run(cluster, "bsp", network, data, rate, rounds, samples, goal=goal, decay=decay, precision=precision)


def _trained(request: Request, template: Run, policies: Iterable[str]) -> dict[str, list[Trained]]:
    """Train all policies with all seeds, several at a time. Return the runs of each policy that were done."""
    wanted = {
        policy: [msgspec.structs.replace(template, policy=policy, seed=seed) for seed in request.seeds]
        for policy in policies
    }
    found = request.runs(run for runs in wanted.values() for run in runs)
    return {policy: [found[run] for run in runs if run in found] for policy, runs in wanted.items()}


def _times(trained: Sequence[Trained], target: float) -> list[float]:
    """Return the time to the target of each run that reached it."""
    ends = [(each, each.reaches(Goal("accuracy", target))) for each in trained]
    return [each.seconds[at] for each, at in ends if at is not None]


def _time(trained: Sequence[Trained], target: float) -> float | None:
    """Return the mean time to the target over the runs; None if any of them missed it."""
    times = _times(trained, target)
    return mean(times) if times and len(times) == len(trained) else None


def _reached(trained: Sequence[Trained], target: float) -> str:
    """Return how many runs reached the target, in words; empty if all of them did."""
    times = _times(trained, target)
    if len(times) == len(trained):
        return ""
    seeds = len({each.run.seed for each in trained})
    runs = "seeds" if seeds == len(trained) else "runs"
    after = f", after {mean(times):.1f} s on average" if times else ""
    best = max(each.best("accuracy") for each in trained)
    return f"reached by {len(times)} of {len(trained)} {runs}{after}; the best accuracy was {best:.3f}"


def _same(trained: Sequence[Trained], found: dict[str, list[Trained]], policy: str) -> str:
    """Return that a policy's runs are those of ASP, if they are: its threshold never binds, in none of the seeds."""
    if policy == "asp" or [each.learned.key for each in trained] != [each.learned.key for each in found.get("asp", [])]:
        return ""
    return "the same order of updates as asp: it never makes a worker wait"


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
