"""A hundred unseen instances: measure, or print what was recorded.

python benchmarks/unseen.py [--hundred 2 3]          # what docs/results/rlp-unseen.jsonl says
python benchmarks/unseen.py measure [POLICY ...] --data DIR [--device cuda] [--jobs 8] [--seeds 30] [--out FILE]

What is measured replaces what the file says of that policy. --hundred: one of three, or several together. The first was
looked at while the network's state was worked out, the second led to another way of learning, and the third, which is
taken unless others are asked for, is looked at once a network has been chosen by the other two.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from paceline.rlp.evaluate import FIXED, judged
from paceline.rlp.instance import Instance, unseen
from paceline.workloads.data import load

KEPT = Path(__file__).parents[1] / "docs" / "results" / "rlp-unseen.jsonl"
Line = dict[str, Any]


def measured(asked: argparse.Namespace, policies: list[str]) -> list[Line]:
    instances = of(asked.hundred)

    def say(done: int, of: int) -> None:
        print(f"\r{done} of {of}", end="" if done < of else "\n", flush=True)

    times = judged(instances, asked.seeds, policies, lambda name: load(name, asked.data), asked.device, say, asked.jobs)
    return [
        {
            "hundred": asked.hundred[at // 100],
            "instance": at % 100,
            "policy": policy,
            "where": asked.device,
            "reached": [int(each) for each in times[policy].reached[at]],
            "updates": times[policy].updates[at].tolist(),
            "seconds": [float(f"{each:.5g}") for each in times[policy].seconds[at]],
        }
        for policy in policies
        for at in range(len(instances))
    ]


def of(hundreds: list[int]) -> list[Instance]:
    return [each for hundred in hundreds for each in unseen(hundred)]


def recorded(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def quickest(times: dict[str, float]) -> str:
    return min(times, key=lambda spec: times[spec])


def show(lines: list[Line], hundreds: list[int]) -> None:
    since = {hundred: 100 * at for at, hundred in enumerate(hundreds)}
    lines = [line for line in lines if line["hundred"] in since]
    seconds = {(since[each["hundred"]] + each["instance"], each["policy"]): each["seconds"] for each in lines}
    reached = {(since[each["hundred"]] + each["instance"], each["policy"]): each["reached"] for each in lines}
    every = of(hundreds)
    instances = range(len(every))
    best = {at: quickest({spec: mean(seconds[at, spec]) for spec in FIXED}) for at in instances}
    wins = Counter(best.values())
    counts = Counter(each["policy"] for each in lines)
    others = [policy for policy, count in counts.items() if count == len(every) and policy not in FIXED]
    for spec in (*others, *FIXED):
        ratio = [mean(seconds[at, spec]) / mean(seconds[at, best[at]]) for at in instances]
        half = 1.96 * stdev(ratio) / math.sqrt(len(ratio))
        there = mean(mean(reached[at, spec]) for at in instances)
        won = f"; the best fixed of {wins[spec]}" if spec in FIXED else ""
        print(f"{spec:16} {mean(ratio):.3f} ± {half:.3f}, {max(ratio):.2f} at most; {there:.0%} got there{won}")
        if spec not in FIXED:
            for hidden in range(4):
                some = [each for at, each in enumerate(ratio) if every[at].hidden == hidden]
                print(f"{'':16} {hidden} hidden layers: {mean(some):.2f}")
    spread = [stdev(seconds[key]) / mean(seconds[key]) for key in seconds if all(reached[key]) and key[1] in FIXED]
    print(f"chance alone: {median(spread):.0%} of the time, from seed to seed")
    seeds = len(seconds[0, FIXED[0]])
    halves = []
    for at in instances:
        parts = (slice(seeds // 2), slice(seeds // 2, None))
        first, other = ({spec: mean(seconds[at, spec][part]) for spec in FIXED} for part in parts)
        halves.append(other[quickest(first)] / min(other.values()))
    print(f"who knew the best fixed policy of {seeds // 2} seeds, on {seeds - seeds // 2} others: {mean(halves):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure", "show"), default="show")
    parser.add_argument("policies", nargs="*", help="such as rlp or rlp:network=FILE; all that are compared")
    parser.add_argument("--out", type=Path, default=KEPT)
    parser.add_argument("--hundred", type=int, nargs="+", choices=(1, 2, 3), default=[3])
    parser.add_argument("--data", type=Path, help="where MNIST lies")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=30)
    asked = parser.parse_args()
    lines = recorded(asked.out)
    if asked.what == "measure":
        policies = asked.policies or [*FIXED, "rlp"]
        new = measured(asked, policies)
        known = {(line["hundred"], line["policy"]) for line in new}
        lines = [line for line in lines if (line["hundred"], line["policy"]) not in known] + new
        asked.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    show(lines, asked.hundred)


if __name__ == "__main__":
    main()
