"""The table of losses and bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.local_steps.codecs import EXACT
from benchmarks.local_steps.records import Line
from benchmarks.output import Output
from paceline.model.codecs import encoded_size


@dataclass(frozen=True)
class Result:
    """The runs of an arm at one rate."""

    arm: str
    updates: str
    rate: float
    lines: list[Line]  # one for each seed

    @property
    def by_seed(self) -> dict[int, float]:
        """The loss by seed, without diverged runs."""
        return {line["seed"]: line["loss"] for line in self.lines if line["loss"] is not None}

    @property
    def losses(self) -> list[float]:
        return list(self.by_seed.values())


def results(lines: Sequence[Line]) -> list[Result]:
    """Return the results in the order of the lines. The rates of an arm follow each other."""
    if len({line["size"] for line in lines}) > 1:
        raise ValueError("the runs have several sizes; a table compares runs of one size")
    kinds: dict[tuple[str, str], dict[float, list[Line]]] = {}
    for line in lines:
        kinds.setdefault((line["arm"], line["updates"]), {}).setdefault(line["rate"], []).append(line)
    return [
        Result(arm, updates, rate, sorted(found, key=lambda line: line["seed"]))
        for (arm, updates), rates in kinds.items()
        for rate, found in sorted(rates.items())
    ]


def at_best_rates(found: Sequence[Result]) -> list[Result]:
    """Return the results with the best rate of each arm. It has the lowest loss on the first seed."""
    best: dict[tuple[str, str], Result] = {}
    for each in found:
        before = best.setdefault((each.arm, each.updates), each)
        if _first_loss(each) < _first_loss(before):
            best[each.arm, each.updates] = each
    return list(best.values())


def _first_loss(result: Result) -> tuple[int, float]:
    """Return the first seed of a result and its loss: a rate that was not tried on the first seed is not the best."""
    loss = result.lines[0]["loss"]
    return result.lines[0]["seed"], math.inf if loss is None else loss


def byte_ratio(line: Line) -> float:
    """Return the ratio of bytes: an exchange at every step in float32, to this run. Both count both ways."""
    every_step = 2 * line["steps"] * encoded_size(EXACT, line["elements"])
    return float(every_step / (line["pushed"] + line["pulled"]))


def loss_table(lines: Sequence[Line], out: Output) -> None:
    """Print the loss of each arm and rate, and its gap to the best synchronous arm."""
    found = results(lines)
    base = best_synchronous(at_best_rates(found))
    rows: list[list[object]] = []
    for result in found:
        cells: list[object] = [result.arm, result.updates, f"{result.rate:g}", str(len(result.losses))]
        if result.losses:
            mean = statistics.mean(result.losses)
            spread = f"{statistics.stdev(result.losses):.4f}" if len(result.losses) > 1 else ""
            gap = _gap(result, base) if base else ""
            cells += [f"{mean:.4f}", spread, gap, f"1/{byte_ratio(result.lines[0]):.0f}"]
        else:
            cells += ["diverged", "", "", ""]
        rows.append(cells)
    heads = ("arm", "updates", "rate", "seeds", "loss", "spread", "gap", "bytes")
    out.table("Validation loss in nats a byte, mean of the seeds", heads, rows)
    print("\ngap: to the best synchronous arm in float32, on the seeds that both have.")
    print("bytes: in units of an exchange at every step in float32.")


def best_synchronous(found: Iterable[Result]) -> Result | None:
    """Return the synchronous arm in float32 with the lowest mean loss, among those of usual length."""
    synchronous = [each for each in found if each.arm.split("+")[0] == "sync" and "rounds:" not in each.arm]
    plain = [each for each in synchronous if each.updates == EXACT and each.losses]
    return min(plain, key=lambda each: statistics.mean(each.losses), default=None)


def _gap(result: Result, base: Result) -> str:
    """Return the mean difference of two arms' losses on the seeds that both have."""
    pairs = [(loss, base.by_seed[seed]) for seed, loss in result.by_seed.items() if seed in base.by_seed]
    return f"{statistics.mean(ours - theirs for ours, theirs in pairs):+.4f}" if pairs else ""
