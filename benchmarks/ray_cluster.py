"""Measures jobs on a Ray cluster whose nodes have links of 200 Mbit/s, beside the same jobs in `paceline lab`.

    python benchmarks/ray_cluster.py [--iterations N]

Needs root and the extra `ray`. Five hosts of a lab are the nodes of the cluster: one for the head and the server, and
one for each of four workers. Both jobs run the same synthetic workers over the same links, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks.output import Output
from paceline.lab import run, synthetic_worker
from paceline.lab.hosts import hosts, server_host, worker_host
from paceline.lab.namespaces import Lab
from paceline.lab.plan import LabPlan
from paceline.ray import PacelineTrainer
from paceline.serve.environment import CONNECT, address, job_token, worker_number
from paceline.simulate import ClusterSpec, load_cluster

PORT = 6379
POLICIES = ("bsp", "r2sp")
START_SECONDS = 120.0


def cluster_spec() -> ClusterSpec:
    """Return four workers and a server, with a model of 5 MB, links of 200 Mbit/s and 50 ms of computing."""
    base, link = load_cluster("lab-5mb"), 25e6
    worker = replace(base.workers[0], link=link, samples_per_second=base.workers[0].batch / 0.05)
    return replace(base, workers=(worker,) * 4, model_bytes=5e6, server_link=link)


class _NoPipe:
    """Takes the last model of a synthetic worker, which nobody needs here."""

    def send(self, model: object) -> None:
        pass


def train(config: dict[str, Any]) -> None:
    """Take part in the job as the synthetic worker of the lab does."""
    number = worker_number() or 0
    spec = cluster_spec()
    token, where = job_token(), address(os.environ[CONNECT])
    worker, iterations = spec.workers[number], config["iterations"]
    task = synthetic_worker.SyntheticTask(where, token, number, worker, spec.model_bytes, iterations=iterations)
    synthetic_worker.work(task, _NoPipe())  # type: ignore[arg-type]


def drive(address: str, policy: str, iterations: int, folder: str) -> None:
    """Run a job on the cluster from its head. Print the seconds of an iteration as JSON."""
    ray.init(address=address, log_to_driver=False)
    result = PacelineTrainer(
        train,
        train_loop_config={"iterations": iterations},
        policy=policy,
        scaling_config=ScalingConfig(num_workers=4, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(storage_path=folder),
        resources_per_server={"server": 1.0},
        insecure=True,  # as in the lab
    ).fit()
    print(json.dumps(result.metrics["iteration_seconds"]), flush=True)


def head_address(lab: Lab, head: str) -> str:
    """Return the address of the cluster. Ray's own "auto" may find another cluster of this machine."""
    return f"{lab.address(head)}:{PORT}"


def start_nodes(lab: Lab, spec: ClusterSpec, folder: str) -> list[Any]:
    """Start a Ray node on each host, and wait until all of them are there."""
    head = server_host(spec, 0)
    program = str(Path(sys.executable).with_name("ray"))
    common = ["--block", "--disable-usage-stats"]
    first = [program, "start", "--head", "--port", f"{PORT}", "--num-cpus", "0", "--resources", '{"server": 2}']
    first += ["--include-dashboard", "false", "--temp-dir", folder, *common]
    nodes = [lab.spawn(head, [*first, "--node-ip-address", lab.address(head)], os.environ)]
    wait_for_cores(lab, head, 0)
    for number in range(len(spec.workers)):  # one after the other: Ray gives a node 30 seconds to start
        host = worker_host(number)
        joining = [program, "start", "--address", head_address(lab, head), "--num-cpus", "1", *common]
        nodes.append(lab.spawn(host, [*joining, "--node-ip-address", lab.address(host)], os.environ))
        wait_for_cores(lab, head, number + 1)
    return nodes


def wait_for_cores(lab: Lab, head: str, cores: int) -> None:
    """Wait until the cluster has this number of cores."""
    ask = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False); print(ray.cluster_resources()"
    ask += ".get('CPU', 0.0))"
    command = lab.command(head, [sys.executable, "-c", ask, head_address(lab, head)])
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
        if asked.stdout.strip() == f"{float(cores)}":
            return
        time.sleep(1.0)
    raise SystemExit(f"The cluster has not reached {cores} cores within {START_SECONDS:g} s: {asked.stderr[-500:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--drive", nargs=2, metavar=("ADDRESS", "POLICY"), help="used by this script itself")
    parser.add_argument("--folder", help="used by this script itself")
    arguments = parser.parse_args()
    if arguments.drive:
        address, policy = arguments.drive
        drive(address, policy, arguments.iterations, arguments.folder)
        return
    # The cluster has a token of its own. By default, Ray would share one among all clusters of the user.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    spec, rows = cluster_spec(), []
    with Lab(hosts(spec)) as lab, tempfile.TemporaryDirectory(prefix="ray-") as folder:
        measured = {}
        for policy in POLICIES:
            plan = LabPlan(policy, arguments.iterations)
            measured[policy] = run.run(lab, spec, plan).report.mean_iteration_seconds
        nodes = start_nodes(lab, spec, f"{folder}/ray")
        try:
            for policy in POLICIES:
                head = server_host(spec, 0)
                again = [sys.executable, __file__, "--drive", head_address(lab, head), policy]
                options = ["--iterations", f"{arguments.iterations}", "--folder", f"{folder}/runs"]
                command = lab.command(head, [*again, *options])
                answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                seconds = float(json.loads(answer.stdout.splitlines()[-1]))
                rows.append([policy, measured[policy], seconds, seconds / measured[policy]])
        finally:
            lab.stop(nodes)
    headings = ("policy", "lab, s per iteration", "on Ray", "ratio")
    Output(None).table("Four workers and a server, 5 MB, 200 Mbit/s, 50 ms of computing", headings, rows)


if __name__ == "__main__":
    main()
