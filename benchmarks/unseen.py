"""The hundred unseen instances as they were recorded: python benchmarks/unseen.py [docs/results/rlp-unseen.jsonl]"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from statistics import mean, median, stdev

from paceline.learn.instance import unseen
from paceline.learn.judge import FIXED

KEPT = Path(__file__).parents[1] / "docs" / "results" / "rlp-unseen.jsonl"


def quickest(times: dict[str, float]) -> str:
    return min(times, key=lambda spec: times[spec])


def main() -> None:
    lines = [json.loads(line) for line in Path(sys.argv[1] if sys.argv[1:] else KEPT).read_text().splitlines()]
    seconds = {(each["instance"], each["policy"]): each["seconds"] for each in lines}
    reached = {(each["instance"], each["policy"]): all(each["reached"]) for each in lines}
    instances = range(len(unseen()))
    best = {at: quickest({spec: mean(seconds[at, spec]) for spec in FIXED}) for at in instances}
    wins = Counter(best.values())
    for spec in ("rlp", *FIXED):
        ratio = [mean(seconds[at, spec]) / mean(seconds[at, best[at]]) for at in instances]
        half = 1.96 * stdev(ratio) / math.sqrt(len(ratio))
        print(f"{spec:16} {mean(ratio):.3f} ± {half:.3f}, {max(ratio):.2f} at most; the best fixed of {wins[spec]}")
        if spec == "rlp":
            for hidden in range(4):
                some = [each for at, each in enumerate(ratio) if unseen()[at].hidden == hidden]
                print(f"{'':16} {hidden} hidden layers: {mean(some):.2f}")
    spread = [stdev(seconds[key]) / mean(seconds[key]) for key in seconds if reached[key] and key[1] != "rlp"]
    print(f"chance alone: {median(spread):.0%} of the time, from seed to seed")
    halves = []
    for at in instances:
        first, other = ({spec: mean(seconds[at, spec][part]) for spec in FIXED} for part in (slice(5), slice(5, None)))
        halves.append(other[quickest(first)] / min(other.values()))
    print(f"who knew the best fixed policy of five seeds, on five others: {mean(halves):.3f}")


if __name__ == "__main__":
    main()
