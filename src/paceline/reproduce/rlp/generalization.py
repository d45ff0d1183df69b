"""RLP on clusters, networks and data that it was not trained on (fig. 3)."""

from __future__ import annotations

from dataclasses import replace

from paceline.reproduce.rlp.evaluation import (
    NO_MNIST,
    evaluated,
    extra_time_of_best_other,
    rlp_row,
    seeds_per_instance,
)
from paceline.reproduce.shared.request import Request
from paceline.reproduce.shared.rows import Figure
from paceline.rlp.evaluate import FIXED, interval, ratios
from paceline.rlp.instance import Instance, drawn

Case = tuple[str, float | None, int, int, str]  # name, the paper's per cent, workers, hidden layers, data set


def fig3(request: Request) -> Figure:
    """Evaluate RLP with other numbers of workers, a deeper network, another data set, and all three together."""
    if request.lacks("mnist"):
        return Figure("fig3", "Generalization", (), missing=(NO_MNIST,))
    missing = ["CIFAR-10 was not found, so its rows are left out."] if request.lacks_cifar else []
    count = 2 if request.quick else 20
    cases = _cases(request)
    instances = [
        _instance(800_000 + 1000 * at + each, workers, hidden, dataset)
        for at, (_, _, workers, hidden, dataset) in enumerate(cases)
        for each in range(count)
    ]
    # Few seeds are enough, because instances differ more than seeds do. Six hidden layers take long.
    seeds = min(8, seeds_per_instance(request))
    found = evaluated(request, instances, seeds, (*FIXED, "rlp"))
    rows, worst = [], 0.0
    for at, (name, paper, *_) in enumerate(cases):
        times = {spec: each.of(range(count * at, count * (at + 1))) for spec, each in found.items()}
        ratio = ratios(times)["rlp"]
        worst = max(worst, float(ratio.max()))
        what = f"{name}: RLP's time relative to the best fixed policy"
        note = f"± {interval(ratio):.2f}; maximum {float(ratio.max()):.2f}."
        rows.append(rlp_row("fig3", what, None, float(ratio.mean()), "×", request, note))
        what = f"{name}: extra time of the best other policy"
        rows.append(rlp_row("fig3", what, paper, extra_time_of_best_other(times), "%", request))
    what = "RLP's time relative to the best fixed policy, maximum"
    rows.append(rlp_row("fig3", what, None, worst, "×", request))
    return Figure("fig3", "Generalization", tuple(rows), missing=tuple(missing))


def _cases(request: Request) -> list[Case]:
    cases: list[Case] = [
        *((f"{workers} workers", None, workers, 1, "mnist") for workers in (2, 5, 8, 20)),
        ("6 hidden layers", 33.0, 10, 6, "mnist"),
    ]
    if request.lacks_cifar:
        return cases
    papers = {2: 69.0, 5: 19.0, 8: 20.0}
    cases.append(("CIFAR-10", 22.0, 10, 1, "cifar10"))
    cases += [
        (f"{workers} workers, 6 hidden layers, CIFAR-10", papers.get(workers), workers, 6, "cifar10")
        for workers in ((2,) if request.quick else (2, 5, 8, 20))
    ]
    return cases


def _instance(seed: int, workers: int, hidden: int, dataset: str) -> Instance:
    """Draw an instance of any regime, with a target and a learning rate that its network can manage."""
    made = drawn(seed, workers, hidden, dataset)
    if dataset == "cifar10":  # such a network reaches this accuracy there, and it has four times as many inputs
        made = replace(made, target=0.33, rate=made.rate / 4)
    return replace(made, rate=made.rate / 2) if hidden > 3 else made
