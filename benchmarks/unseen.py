"""RLP on a hundred unseen instances: measure, or print recorded results.

python benchmarks/unseen.py [--hundred 2 3]          # print docs/results/rlp-unseen.jsonl
python benchmarks/unseen.py measure [POLICY ...] --data DIR [--device cuda] [--jobs 8] [--seeds 30] [--out FILE]

New results of a policy replace its results in the file. --hundred selects one or several of three sets of instances.
The first set was used to design the network's state, and the second led to a change of the training method. The third,
the default, is evaluated only after a network has been chosen with the other two.
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


def measured(args: argparse.Namespace, policies: list[str]) -> list[Line]:
    """Evaluate the policies. Return a line per policy and instance."""
    instances = instances_of(args.hundred)

    def progress(done: int, total: int) -> None:
        print(f"\r{done} of {total}", end="" if done < total else "\n", flush=True)

    times = judged(
        instances, args.seeds, policies, lambda name: load(name, args.data), args.device, progress, args.jobs
    )
    return [
        {
            "hundred": args.hundred[at // 100],
            "instance": at % 100,
            "policy": policy,
            "where": args.device,
            "reached": [int(each) for each in times[policy].reached[at]],
            "updates": times[policy].updates[at].tolist(),
            "seconds": [float(f"{each:.5g}") for each in times[policy].seconds[at]],
        }
        for policy in policies
        for at in range(len(instances))
    ]


def instances_of(hundreds: list[int]) -> list[Instance]:
    return [each for hundred in hundreds for each in unseen(hundred)]


def recorded(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fastest(times: dict[str, float]) -> str:
    return min(times, key=lambda spec: times[spec])


def show(lines: list[Line], hundreds: list[int]) -> None:
    offset = {hundred: 100 * at for at, hundred in enumerate(hundreds)}
    lines = [line for line in lines if line["hundred"] in offset]
    seconds = {(offset[each["hundred"]] + each["instance"], each["policy"]): each["seconds"] for each in lines}
    reached = {(offset[each["hundred"]] + each["instance"], each["policy"]): each["reached"] for each in lines}
    every = instances_of(hundreds)
    instances = range(len(every))
    best = {at: fastest({spec: mean(seconds[at, spec]) for spec in FIXED}) for at in instances}
    wins = Counter(best.values())
    counts = Counter(each["policy"] for each in lines)
    others = [policy for policy, count in counts.items() if count == len(every) and policy not in FIXED]
    for spec in (*others, *FIXED):
        ratio = [mean(seconds[at, spec]) / mean(seconds[at, best[at]]) for at in instances]
        half = 1.96 * stdev(ratio) / math.sqrt(len(ratio))
        share = mean(mean(reached[at, spec]) for at in instances)
        won = f"; the best fixed policy on {wins[spec]}" if spec in FIXED else ""
        print(
            f"{spec:16} {mean(ratio):.3f} ± {half:.3f}, {max(ratio):.2f} at most; {share:.0%} reached the target{won}"
        )
        if spec not in FIXED:
            for hidden in range(4):
                some = [each for at, each in enumerate(ratio) if every[at].hidden == hidden]
                print(f"{'':16} {hidden} hidden layers: {mean(some):.2f}")
    spread = [stdev(seconds[key]) / mean(seconds[key]) for key in seconds if all(reached[key]) and key[1] in FIXED]
    print(f"standard deviation over seeds: {median(spread):.0%} of the time (median)")
    seeds = len(seconds[0, FIXED[0]])
    halves = []
    for at in instances:
        parts = (slice(seeds // 2), slice(seeds // 2, None))
        first, other = ({spec: mean(seconds[at, spec][part]) for spec in FIXED} for part in parts)
        halves.append(other[fastest(first)] / min(other.values()))
    few, rest = seeds // 2, seeds - seeds // 2
    print(f"an oracle that picks the best fixed policy with {few} seeds, on {rest} others: {mean(halves):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure", "show"), default="show")
    parser.add_argument(
        "policies", nargs="*", help="such as rlp or rlp:network=FILE; default: rlp and all fixed policies"
    )
    parser.add_argument("--out", type=Path, default=KEPT)
    parser.add_argument("--hundred", type=int, nargs="+", choices=(1, 2, 3), default=[3])
    parser.add_argument("--data", type=Path, help="the folder with MNIST")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=30)
    args = parser.parse_args()
    lines = recorded(args.out)
    if args.what == "measure":
        policies = args.policies or [*FIXED, "rlp"]
        new = measured(args, policies)
        known = {(line["hundred"], line["policy"]) for line in new}
        lines = [line for line in lines if (line["hundred"], line["policy"]) not in known] + new
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    show(lines, args.hundred)


if __name__ == "__main__":
    main()
