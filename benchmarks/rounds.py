"""Measures in a lab how rounds of local steps use the links: docs/lab.md#rounds-of-local-steps.

    python benchmarks/rounds.py [CASE …] [--iterations N]

Needs root. Eight workers compute for 2 s (10 steps; in the case `long` for 10 s), and then exchange a model of 10 MB
over links of 100 Mbit/s. The policies of a case are measured one after the other in the same lab.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks.output import Output
from paceline.cli.lab import measured_figures
from paceline.lab import run
from paceline.lab.hosts import hosts
from paceline.lab.namespaces import Lab
from paceline.lab.plan import LabPlan, LabResult
from paceline.lab.round_use import sampling_seconds
from paceline.simulate import ClusterSpec
from paceline.simulate.cluster_spec import WorkerSpec

MBIT = 1e6 / 8
WORKERS, STEPS, BATCH = 8, 10, 32


@dataclass(frozen=True)
class Case:
    """A cluster, and the policies to measure on it. The first policy is what the others are compared with."""

    updates: str = ""
    overlap: bool = False
    hub: float = 100.0  # Mbit/s of the server's link
    slow: int = 0  # workers that are four times slower
    seconds: float = 2.0  # of computing in a round
    policies: Sequence[str] = ("bsp", "r2sp")

    @property
    def spec(self) -> ClusterSpec:
        fast = WorkerSpec(100 * MBIT, BATCH, STEPS * BATCH / self.seconds)
        slow = replace(fast, samples_per_second=fast.samples_per_second / 4)
        workers = (fast,) * (WORKERS - self.slow) + (slow,) * self.slow
        spec = ClusterSpec("rounds", 10e6, 1, self.hub * MBIT, 0.0, 10e9, 30.0, workers)
        return replace(spec, local_steps=STEPS, updates=self.updates, overlap=self.overlap)


UNEQUAL = ("bsp", "bsp:tune_batches=true", "r2sp:tune_batches=true", "asp")

CASES = {
    "topk": Case("topk:0.02"),
    "int4": Case("int4"),
    "long": Case("int4", seconds=10.0),
    "overlap": Case("int8", overlap=True),
    "wide": Case("int4", hub=1000.0),
    "float32": Case(),
    "unequal": Case("int4", slow=1, policies=UNEQUAL),
}


def measure(title: str, case: Case, iterations: int) -> None:
    """Measure the policies of a case, and print a table."""
    spec, results = case.spec, dict[str, LabResult]()
    with Lab(hosts(spec)) as lab:
        for policy in case.policies:
            plan = LabPlan(policy, iterations, sampled=sampling_seconds(spec))
            results[policy] = run.run(lab, spec, plan)
            print(f"{policy}: {results[policy].report.mean_iteration_seconds:.2f} s", file=sys.stderr, flush=True)
    figures = {policy: measured_figures(spec, policy, result) for policy, result in results.items()}
    first = case.policies[0]
    rows: list[list[object]] = []
    for policy, result in results.items():
        report, found, base = result.report, figures[policy], figures[first]
        peaks, others = found.peak_rates or (0.0, 0.0), base.peak_rates or (1.0, 1.0)
        waits = "" if found.waiting is None else f"{found.waiting:.1%}"
        cells: list[object] = [policy, report.mean_iteration_seconds, f"{found.mean_idle:.1%}", waits]
        for peak, other in zip(peaks, others, strict=True):
            cells += [f"{peak / MBIT:.0f} ({peak / other:.2f})"]
        gain = report.samples_per_second / results[first].report.samples_per_second
        rows.append([*cells, f"{report.samples_per_second:.0f} ({gain:.2f})", report.max_staleness])
    heads = (
        "policy",
        "s a round",
        "idle",
        "waits",
        "peak in, Mbit/s (×)",
        "peak out (×)",
        "samples/s (×)",
        "staleness",
    )
    updates = f"{spec.update_bytes / 1e6:.3g} MB ({case.updates or 'float32'})"
    overlapped = ", overlapped" if case.overlap else ""
    slow = f", {case.slow} worker four times slower" if case.slow else ""
    Output(None).table(f"{title}: updates of {updates}{overlapped}, a hub of {case.hub:g} Mbit/s{slow}", heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all if none is given")
    parser.add_argument("--iterations", type=int, default=24, help="rounds of each worker, on average")
    args = parser.parse_args()
    for name in args.cases or CASES:
        if name not in CASES:
            parser.error(f"{name!r} is no case: {', '.join(CASES)}")
        measure(name, CASES[name], args.iterations)


if __name__ == "__main__":
    main()
