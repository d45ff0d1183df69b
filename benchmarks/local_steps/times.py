"""The simulated time of recorded runs, on a server whose link all workers share."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.local_steps.arms import arm_of
from benchmarks.local_steps.codecs import EXACT
from benchmarks.local_steps.records import Line
from benchmarks.local_steps.size import SIZES, WORKERS, Size
from benchmarks.local_steps.tables import at_best_rates, results
from benchmarks.output import Output
from paceline.model.codecs import encoded_size
from paceline.model.differences import way_back


def moments(arm: str, updates: str, size: Size, step_seconds: float, rate: float) -> dict[int, float]:
    """Return when the server has applied the exchanges after each step of the plan, in seconds.

    rate: of the server's link, in bytes a second and direction. It carries one push and one pull at a time, in the
    order of the plan. The workers' own links are faster. A worker waits during its exchange, and at no other time.
    """
    plan = arm_of(arm, size).plan
    made = np.concatenate([np.zeros((1, WORKERS), np.int64), np.cumsum(plan.steps >= 0, axis=0)])
    begins = np.argmax(plan.steps >= 0, axis=0)  # workers of staggered schedules begin later
    own = begins.astype(np.float64) * step_seconds  # the time of each worker
    seen = np.zeros(WORKERS, np.int64)  # the steps of the plan that this time includes

    def reach(worker: int, at: int) -> float:
        """Let a worker compute up to a step of the plan, and return its time then."""
        own[worker] += (made[at, worker] - made[seen[worker], worker]) * step_seconds
        seen[worker] = at
        return float(own[worker])

    pushes_end = pulls_end = 0.0
    found = {0: 0.0}
    for at in sorted(plan.exchanges):
        for each in plan.exchanges[at]:
            count = each.part.stop - each.part.start
            push, pull = (encoded_size(codec, count) / rate for codec in (updates, way_back(updates)))
            for worker in range(each.pushing.start, each.pushing.stop):
                pushes_end = own[worker] = max(reach(worker, at), pushes_end) + push
            for worker in range(each.pulling.start, each.pulling.stop):
                pulls_end = own[worker] = max(reach(worker, at), pushes_end, pulls_end) + pull
        found[at] = pushes_end
    return found


def curve_in_time(line: Line, step_seconds: float, rate: float) -> list[tuple[float, float]]:
    """Return the loss by seconds."""
    when = moments(line["arm"], line["updates"], SIZES[line["size"]], step_seconds, rate)
    applied = sorted(when)
    at = {step: when[max(each for each in applied if each <= step)] for step, _ in line["curve"]}
    return [(at[step], loss) for step, loss in line["curve"]]


def seconds_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return the time at which a curve reaches a loss, interpolated; None: never."""
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= target:
            return after if high <= low else before + (after - before) * (high - target) / (high - low)
    return None


def time_table(
    lines: Sequence[Line], step_seconds: Sequence[float], megabits: float, out: Output, target: float | None = None
) -> None:
    """Print the time to a loss, for each time of a step. target: the loss; None: that of plain `sync`, seed by seed."""
    found = at_best_rates(results(lines))
    sync = next((each for each in found if each.arm == "sync" and each.updates == EXACT and each.losses), None)
    if sync is None:
        raise ValueError("the time to the loss of `sync` needs a run of `sync` in float32")
    targets = {seed: loss if target is None else target for seed, loss in sync.by_seed.items()}
    rate = megabits * 1e6 / 8
    rows: list[list[object]] = []
    for result in found:
        cells: list[object] = [result.arm, result.updates]
        of_seeds = [line for line in result.lines if line["seed"] in targets and line["loss"] is not None]
        for step in step_seconds:
            curves = [curve_in_time(line, step, rate) for line in of_seeds]
            times = [seconds_to(curve, targets[line["seed"]]) for curve, line in zip(curves, of_seeds, strict=True)]
            reached = [each for each in times if each is not None]
            shown = f"{statistics.mean(reached):,.0f}" if reached else "not reached"
            if 0 < len(reached) < len(times):
                shown += f" ({len(reached)} of {len(times)} seeds)"
            all_of = f"{statistics.mean(curve[-1][0] for curve in curves):,.0f}" if curves else "diverged"
            cells += [shown, all_of]
        rows.append(cells)
    heads = ["arm", "updates"]
    for step in step_seconds:
        heads += [f"s to {'the loss of sync' if target is None else target}, {step:g} s a step", "s in all"]
    out.table(f"Simulated: a server's link of {megabits:g} Mbit/s, {WORKERS} workers", heads, rows)
