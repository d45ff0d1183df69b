"""What cosines of updates look like, and whom which rule would blacklist (docs/decisions/0013-outliers.md).

    python benchmarks/outliers.py [--network mlp --dataset fashion-mnist --data DIR --rounds 40 --outliers 0.25]

A federation of 48 clients in three groups is trained without a filter; every rule is then tried on the cosines it had.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from paceline.federated.partition import Skew, dirichlet
from paceline.model.similarity import Products
from paceline.model.spec import OptimizerSpec
from paceline.policies import Apply, Update
from paceline.policies.filtered import Filtered
from paceline.policies.flr2sp import FLR2SP
from paceline.simulate import load_cluster, training
from paceline.simulate.task import Local, Task
from paceline.workloads.data import load

Cohort = list[tuple[int, float, float]]  # client, its cosine with the whole and with the others


class Collecting(FLR2SP):
    """Hears of cosines and judges nobody."""

    def measured(self, kind: str, subject: object, value: float, now: float):  # type: ignore[no-untyped-def]
        return []


def collected(asked: argparse.Namespace) -> tuple[list[Cohort], set[int]]:
    """The cosines of a run, Apply by Apply; and who the outliers are."""
    data = load(asked.dataset, asked.data)
    spec = load_cluster("fl-cnn")
    spec = replace(spec, workers=spec.workers[: asked.clients])
    alphas = Skew(asked.outliers).alphas(asked.clients, asked.seed)
    each = min(390, max(64, len(data.labels) // asked.clients))
    shares = training.Shares(dirichlet(data.labels, alphas, each, asked.seed), asked.seed)
    optimizer = OptimizerSpec("SGD", ({"lr": asked.rate},))
    task = Task(asked.network, data, optimizer, asked.seed, local=Local(asked.steps, 16))
    cohorts: list[Cohort] = []
    within: Any = training  # both kinds of cosines are wanted, and a policy hears of one
    products, apply = within.products, within.Training.apply
    seen: list[Products] = []

    def seen_too(*of: Any) -> Products:
        seen.append(products(*of))
        return seen[-1]

    def noted(self: training.Training, what: Apply, time: float) -> list[float]:
        found: list[float] = apply(self, what, time)
        if found:
            clients = [update.worker for update in what.updates]
            cohorts.append(list(zip(clients, seen[-1].cosines(False), seen[-1].cosines(True), strict=True)))
        return found

    within.products, within.Training.apply = seen_too, noted
    training.train(spec, Collecting(groups=asked.clients // 16), task, None, asked.rounds, shares=shares)
    return cohorts, {client for client, alpha in enumerate(alphas) if alpha < 1}


def tried(rule: Filtered, cohorts: list[Cohort]) -> set[int]:
    """Whom a rule would have blacklisted: it hears of the cosines of those whom it has not."""
    rule.granted = {client: 1 for cohort in cohorts for client, _, _ in cohort}
    for at, cohort in enumerate(cohorts):
        left = [entry for entry in cohort if entry[0] not in rule.blacklist]
        if len(left) >= 5:
            column = 2 if rule.compares == "others" else 1
            rule._judge({Update(entry[0], at, 0, 1, 0.0): entry[column] for entry in left}, float(at))
    return set(rule.blacklist)


RULES: dict[str, Callable[[], Filtered]] = {
    "below 0.5, three in a row, with the whole (the paper's)": lambda: Filtered(beta=0.5, relative=False, strikes=3),
    "below 0.3, three in a row, with the whole": lambda: Filtered(beta=0.3, relative=False, strikes=3),
    "the default": Filtered,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="mlp")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data", type=Path)
    for name, kind, usual in (("rounds", int, 30), ("clients", int, 48), ("steps", int, 20), ("seed", int, 0)):
        parser.add_argument(f"--{name}", type=kind, default=usual)
    parser.add_argument("--outliers", type=float, default=0.25)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--keep", type=Path, help="write the cosines there, to try rules on")
    cohorts, odd = collected(asked := parser.parse_args())
    if asked.keep:
        asked.keep.write_text(json.dumps({"cohorts": cohorts, "outliers": sorted(odd)}))
    others = asked.clients - len(odd)
    for name, part in (("first", cohorts[: len(cohorts) // 4]), ("last", cohorts[-len(cohorts) // 4 :])):
        for column, what in ((1, "the whole"), (2, "the others")):
            for who, wanted in (("outliers", True), ("others", False)):
                found = sorted(entry[column] for cohort in part for entry in cohort if (entry[0] in odd) == wanted)
                if found:
                    low, high = found[len(found) // 10], found[9 * len(found) // 10]
                    print(f"{name} quarter, with {what:10}: {who:8} {low:6.2f} {median(found):6.2f} {high:6.2f}")
    for name, rule in RULES.items():
        black = tried(rule(), cohorts)
        share = f"{len(black & odd) / len(odd):.0%}" if odd else "–"
        print(f"{name}: {share} of the outliers, {len(black - odd) / others:.0%} of the others")


if __name__ == "__main__":
    main()
