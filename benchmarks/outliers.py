"""The cosines of updates, and the clients that each rule would blacklist (docs/decisions/0013-outliers.md).

    python benchmarks/outliers.py [--network mlp --dataset fashion-mnist --data DIR --rounds 40 --outliers 0.25]

A federation of 48 clients in three groups is trained without a filter. Every rule is then applied to its cosines.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

from paceline.federated.partition import Skew, dirichlet
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.policies import Update
from paceline.policies.contract import Decisions
from paceline.policies.filtered import Filtered
from paceline.policies.fl_r2sp import FLR2SP
from paceline.simulate import load_cluster
from paceline.simulate.task import LocalSettings, Task
from paceline.simulate.training import Shares, train
from paceline.workloads.data import load

Cohort = list[tuple[int, float]]  # client, and the cosine of its update with the sum


class Collecting(FLR2SP):
    """FL-R²SP that records cosines and blacklists nobody."""

    def __init__(self, groups: int) -> None:
        super().__init__(groups)
        self.recorded: list[Cohort] = []

    def _judge(self, cosines: dict[Update, float], now: float) -> Decisions:
        self.recorded.append([(update.worker, cosine) for update, cosine in cosines.items()])
        return []


def collected(args: argparse.Namespace) -> tuple[list[Cohort], set[int]]:
    """Train a federation. Return the cosines of every Apply, and the outliers."""
    data = load(args.dataset, args.data)
    spec = load_cluster("fl-cnn")
    spec = replace(spec, workers=spec.workers[: args.clients])
    alphas = Skew(args.outliers).alphas(args.clients, args.seed)
    each = min(390, max(64, len(data.labels) // args.clients))
    shares = Shares(dirichlet(data.labels, alphas, each, args.seed), args.seed)
    optimizer = OptimizerSpec("SGD", ({"lr": args.rate},))
    task = Task(args.network, data, optimizer, args.seed, local=LocalSettings(args.steps, 16))
    policy = Collecting(args.clients // args.group)
    train(spec, policy, task, None, args.rounds, shares=shares)
    return policy.recorded, {client for client, alpha in enumerate(alphas) if alpha < 1}


def blacklisted(rule: Filtered, cohorts: list[Cohort]) -> set[int]:
    """Return the clients that a rule blacklists. Cosines of blacklisted clients are left out."""
    rule.granted = {client: 1 for cohort in cohorts for client, _ in cohort}
    for at, cohort in enumerate(cohorts):
        left = {Update(client, at, 0, 1, 0.0): value for client, value in cohort if client not in rule.blacklist}
        if left:
            rule._judge(left, float(at))
    return set(rule.blacklist)


RULES: dict[str, Callable[[], Filtered]] = {
    "below 0.5, three in a row (the paper's)": lambda: Filtered(beta=0.5, relative=False, strikes=3),
    "below 0.3, three in a row": lambda: Filtered(beta=0.3, relative=False, strikes=3),
    "the default": Filtered,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="mlp")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data", type=Path)
    for name, kind, usual in (
        ("rounds", int, 30),
        ("clients", int, 48),
        ("steps", int, 20),
        ("seed", int, 0),
        ("group", int, 16),
    ):
        parser.add_argument(f"--{name}", type=kind, default=usual)
    parser.add_argument("--outliers", type=float, default=0.25)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--keep", type=Path, help="write the cosines to this file")
    cohorts, odd = collected(args := parser.parse_args())
    if args.keep:
        args.keep.write_text(json.dumps({"cohorts": cohorts, "outliers": sorted(odd)}))
    others = args.clients - len(odd)
    for name, part in (("first", cohorts[: len(cohorts) // 4]), ("last", cohorts[-len(cohorts) // 4 :])):
        for who, wanted in (("outliers", True), ("others", False)):
            found = sorted(value for cohort in part for client, value in cohort if (client in odd) == wanted)
            if found:
                low, high = found[len(found) // 10], found[9 * len(found) // 10]
                print(f"{name} quarter: {who:8} {low:6.2f} {median(found):6.2f} {high:6.2f}")
    for name, rule in RULES.items():
        black = blacklisted(rule(), cohorts)
        share = f"{len(black & odd) / len(odd):.0%}" if odd else "–"
        print(f"{name}: {share} of the outliers, {len(black - odd) / others:.0%} of the others")


if __name__ == "__main__":
    main()
