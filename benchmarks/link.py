"""Compares emulated links (`paceline run --link`) with the real, shaped links of a lab, for BSP and R²SP.

    python benchmarks/link.py [--workers 4] [--megabytes 2] [--link 200Mbit] [--compute 0.1] [--streamed] [--all]

Needs root, for the lab. Both run the same synthetic workers, by turns. The figure is the ratio of iteration times after
a warm-up of a quarter of the iterations. --all measures other sizes, rates and numbers of workers too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks.output import Output
from paceline.lab import run, synthetic_worker
from paceline.lab.hosts import hosts
from paceline.lab.namespaces import Lab
from paceline.lab.plan import LabPlan
from paceline.observe.observer import replay
from paceline.observe.summary import Summary
from paceline.observe.trace import Arrived, Event, from_line
from paceline.serve.environment import CONNECT, TOKEN, WORKER, address
from paceline.simulate import ClusterSpec, load_cluster, units
from paceline.simulate.cluster_spec import WorkerSpec

BATCH = 32


@dataclass(frozen=True)
class Case:
    """A cluster to measure: N equal workers and one server."""

    workers: int = 4
    megabytes: float = 2.0
    link: str = "200Mbit"
    compute: float = 0.1  # seconds
    iterations: int = 24
    streamed: bool = False  # streamed updates, and a shard beside each worker

    @property
    def worker(self) -> WorkerSpec:
        """A worker of this cluster."""
        return WorkerSpec(units.rate(self.link), BATCH, BATCH / self.compute)

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster, as a lab builds it."""
        workers = (self.worker,) * self.workers
        rate = units.rate(self.link)
        base = load_cluster("lab-1mb")
        spec = replace(base, model_bytes=1e6 * self.megabytes, workers=workers, servers=1, server_link=rate)
        return spec.colocated() if self.streamed else spec

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies to measure. Plain BSP cannot be streamed."""
        return ("bsp:pipeline=true", "r2sp") if self.streamed else ("bsp", "r2sp")


#: Other sizes, rates and numbers of workers.
OTHERS = (
    Case(megabytes=1),
    Case(megabytes=8, iterations=12),
    Case(link="50Mbit", iterations=12),
    Case(link="1Gbit", compute=0.05, iterations=60),
    Case(workers=2, iterations=32),
    Case(workers=8, iterations=16),
    Case(workers=8, megabytes=8, link="1Gbit", iterations=16),
    Case(streamed=True),
)


def in_lab(case: Case) -> dict[str, float]:
    """Return the iteration time of each policy in a lab."""
    plans = [LabPlan(policy, case.iterations, streamed=case.streamed) for policy in case.policies]
    with Lab(hosts(case.cluster)) as lab:
        return {plan.policy: iteration_seconds(run.run(lab, case.cluster, plan).events, case) for plan in plans}


def emulated(case: Case) -> dict[str, float]:
    """Return the iteration time of each policy under `paceline run --link`."""
    found = {}
    for policy in case.policies:
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.jsonl"
            command = [sys.executable, "-m", "paceline", "run", "--workers", str(case.workers), "--policy", policy]
            command += ["--colocate", "--apply", "streamed"] if case.streamed else []
            command += ["--link", case.link, "--trace", str(trace), __file__, "--work", f"--compute={case.compute}"]
            command += [f"--megabytes={case.megabytes}", f"--iterations={case.iterations}"]
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode:
                raise SystemExit(ran.stderr)
            events = [from_line(line) for line in trace.read_text().splitlines()]
        found[policy] = iteration_seconds(events, case)
    return found


def iteration_seconds(events: Iterable[Event], case: Case) -> float:
    """Return the mean iteration time from the end of the warm-up until the workers begin their last iteration."""
    summary = Summary(case.iterations // 4 * case.workers)
    left = (case.iterations - 1) * case.workers
    for event in events:
        replay([event], summary)
        left -= isinstance(event, Arrived)
        if not left:
            break
    return summary.report().mean_iteration_seconds


def work(case: Case) -> None:
    """Take part in a job as a synthetic worker. `paceline run` has set the environment."""
    number, token = int(os.environ[WORKER]), bytes.fromhex(os.environ[TOKEN])
    task = synthetic_worker.SyntheticTask(
        address(os.environ[CONNECT]), token, number, case.worker, 1e6 * case.megabytes, iterations=case.iterations
    )
    ours, theirs = Pipe()
    with ours:
        threading.Thread(target=ours.recv, daemon=True).start()  # the last model, which is larger than a pipe
        synthetic_worker.work(task, theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=Case.workers)
    parser.add_argument("--megabytes", type=float, default=Case.megabytes)
    parser.add_argument("--link", default=Case.link)
    parser.add_argument("--compute", type=float, default=Case.compute, help="seconds of computing in an iteration")
    parser.add_argument("--iterations", type=int, default=Case.iterations)
    parser.add_argument("--rounds", type=int, default=3, help="how often each of both is measured, by turns")
    parser.add_argument("--all", action="store_true", help="measure other sizes, rates and numbers of workers too")
    parser.add_argument("--streamed", action="store_true", help="streamed updates, and a shard beside each worker")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    first = Case(args.workers, args.megabytes, args.link, args.compute, args.iterations, args.streamed)
    if args.work:
        return work(first)
    for case in (first, *(OTHERS if args.all else ())):
        measured = [(in_lab(case), emulated(case)) for _ in range(args.rounds)]
        rows: list[list[object]] = []
        for policy in case.policies:
            lab, link = (median(each[which][policy] for each in measured) for which in (0, 1))
            ratios = [each[1][policy] / each[0][policy] for each in measured]
            rows.append([policy, lab, link, median(ratios), " ".join(f"{ratio:.3f}" for ratio in ratios)])
        title = f"{case.workers} workers, {case.megabytes} MB, {case.link}, {case.compute} s of computing"
        title += ", a shard beside each worker, streamed" if case.streamed else ""
        Output(None).table(title, ("policy", "lab, s", "--link, s", "--link / lab", "of each round"), rows)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
