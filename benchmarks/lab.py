"""Measures the tables and plots of docs/benchmarks.md#the-lab.

    python benchmarks/lab.py [NAME …] [--plot FOLDER] [--iterations N]

Needs root. Figures are ratios within one run: the rows of a table are measured one after the other in the same lab.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks.output import Output
from paceline.advise.candidates import DDP
from paceline.lab import ddp_run, run
from paceline.lab.hosts import as_built, goodput, hosts
from paceline.lab.namespaces import Lab
from paceline.lab.plan import LabPlan, LabResult
from paceline.observe.driver import Fault
from paceline.observe.trace import Applied, Arrived, Identity, identities
from paceline.policies import make
from paceline.simulate import Cluster, ClusterSpec, limit_seconds, load_cluster
from paceline.simulate.cluster_writer import as_toml

TWO = ("lab-5mb", "lab-1mb")


class Bench(Output):
    """Runs jobs in a lab, prints tables, and draws plots."""

    def __init__(self, iterations: int, folder: Path | None) -> None:
        super().__init__(folder)
        self.iterations = iterations

    def run(self, lab: Lab, spec: ClusterSpec, policy: str, **options: Any) -> LabResult:
        """Run a job under the policy and return what was measured."""
        return run.run(lab, spec, LabPlan(policy, options.pop("iterations", self.iterations), **options))


def one_server(bench: Bench) -> None:
    """Compare policies with one server and whole updates: × floor, and speed-up over plain BSP."""
    for name in TWO:
        spec = load_cluster(name)
        rows: list[list[object]] = []
        with Lab(hosts(spec)) as lab:
            share = goodput(lab)
            policies = ("bsp", "bsp:pipeline=true", "r2sp:groups=3", "r2sp")
            results = {policy: bench.run(lab, spec, policy).report for policy in policies}
        for policy, report in results.items():
            built = as_built(spec, share, make(policy).pipelined)
            seconds = report.mean_iteration_seconds
            gain = results["bsp"].mean_iteration_seconds / seconds
            rows.append(
                [policy, seconds, seconds / limit_seconds(built, make(policy).pipelined), gain, report.max_staleness]
            )
        bench.table(f"{name}: one server", ("policy", "s per iteration", "× floor", "× bsp", "staleness ≤"), rows)


def colocated(bench: Bench) -> None:
    """Compare streamed R²SP, with a shard beside each worker, with DDP over gloo."""
    for name, overlap in (("lab-5mb", False), ("lab-1mb", False), ("lab-5mb", True)):
        spec = load_cluster(name).colocated()
        with Lab(hosts(spec)) as lab:
            share = goodput(lab)
            ours = bench.run(lab, spec, "r2sp", streamed=True, overlap=overlap, iterations=2 * bench.iterations)
            ddp = ddp_run.run(lab, spec, LabPlan(DDP, 2 * bench.iterations, overlap=overlap))
        floor = limit_seconds(as_built(spec, share, True), True, overlap)
        seconds, theirs = ours.report.mean_iteration_seconds, ddp.report.mean_iteration_seconds
        title = f"{name}: a shard beside each worker, streamed{', with overlap on both sides' if overlap else ''}"
        rows = [
            ["r2sp", seconds, seconds / floor, theirs / seconds, ours.cost.cpu_seconds_per_gigabyte],
            ["ddp", theirs, theirs / floor, 1.0, ddp.cost.cpu_seconds_per_gigabyte],
        ]
        bench.table(title, ("", "s per iteration", "× floor", "× ddp", "CPU s per GB"), rows)


def apart(bench: Bench) -> None:
    """Compare streamed policies over several shards on links that are always busy: × floor.

    The shards have hosts of their own. In the last cluster a shard runs beside each worker, and there are too many for
    visits.
    """
    base = load_cluster("lab-5mb")
    rows: list[list[object]] = []
    for workers, servers, size, link, policies in (
        (8, 8, 30e6, 12.5e6, PIPELINED),
        (4, 4, 6e6, 25e6, PIPELINED),
        (8, 2, 3e6, 25e6, PIPELINED),
        (12, 0, 3e6, 12.5e6, ("r2sp",)),
    ):
        worker = replace(base.workers[0], link=link, samples_per_second=100 * base.workers[0].batch)
        spec = replace(base, workers=(worker,) * workers, model_bytes=size, servers=servers or 1, server_link=link)
        spec = spec if servers else spec.colocated()
        with Lab(hosts(spec)) as lab:
            share = goodput(lab)
            floor = limit_seconds(as_built(spec, share, True), True)
            for policy in policies:
                seconds = bench.run(lab, spec, policy, streamed=True).report.mean_iteration_seconds
                rows.append([workers, servers or "beside", size / 1e6, 8e-6 * link, policy, seconds, seconds / floor])
    headings = ("workers", "shards", "MB", "Mbit/s", "policy", "s per iteration", "× floor")
    bench.table("Several shards, streamed, 0.01 s of computing", headings, rows)


PIPELINED = ("bsp:pipeline=true", "r2sp:groups=3", "r2sp")


def grid(bench: Bench) -> None:
    """Compare streamed R²SP, with a shard beside each worker, with DDP over gloo, from network-bound to compute-bound.

    X is the time in which a link carries the model once. "Allowed" is the ratio of the two floors: an all-reduce begins
    when all workers have computed, and a link carries 2(N−1)/N of the model in it.
    """
    X = GRID_BYTES / GRID_LINK
    rows: list[list[object]] = []
    for workers, part, described in grid_clusters():
        spec = described.colocated()
        with Lab(hosts(spec)) as lab:
            share = goodput(lab)
            ours = bench.run(lab, spec, "r2sp", streamed=True).report.mean_iteration_seconds
            ddp = ddp_run.run(lab, spec, LabPlan(DDP, bench.iterations)).report.mean_iteration_seconds
        built = as_built(spec, share, True)
        floor, crossing = limit_seconds(built, True), 2 * (workers - 1) / workers * X / share
        simulated = Cluster(built, make("r2sp"), 40, streamed=True).run().report.mean_iteration_seconds
        allowed = (part * X + crossing) / floor
        rows.append([workers, f"{part:g} X", ours, ours / floor, ours / simulated, ddp, ddp / ours, allowed])
    headings = ("workers", "compute", "r2sp", "× floor", "× simulated", "ddp", "ddp / r2sp", "allowed")
    title = f"{GRID_BYTES * 1e-6:.0f} MB at {GRID_LINK * 8e-6:.0f} Mbit/s: a shard beside each worker, streamed"
    bench.table(title, headings, rows)


GRID_BYTES, GRID_LINK = 5e6, 25e6


def grid_clusters() -> Iterator[tuple[int, float, ClusterSpec]]:
    """Yield a number of workers, their compute time in units of X, and the cluster, for each point of the grid."""
    base = load_cluster("lab-5mb")
    for workers in (2, 4, 8):
        for part in (0.25, 1.0, 4.0):
            rate = base.workers[0].batch / (part * GRID_BYTES / GRID_LINK)
            worker = replace(base.workers[0], link=GRID_LINK, samples_per_second=rate)
            spec = replace(base, workers=(worker,) * workers, model_bytes=GRID_BYTES, server_link=GRID_LINK)
            yield workers, part, spec


def unequal(bench: Bench) -> None:
    """Compare tuned batches with DDP when one worker of eight runs at half speed."""
    spec = load_cluster("lab-unequal").colocated()
    policy = "r2sp:tune_batches=true"
    with Lab(hosts(spec)) as lab:
        ours = bench.run(lab, spec, policy, streamed=True, iterations=4 * bench.iterations).report
        plan = LabPlan(DDP, bench.iterations)
        equal = ddp_run.run(lab, spec, plan).report
        same = ddp_run.run(lab, spec, plan, list(ours.batch_sizes.values())).report
    rows = [
        [
            name,
            report.mean_iteration_seconds,
            report.samples_per_second,
            ours.samples_per_second / report.samples_per_second,
        ]
        for name, report in ((policy, ours), ("ddp, equal batches", equal), ("ddp, the same batches", same))
    ]
    bench.table(
        "lab-unequal: one worker of eight at half speed", ("", "s per iteration", "samples/s", "r2sp's gain"), rows
    )


def rates(bench: Bench) -> None:
    """Measure R²SP's speed-up over BSP at other link rates (INFOCOM fig. 11).

    It is (c + 2X) / max(c + 2X/N, X), for c seconds of compute and X = N·S/B. It grows with slower links while X < c,
    and then falls towards 2 as the network takes all of the time.
    """
    base = load_cluster("lab-1mb")
    found: dict[float, list[tuple[object, float]]] = {}
    rows: list[list[object]] = []
    for seconds in (0.8, 0.2):
        for megabits in (100, 200, 400, 800):
            link = megabits * 1e6 / 8
            worker = replace(base.workers[0], link=link, samples_per_second=base.workers[0].batch / seconds)
            spec = replace(base, server_link=link, workers=(worker,) * len(base.workers))
            with Lab(hosts(spec)) as lab:
                bsp, r2sp = (bench.run(lab, spec, policy).report.mean_iteration_seconds for policy in ("bsp", "r2sp"))
            rows.append([seconds, megabits, bsp, r2sp, bsp / r2sp])
            found.setdefault(seconds, []).append((megabits, bsp / r2sp))
    bench.table("lab-1mb at other rates", ("s of compute", "Mbit/s", "bsp", "r2sp", "gain"), rows)
    curves = {f"{seconds} s of compute": gains for seconds, gains in found.items()}
    bench.lines("rates", "Mbit/s of every link", "BSP's time / R²SP's", curves)


def relax(bench: Bench) -> None:
    """Measure iteration and blocking time over the relaxation, with jitter (fig. 12)."""
    spec = load_cluster("lab-1mb").with_jitter(0.1)
    rows: list[list[object]] = []
    curves: dict[str, list[tuple[object, float]]] = {"iteration": [], "blocked": []}
    with Lab(hosts(spec)) as lab:
        for value in (0.05, 0.2, 0.4, 0.6, 0.8, 1.0):
            report = bench.run(lab, spec, f"r2sp:relax={value}").report
            rows.append([value, report.mean_iteration_seconds, report.blocking_seconds])
            curves["iteration"].append((value, report.mean_iteration_seconds))
            curves["blocked"].append((value, report.blocking_seconds))
    bench.table("lab-1mb with 10% jitter: the relaxation", ("relax", "s per iteration", "s blocked"), rows)
    bench.lines("relax", "relax", "seconds", curves)


def gaps(bench: Bench) -> None:
    """Measure the times between updates (fig. 8), and a worker's bandwidth during its transfers (fig. 9)."""
    spec = load_cluster("lab-5mb")
    found: dict[str, tuple[list[float], list[float]]] = {}
    with Lab(hosts(spec)) as lab:
        for policy in ("bsp", "asp", "ssp", "r2sp"):
            measured = bench.run(lab, spec, policy, sampled=0.01)
            times = [event.time for event in measured.events if isinstance(event, Arrived)]
            times = times[len(times) // 4 :]
            found[policy] = ([after - before for before, after in pairwise(times)], active_rates(measured, spec))
    rows = [
        [
            policy,
            float(np.percentile(between, 5)),
            float(np.median(between)),
            float(np.percentile(between, 95)),
            float(np.mean(rates)) * 8e-6,
        ]
        for policy, (between, rates) in found.items()
    ]
    headings = ("policy", "gap, 5%", "median", "95%", "Mbit/s while transferring")
    bench.table("lab-5mb: gaps between updates, and a worker's bandwidth", headings, rows)

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for policy, (between, rates) in found.items():
            for axis, values in ((left, between), (right, [8e-6 * rate for rate in rates])):
                axis.plot(np.sort(values), np.linspace(0, 1, len(values)), label=policy)
        left.set_xlabel("seconds between updates")
        right.set_xlabel("Mbit/s of a worker that transfers")
        left.set_ylabel("share")
        right.legend(frameon=False)

    bench.figure("gaps", draw)


def active_rates(measured: LabResult, spec: ClusterSpec) -> list[float]:
    """Return the bytes per second of every worker in every sample in which it transferred."""
    found = []
    for number, samples in measured.carried.items():
        for (t0, *before), (t1, *after) in pairwise(samples):
            for old, new in zip(before, after, strict=True):
                rate = (new - old) / (t1 - t0)
                if rate > 0.02 * spec.workers[number].link:
                    found.append(rate)
    return found


def simulator(bench: Bench) -> None:
    """Compare simulated with measured iteration times.

    Without jitter, ASP's and SSP's workers begin in lockstep, and chance decides when they leave it. That determines
    their speed, so they are also measured with jitter, for longer and with several seeds.
    """
    free, bound = ("asp", "ssp"), ("bsp", "bsp:pipeline=true", "r2sp")
    rows: list[list[object]] = []
    for name in TWO:
        for jitter, policies, iterations, seeds in (
            (0.0, bound + free, bench.iterations, 1),
            (0.1, free, 2 * bench.iterations, 3),
        ):
            spec = load_cluster(name).with_jitter(jitter)
            with Lab(hosts(spec)) as lab:
                share = goodput(lab)
                for policy in policies:
                    runs = [bench.run(lab, spec, policy, iterations=iterations, seed=seed) for seed in range(seeds)]
                    built = as_built(spec, share, make(policy).pipelined)
                    simulations = [Cluster(built, make(policy), iterations, seed).run() for seed in range(10 * seeds)]
                    measured, simulated = (
                        float(np.mean([each.report.mean_iteration_seconds for each in several]))
                        for several in (runs, simulations)
                    )
                    error = f"{simulated / measured - 1:+.1%}"
                    rows.append([name, f"{jitter:.0%}", policy, measured, simulated, error])
    headings = ("cluster", "jitter", "policy", "measured", "simulated", "error")
    bench.table("The simulator against the lab", headings, rows)


def growth(bench: Bench) -> None:
    """Measure 2 to 16 workers at one server."""
    rows: list[list[object]] = []
    for workers in (2, 4, 8, 16):
        base = load_cluster("lab-1mb")
        spec = replace(base, workers=base.workers[:1] * workers)
        with Lab(hosts(spec)) as lab:
            share = goodput(lab)
            ours = bench.run(lab, spec, "r2sp")
            ddp = ddp_run.run(lab, spec, LabPlan(DDP, bench.iterations))
        floor = limit_seconds(as_built(spec, share, False), False)
        seconds = ours.report.mean_iteration_seconds
        costs = [measured.cost.cpu_seconds_per_gigabyte for measured in (ours, ddp)]
        rows.append([workers, seconds, seconds / floor, *costs])
    headings = ("workers", "s per iteration", "× floor", "CPU s per GB", "gloo's")
    bench.table("lab-1mb: growth", headings, rows)


def cpu(bench: Bench) -> None:
    """Compare the CPU seconds of streamed R²SP, with a shard beside each worker, with those of DDP over gloo.

    A gigabyte is one that crosses a link between two hosts, headers included, counted by the switch for both. What a
    worker exchanges with the shard beside it crosses no link: it costs CPU time and counts no bytes. CPU time is that
    of all processes of a job, in user and in kernel mode.
    """
    base = load_cluster("lab-5mb")
    rows: list[list[object]] = []
    for workers in (2, 4):
        for megabytes in (2, 8, 32):
            spec = replace(base, workers=base.workers[:1] * workers, model_bytes=megabytes * 1e6).colocated()
            iterations = max(bench.iterations, 10 * bench.iterations // megabytes)
            with Lab(hosts(spec)) as lab:
                ours = bench.run(lab, spec, "r2sp", streamed=True, iterations=iterations)
                ddp = ddp_run.run(lab, spec, LabPlan(DDP, iterations))
            costs = [measured.cost.cpu_seconds_per_gigabyte for measured in (ours, ddp)]
            seconds = [measured.report.mean_iteration_seconds for measured in (ours, ddp)]
            rows.append([workers, megabytes, *costs, costs[0] / costs[1], *seconds])
    headings = ("workers", "MB", "CPU s per GB", "gloo's", "× gloo", "s per iteration", "gloo's")
    bench.table("CPU time: a shard beside each worker, streamed", headings, rows)


def faults(bench: Bench) -> None:
    """Kill a worker, or cut its link for five seconds, and measure how long the others are slower than before."""
    rows: list[list[object]] = []
    for what, fault in (("killed", Fault(6.0, 3, "kill", 0.0)), ("link cut for 5 s", Fault(6.0, 3, "cut", 5.0))):
        for policy, streamed in (("bsp", False), ("r2sp", False), ("r2sp", True)):
            spec = replace(load_cluster("lab-1mb"), faults=(fault,), lease=2.0)
            with Lab(hosts(spec)) as lab:
                measured = bench.run(lab, spec, policy, streamed=streamed, iterations=80)
            rows.append([what, policy + " (streamed)" * streamed, *recovery(measured, fault)])
    headings = ("fault", "policy", "before", "slowest round", "rounds until recovered", "applied twice")
    bench.table("lab-1mb: faults, the others' iterations", headings, rows)


def recovery(measured: LabResult, fault: Fault) -> tuple[float, float, int, int]:
    """Return the others' iteration time before, their slowest one after, slow rounds, and updates applied twice.

    The time of a round is its median, because single arrivals are early or late by chance.
    """
    start = next(event.time for event in measured.events)
    others: dict[int, list[float]] = {}
    for event in measured.events:
        if isinstance(event, Arrived) and event.worker != fault.worker:
            others.setdefault(event.worker, []).append(event.time - start)
    before = float(np.median([b - a for times in others.values() for a, b in pairwise(times) if b < fault.time]))
    after = [[b - a for a, b in pairwise(times) if b >= fault.time] for times in others.values()]
    slow = sum(float(np.median(round_)) > 1.15 * before for round_ in zip(*after, strict=False))
    seen: Counter[Identity] = Counter()
    for event in measured.events:
        if isinstance(event, Applied):
            seen.update(identities(event.workers, event.iterations, event.incarnations))
    return before, max(max(each) for each in after), slow, sum(count > 1 for count in seen.values())


def advice(bench: Bench) -> None:
    """Check whether the advice of `paceline advise examples/digits.py` is the fastest policy that the lab measures."""
    examples = Path(__file__).parent.parent / "examples"
    files = sorted((examples / "clusters").glob("*.toml"))
    rows = [advised(file, file.stem, "--jitter", "0.05", str(examples / "digits.py")) for file in files]
    bench.table("Advice on examples/digits.py, measured", ADVICE, rows)


def advice_grid(bench: Bench) -> None:
    """Check the advice on the clusters of `grid`, for a model of their size and steps of their length."""
    script = str(Path(__file__).parent / "sleeping_model.py")
    rows: list[list[object]] = []
    for workers, part, spec in grid_clusters():
        seconds = spec.workers[0].compute_seconds()
        with TemporaryDirectory() as folder:
            file = Path(folder) / "cluster.toml"
            file.write_text(as_toml(spec, "A point of the grid."))
            own = ["--megabytes", f"{spec.model_bytes / 1e6}", "--seconds", f"{seconds}"]
            name = f"{workers} workers, {part:g} X"
            rows.append(advised(file, name, "--jitter", "0", "--steps", "20", script, *own))
            print(*rows[-1], sep=", ", flush=True)
    bench.table("Advice on the grid, measured", ADVICE, rows)


ADVICE = ("cluster", "advice", "× ddp", "expected", "measured", "fastest measured", "right")


def advised(file: Path, name: str, *arguments: str) -> list[object]:
    """Run `paceline advise --verify` on a cluster. Return a row of its table."""
    command = [sys.executable, "-m", "paceline", "advise", "--lab", str(file), "--verify", "--json", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    output = json.loads(ran.stdout)
    measured = [each for each in output["candidates"] if each["measured"]]
    best = max(measured, key=lambda each: each["measured"]["samples_per_second"] / each["price"])
    own = next(each for each in measured if each["candidate"] == output["advice"])
    rates = [each["measured"]["samples_per_second"] / each["price"] for each in (best, own)]
    fastest = "itself" if best is own else f"{scheme(best['candidate'])}, by {rates[0] / rates[1] - 1:.0%}"
    seconds = own["iteration_seconds"], own["measured"]["iteration_seconds"]
    return [name, scheme(output["advice"]), output["gain"], *seconds, fastest, "yes" if output["right"] else "no"]


def scheme(candidate: Mapping[str, Any]) -> str:
    streamed, beside = (
        word if candidate[key] else "" for word, key in ((" streamed", "streamed"), (" beside", "colocated"))
    )
    return f"{candidate['policy']}{streamed}{beside}"


ALL = {
    each.__name__.replace("_", "-"): each
    for each in (
        one_server,
        colocated,
        apart,
        grid,
        unequal,
        rates,
        relax,
        gaps,
        simulator,
        growth,
        cpu,
        faults,
        advice,
        advice_grid,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in ALL]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; choose from {', '.join(ALL)}")
    if args.plot:
        args.plot.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.iterations, args.plot)
    for name in args.names or ALL:
        ALL[name](bench)


if __name__ == "__main__":
    main()
