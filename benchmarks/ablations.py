"""Ablations of RLP's training: each variant is trained several times on digits, which two cores can do in an hour.

python benchmarks/ablations.py measure [ROW ...] [--seeds 3] [--episodes 12288] [--jobs 2]    # train and evaluate
python benchmarks/ablations.py                                     # print docs/results/rlp-ablations.jsonl

ROW: words with which the names of the rows to measure begin; by default, all rows. Their new results replace the old
ones. Seeds vary the training. All networks are evaluated on the same hundred instances, which are not used for
training.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch

from paceline.rlp import dqn
from paceline.rlp.evaluate import FIXED, judged, ratios
from paceline.rlp.features import StateFeatures
from paceline.rlp.instance import Instance, drawn
from paceline.rlp.learner import LearnerSettings, RuleLearner
from paceline.rlp.network_file import save
from paceline.rlp.process_pool import pool_of, table
from paceline.rlp.rule_network import weights_of
from paceline.workloads.data import load

Line = dict[str, Any]
KEPT = Path(__file__).parents[1] / "docs" / "results" / "rlp-ablations.jsonl"
DEPTHS = (0, 1)
PAPERS_EPISODES = 512  # few, because the paper's learner makes a step for every update
RUNS_PER_INSTANCE = 10  # runs of every network on every instance
OURS = LearnerSettings(instances=256, depths=DEPTHS, size="bundled", budget=600, links=False)
PAPERS = dqn.DqnSettings(depths=DEPTHS, size="bundled", budget=600)
ROWS: dict[str, LearnerSettings | dqn.DqnSettings] = {
    "as it is": OURS,
    "no pre-training": replace(OURS, pretrained=False),
    "a validation batch's loss": replace(OURS, state=StateFeatures(validated=True)),
    "H = 1": replace(OURS, state=StateFeatures(history=1)),
    "the paper's state alone": replace(OURS, state=StateFeatures(scene=False)),
    "a ring as well": replace(OURS, ring=True),
    "the paper's learner": PAPERS,
    "the paper's learner, double Q, memory 5,000, γ = 0.99": replace(PAPERS, double=True, memory=5000, discount=0.99),
}


def instances() -> list[Instance]:
    every = [drawn(number, hidden=DEPTHS[number % len(DEPTHS)], size="bundled") for number in range(100)]
    return [replace(each, budget=OURS.budget) for each in every]


def learn(job: tuple[LearnerSettings | dqn.DqnSettings, int, Path]) -> Path:
    """Train a network in a worker process, and save it. Return its path."""
    settings, episodes, path = job
    learner: RuleLearner | dqn.DqnLearner
    if isinstance(settings, LearnerSettings):
        learner = RuleLearner(settings, table("digits"))
        while learner.iteration * settings.instances * settings.times < episodes:
            learner.iterate()
    else:
        learner = dqn.DqnLearner(settings, table("digits"))
        learner.pretrain()
        learner.learn(PAPERS_EPISODES)
        save(learner.weights(), path)
        return path
    save(weights_of(learner.network, settings.state, settings.rules), path)
    return path


def measure(args: argparse.Namespace) -> list[Line]:
    """Train all variants with all seeds. Return the ratio to the best fixed policy on every instance."""
    data = load("digits")
    with TemporaryDirectory() as folder, pool_of(max(args.jobs, 2), {"digits": data}) as pool:
        assert pool is not None
        chosen = [row for row in ROWS if not args.rows or row.startswith(tuple(args.rows))]
        courses = [(row, seed) for seed in range(args.seeds) for row in chosen]
        tasks = [
            (replace(ROWS[row], seed=seed), args.episodes, Path(folder) / f"{at}.safetensors")
            for at, (row, seed) in enumerate(courses)
        ]
        networks = []
        for path in pool.map(learn, tasks):
            networks.append(path)
            print(f"learned {len(networks)} of {len(tasks)}: {courses[len(networks) - 1][0]}", flush=True)
        specs = [*FIXED, *(f"rlp:network={path}" for path in networks)]
        found = ratios(judged(instances(), RUNS_PER_INSTANCE, specs, lambda _: data, jobs=args.jobs))
    lines: list[Line] = [{"row": spec, "seed": None, "ratios": _short(found[spec])} for spec in FIXED]
    for (row, seed), path in zip(courses, networks, strict=True):
        lines.append({"row": row, "seed": seed, "ratios": _short(found[f"rlp:network={path}"])})
    return lines


def _short(ratio: Any) -> list[float]:
    return [float(f"{each:.4g}") for each in ratio]


def half(values: list[float]) -> float:
    """Return half the width of the 95% confidence interval of the mean, for normally distributed values."""
    few = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}  # Student's t
    return few.get(len(values), 1.96) * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def show(lines: list[Line]) -> None:
    for line in lines:
        if line["seed"] is None:
            print(f"{line['row']:56} {mean(line['ratios']):.3f}")
    means = {(line["row"], line["seed"]): mean(line["ratios"]) for line in lines if line["seed"] is not None}
    for row in dict.fromkeys(row for row, _ in means):
        each = {seed: value for (name, seed), value in means.items() if name == row}
        more = [value - means["as it is", seed] for seed, value in each.items() if ("as it is", seed) in means]
        change = f"{mean(more):+.3f} ± {half(more):.3f}" if row != "as it is" else ""
        values = ", ".join(f"{value:.3f}" for value in each.values())
        print(f"{row:56} {mean(each.values()):.3f} {change:16} ({values})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure", "show"), default="show")
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=12_288)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=KEPT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "measure":
        new = measure(args)
        known = {line["row"] for line in new}
        old = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
        lines = [line for line in old if line["row"] not in known] + new
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    show([json.loads(line) for line in args.out.read_text().splitlines()])


if __name__ == "__main__":
    main()
