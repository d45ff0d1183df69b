"""Trains a network on real links, over DDP and over paceline, and compares the times to the same test accuracy.

    sudo .venv/bin/python benchmarks/whole_training.py --network resnet18 --link 1Gbit --data DIR --device cuda

Each worker is a process on a host of its own (a lab), and all of them share the machine's cores and its GPU. DDP runs
over gloo, overlaps its all-reduce with the backward pass, and has the best of --buckets. Policies run with a
shard beside each worker, or with --servers hosts of their own, which DDP cannot use. All ways have the same data,
batches, number of epochs and learning rate, which rises and falls to 0.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks.output import Output
from paceline.lab import run
from paceline.lab.hosts import goodput, hosts, worker_host
from paceline.lab.namespaces import Lab, LabError
from paceline.lab.plan import LabPlan
from paceline.policies import make, split_list, with_mean_weights
from paceline.simulate import ClusterSpec, units
from paceline.simulate.measured_cluster import StepTime, cluster_of

WORKER = str(Path(__file__).parent / "whole_training_worker.py")
WAYS = "ddp,bsp:pipeline=true,r2sp:groups=3,r2sp"
BUCKETS = "5,25,100"  # MB, of DDP
PROBE_STEPS = 12  # of a bucket size
PATIENCE = 900.0  # seconds that one training may take


@dataclass(frozen=True)
class Case:
    """A cluster, and the arguments that every worker gets."""

    spec: ClusterSpec
    arguments: tuple[str, ...]
    overlap: bool
    seconds: float = PATIENCE


def over_ddp(lab: Lab, case: Case, *more: str) -> dict[str, Any]:
    """Train over DDP. Return what worker 0 has written."""
    workers = len(case.spec.workers)
    shared = {
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": lab.address(worker_host(0)),
        "MASTER_PORT": str(20_000 + secrets.randbelow(10_000)),
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, WORKER, *case.arguments, "--ddp", "--result", str(result), *more]
        ranks = [
            lab.spawn(worker_host(rank), command, os.environ | shared | {"RANK": str(rank)}) for rank in range(workers)
        ]
        end = time.monotonic() + case.seconds
        while any(each.exitcode is None for each in ranks) and time.monotonic() < end:
            if any(each.exitcode for each in ranks):
                break
            time.sleep(0.2)
        codes = [each.exitcode for each in ranks]
        lab.stop(ranks)
        if any(codes) or None in codes:
            raise LabError(f"DDP did not end well: its ranks ended with {codes}.")
        found: dict[str, Any] = json.loads(result.read_text())
        found["all_samples_per_second"] = workers * found["samples_per_second"]
        return found


def over_best_buckets(lab: Lab, case: Case, sizes: Sequence[str]) -> dict[str, Any]:
    """Train over DDP with the bucket size that is fastest in a few steps."""
    probes = {}
    if len(sizes) > 1:
        for size in sizes:
            probe = over_ddp(lab, case, "--bucket", size, "--steps", f"{PROBE_STEPS}")
            probes[size] = probe["samples_per_second"]
    best = max(sizes, key=lambda size: probes.get(size, 0.0))
    return over_ddp(lab, case, "--bucket", best) | {"bucket": best, "probes": probes}


def over_policy(lab: Lab, case: Case, policy: str) -> dict[str, Any]:
    """Train over paceline under a policy. Return what worker 0 has written, and what the server has measured."""
    streamed = make(policy).streamable
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        overlap = ["--overlap"] if case.overlap and streamed else []
        script = (WORKER, *case.arguments, "--result", str(result), *overlap)
        measured = run.run(lab, case.spec, LabPlan(with_mean_weights(policy), streamed=streamed, script=script)).report
        found: dict[str, Any] = json.loads(result.read_text())
        found["all_samples_per_second"] = measured.samples_per_second
        return found | {"staleness": [measured.mean_staleness, measured.max_staleness], "discarded": measured.discarded}


def time_to(tests: list[list[float]], target: float) -> float | None:
    """Return the seconds until the accuracy was at least the target, interpolated between two tests; None: never."""
    before = (0.0, 0.0)
    for seconds, accuracy in tests:
        if accuracy >= target:
            share = (target - before[1]) / (accuracy - before[1])
            return before[0] + share * (seconds - before[0])
        before = (seconds, accuracy)
    return None


def show(bench: Output, title: str, lines: list[dict[str, Any]], target: float) -> None:
    """Print a table of recorded trainings."""
    ddp = next((line for line in lines if line["way"] == "ddp"), None)
    base = time_to(ddp["tests"], target) if ddp else None
    rows: list[list[object]] = []
    for line in lines:
        seconds = time_to(line["tests"], target)
        gain = f"{base / seconds:.2f}" if base and seconds else "–"
        best = max(accuracy for _, accuracy in line["tests"])
        shown = f"{seconds:.1f}" if seconds else "never"
        rate = line["all_samples_per_second"]
        step = f"{1000 * line['workers'] * line['batch'] / rate:.0f}"
        rows.append([line["way"], shown, gain, round(rate), step, f"{best:.1%}"])
    bench.table(title, ("", f"s to {target:.0%}", "× ddp", "samples/s", "ms a step", "best accuracy"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data", type=Path, help="the folder with data sets")
    parser.add_argument("--samples", type=int, help="train on this number of samples only")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--link", default="1Gbit", help="of each worker, in each direction")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--servers", type=int, default=0, help="hosts for shards alone; 0: a shard beside each worker")
    parser.add_argument("--ways", default=WAYS, help="ddp and policies, separated by commas")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--target", type=float, default=0.75)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that worker 0 computes longer in each step")
    parser.add_argument("--no-overlap", action="store_true", help="push gradients when they are complete")
    parser.add_argument("--buckets", default=BUCKETS, help="DDP's bucket sizes in MB; a few steps choose the fastest")
    parser.add_argument("--keep", type=Path, help="append the results to this file")
    args = parser.parse_args()
    link = units.rate(args.link)
    step = StepTime(0.1, args.batch, 0.0, 1e6)  # the lab uses the links alone; the scripts compute for real
    spec = cluster_of(args.network, step, [link] * args.workers, args.servers or 1, link)
    spec = spec if args.servers else spec.colocated()
    given: dict[str, object] = {"network": args.network, "data": args.dataset, "device": args.device}
    given |= {"epochs": args.epochs, "batch": args.batch, "rate": args.rate, "delay": args.delay}
    given |= {"folder": args.data} if args.data else {}
    given |= {"samples": args.samples} if args.samples else {}
    arguments = tuple(word for key, value in given.items() for word in (f"--{key}", f"{value}"))
    case = Case(spec, arguments, not args.no_overlap)
    buckets = split_list([args.buckets])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines: list[dict[str, Any]] = []
    with Lab(hosts(spec)) as lab:
        share = goodput(lab)
        for way in split_list([args.ways]):
            begin = time.perf_counter()
            found = over_best_buckets(lab, case, buckets) if way == "ddp" else over_policy(lab, case, way)
            line = (
                {"way": way, "link": args.link, "workers": args.workers, "servers": args.servers, "goodput": share}
                | given
                | found
            )
            line["folder"] = None
            lines.append(line)
            print(f"{way}: {time.perf_counter() - begin:.0f} s, {found['tests'][-1:]}", file=sys.stderr, flush=True)
            if args.keep:
                with args.keep.open("a") as file:
                    file.write(json.dumps(line, default=str) + "\n")
    servers = f"{args.servers} servers" if args.servers else "a shard beside each"
    title = f"{args.network} on {args.dataset}, {args.workers} workers, {servers}, {args.link} ({share:.0%} reached)"
    show(Output(None), title, lines, args.target)


if __name__ == "__main__":
    main()
