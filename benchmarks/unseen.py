"""RLP on a hundred unseen instances: draw, measure, or print recorded results.

python benchmarks/unseen.py [--hundred 2 3]          # print docs/results/rlp-unseen.jsonl
python benchmarks/unseen.py measure [POLICY ...] --data DIR [--device cuda] [--jobs 8] [--seeds 30] [--out FILE]
python benchmarks/unseen.py draw SEED                # draw a hundred with links: docs/results/rlp-drawn.json
python benchmarks/unseen.py measure --hundred drawn --part 1/3 --data DIR ...

New results of a policy replace its results in the file. --hundred selects one or several sets of instances. The first
set was used to design the network's state, and the second led to a change of the training method. The third, the
default, is evaluated only after a network has been chosen with the other two. "drawn" is the set that `draw` made: draw
it with a new seed once a network has been chosen, and never learn from it. On it, RLP is compared with the wider
yardstick (`paceline.rlp.evaluate.YARDSTICK`). --part k/n measures the k-th of n parts of these policies, because all of
them take long.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from paceline.rlp.evaluate import CORRECTED, FIXED, YARDSTICK, judged
from paceline.rlp.instance import Instance, drawn_hundred, from_plain, unseen
from paceline.workloads.data import load

RESULTS = Path(__file__).parents[1] / "docs" / "results"
KEPT, DRAWN = RESULTS / "rlp-unseen.jsonl", RESULTS / "rlp-drawn.json"
HIGH = 1.3  # a ratio above this is counted
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


def instances_of(hundreds: list[str]) -> list[Instance]:
    return [each for hundred in hundreds for each in (drawn() if hundred == "drawn" else unseen(int(hundred)))]


def draw(seed: int) -> None:
    """Draw a hundred instances with links, and write them to a file."""
    instances = [json.dumps(asdict(each)) for each in drawn_hundred(seed)]
    DRAWN.write_text(f'{{"seed": {seed}, "instances": [\n' + ",\n".join(instances) + "\n]}\n")
    print(f"Drawn with seed {seed}: {DRAWN}")


def drawn() -> list[Instance]:
    if not DRAWN.exists():
        raise SystemExit(
            f"{DRAWN} does not exist; draw it first, with a new seed: python benchmarks/unseen.py draw SEED"
        )
    return [from_plain(each) for each in json.loads(DRAWN.read_text())["instances"]]


def recorded(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fastest(times: dict[str, float]) -> str:
    return min(times, key=lambda spec: times[spec])


def show(lines: list[Line], hundreds: list[str]) -> None:
    offset = {hundred: 100 * at for at, hundred in enumerate(hundreds)}
    lines = [line for line in lines if str(line["hundred"]) in offset]
    keys = [(offset[str(line["hundred"])] + line["instance"], line["policy"]) for line in lines]
    seconds = {key: line["seconds"] for key, line in zip(keys, lines, strict=True)}
    reached = {key: line["reached"] for key, line in zip(keys, lines, strict=True)}
    every = instances_of(hundreds)
    instances = range(len(every))
    counts = Counter(each["policy"] for each in lines)
    policies = [policy for policy, count in counts.items() if count == len(every)]
    fixed = [policy for policy in YARDSTICK if policy in policies]
    if not fixed:
        raise SystemExit("No fixed policy was measured on all of these instances; measure one to compare with.")
    best = {at: fastest({spec: mean(seconds[at, spec]) for spec in fixed}) for at in instances}
    wins = Counter(best.values())
    with_momentum = Counter(best[at] for at in instances if every[at].momentum)
    for spec in (*(policy for policy in policies if policy not in fixed), *fixed):
        ratio = [mean(seconds[at, spec]) / mean(seconds[at, best[at]]) for at in instances]
        half = 1.96 * stdev(ratio) / math.sqrt(len(ratio))
        share = mean(mean(reached[at, spec]) for at in instances)
        high = mean(each > HIGH for each in ratio)
        won = f"; the best fixed policy on {wins[spec]}, {with_momentum[spec]} with momentum" if spec in fixed else ""
        print(
            f"{spec:24} {mean(ratio):.3f} ± {half:.3f}, {max(ratio):.2f} at most, {high:.0%} above {HIGH}; "
            f"{share:.0%} reached the target{won}"
        )
        if spec not in fixed:
            for name, some in groups_of(every).items():
                print(f"{'':24} {name}: {mean(ratio[at] for at in some):.3f} ({len(some)} instances)")
            for name, part in parts_of(fixed).items():
                of_part = [mean(seconds[at, spec]) / min(mean(seconds[at, each]) for each in part) for at in instances]
                high = mean(each > HIGH for each in of_part)
                print(f"{'':24} {name}: {mean(of_part):.3f} times the best of them, {high:.0%} above {HIGH}")
    print(f"{len(fixed)} fixed policies")
    spread = [stdev(seconds[key]) / mean(seconds[key]) for key in seconds if all(reached[key]) and key[1] in fixed]
    print(f"standard deviation over seeds: {median(spread):.0%} of the time (median)")
    show_fair(seconds, instances, policies, fixed)


def parts_of(fixed: list[str]) -> dict[str, list[str]]:
    """Return parts of a wider yardstick that the learned policy is also compared with, by name."""
    if len(fixed) <= len(FIXED):
        return {}
    uncorrected = [policy for policy in fixed if not policy.endswith(CORRECTED)]
    rules = [policy for policy in fixed if policy.startswith("rlp:rule=")]
    parts = {"policies of the papers": list(FIXED), "rules of RLP": rules, "policies without correction": uncorrected}
    named = {name: [policy for policy in part if policy in fixed] for name, part in parts.items()}
    return {f"{len(part)} {name}": part for name, part in named.items() if part}


def groups_of(every: list[Instance]) -> dict[str, list[int]]:
    """Return groups of instances that are reported separately, by name."""
    found: dict[str, list[int]] = {}
    for at, each in enumerate(every):
        found.setdefault(f"{each.hidden} hidden layers", []).append(at)
        found.setdefault(f"momentum {each.momentum:g}", []).append(at)
        per_round = each.transfer * each.workers
        slow = "less" if per_round < 1 else "more"
        name = f"links: a round's transfers take {slow} than a step" if per_round else "links: free"
        found.setdefault(name, []).append(at)
    return (
        dict(sorted(found.items()))
        if any(each.transfer for each in every)
        else {name: some for name, some in sorted(found.items()) if "hidden" in name}
    )


def show_fair(
    seconds: dict[tuple[int, str], list[float]], instances: range, policies: list[str], fixed: list[str]
) -> None:
    """Compare with an oracle that has picked the best fixed policy of each instance with the other half of the seeds.

    The best of many means is partly the best by chance, so a ratio to it is too high. A ratio to the oracle is not.
    Policies that were measured with another number of seeds are left out.
    """
    seeds = len(seconds[0, fixed[0]])
    policies = [policy for policy in policies if len(seconds[0, policy]) == seeds]
    parts = (slice(seeds // 2), slice(seeds // 2, None))
    others = [policy for policy in policies if policy not in fixed]
    oracle: list[float] = []
    ratio: dict[str, list[float]] = {policy: [] for policy in others}
    for pick, rest in (parts, parts[::-1]):
        for at in instances:
            chosen = fastest({spec: mean(seconds[at, spec][pick]) for spec in fixed})
            times = {spec: mean(seconds[at, spec][rest]) for spec in policies}
            oracle.append(times[chosen] / min(times[spec] for spec in fixed))
            for policy in others:
                ratio[policy].append(times[policy] / times[chosen])
    print(f"an oracle that picks the best fixed policy with half of {seeds} seeds, on the others: {mean(oracle):.3f}")
    for policy, each in ratio.items():
        print(f"{policy:24} {mean(each):.3f} times that oracle's time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure", "show", "draw"), default="show")
    parser.add_argument(
        "policies",
        nargs="*",
        help="such as rlp or rlp:network=FILE; default: rlp and all fixed policies; draw: the seed",
    )
    parser.add_argument("--out", type=Path, default=KEPT)
    parser.add_argument("--hundred", nargs="+", choices=("1", "2", "3", "drawn"), default=["3"])
    parser.add_argument("--part", default="1/1", help="of the policies: 2/3 is the second of three parts")
    parser.add_argument("--data", type=Path, help="the folder with MNIST")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=30)
    args = parser.parse_args()
    if args.what == "draw":
        draw(int(args.policies[0]))
        return
    lines = recorded(args.out)
    if args.what == "measure":
        fixed = YARDSTICK if "drawn" in args.hundred else FIXED
        part, parts = map(int, args.part.split("/"))
        policies = (args.policies or ["rlp", *fixed])[part - 1 :: parts]
        new = measured(args, policies)
        known = {(str(line["hundred"]), line["policy"]) for line in new}
        lines = [line for line in lines if (str(line["hundred"]), line["policy"]) not in known] + new
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    show(lines, args.hundred)


if __name__ == "__main__":
    main()
