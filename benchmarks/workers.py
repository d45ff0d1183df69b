"""How the shipped network does with other numbers of workers, and deeper: on tiny networks, so that a CPU will do.

python benchmarks/workers.py --data DIR [--jobs 2]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from paceline.learn.instance import Instance, drawn
from paceline.learn.judge import FIXED, interval, judged, ratios
from paceline.workloads.data import load

INSTANCES, SEEDS = 36, 4
CASES = [(workers, (1, 2, 3)) for workers in (2, 5, 8, 10, 20)] + [(10, (6,))]


def instances(workers: int, depths: tuple[int, ...]) -> list[Instance]:
    every = [drawn(910_000 + at, workers, depths[at % len(depths)], size="tiny") for at in range(INSTANCES)]
    return [replace(each, budget=800, rate=each.rate / 2 if each.hidden > 3 else each.rate) for each in every]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="where MNIST lies")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    data = load("mnist", asked.data)
    for workers, depths in CASES:
        specs = (*FIXED, "rlp")
        ratio = ratios(judged(instances(workers, depths), SEEDS, specs, lambda _: data, jobs=asked.jobs))
        best = min(FIXED, key=lambda spec: float(ratio[spec].mean()))
        print(
            f"{workers} workers, {'-'.join(str(each) for each in sorted({depths[0], depths[-1]}))} hidden layers: "
            f"rlp {ratio['rlp'].mean():.3f} ± {interval(ratio['rlp']):.3f}, {ratio['rlp'].max():.2f} at most; "
            f"{best}, the best fixed one here, {ratio[best].mean():.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
