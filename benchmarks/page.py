"""The cost of the live page for a job: with one viewer, with twenty of which one never reads, and with metrics too.

python benchmarks/page.py [--repeats 3] [--iterations 30] [--policy r2sp]        (needs root: the job runs in the lab)

The job is `lab-1mb`: eight synthetic workers and a server with links of 400 Mbit/s, and a model of 1 MB. The page is a
process of its own, as with `paceline lab --page`. The viewers are another process: they read the stream of frames as
fast as it comes, and decode nothing. The metrics are a third process, on the host of the server: it watches the job,
logs to TensorBoard, and answers Prometheus, which asks every second here. The ways alternate in one run. The ratio of
each repeat compares it with the run without the page before it, and the median counts.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks.output import Output
from paceline.lab import run
from paceline.lab.hosts import hosts, server_host
from paceline.lab.namespaces import Lab
from paceline.lab.plan import LabPlan
from paceline.page.process import PageProcess, PageSetup
from paceline.serve.wire.endpoint import Endpoint
from paceline.simulate import load_cluster

#: Opens the stream for some viewers that read it, and for some that never do.
VIEWERS = """
import selectors, socket, sys
port, readers, stuck = map(int, sys.argv[1:])
waiting, held = selectors.DefaultSelector(), []
for number in range(readers + stuck):
    viewer = socket.socket()
    if number >= readers:
        viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    while viewer.connect_ex(("127.0.0.1", port)):
        pass
    viewer.sendall(f"GET /events HTTP/1.1\\r\\nHost: localhost:{port}\\r\\n\\r\\n".encode())
    held.append(viewer)
    if number < readers:
        waiting.register(viewer, selectors.EVENT_READ)
while waiting.get_map():
    for key, _ in waiting.select():
        if not key.fileobj.recv(1 << 20):
            waiting.unregister(key.fileobj)
"""
#: Watches a job as the launcher does, with the metrics of Prometheus and TensorBoard, and asks for them every second.
METRICS = """
import asyncio, contextlib, sys, threading, time, urllib.request
from paceline.metrics.background import BackgroundTracker
from paceline.metrics.job_metrics import JobMetrics
from paceline.metrics.prometheus import MetricsServer
from paceline.metrics.targets import LogTarget
from paceline.observe.observer import Tee, replay
from paceline.serve.watch import watch
from paceline.serve.wire.endpoint import Endpoint

host, port, token = sys.argv[1:4]
metrics = JobMetrics()
tracker = BackgroundTracker(LogTarget.parse("tensorboard:" + sys.argv[4]).tracker(), "lab", {}, print)
url = f"http://127.0.0.1:{MetricsServer(metrics).port}/metrics"

def ask():
    while True:
        urllib.request.urlopen(url).read()
        time.sleep(1)

threading.Thread(target=ask, daemon=True).start()

async def follow():
    async for event in watch(Endpoint(host, int(port), bytes.fromhex(token))):
        replay([event], Tee(metrics, tracker))

with contextlib.suppress(OSError):
    asyncio.run(follow())
"""
#: For each way: the viewers that read, those that never do, and whether metrics are served. None: nothing at all.
WAYS = {
    "no page": None,
    "1 viewer": (1, 0, False),
    "1 viewer, metrics": (1, 0, True),
    "20 viewers, one stuck, metrics": (19, 1, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--policy", default="r2sp")
    args = parser.parse_args()
    spec, plan = load_cluster("lab-1mb"), LabPlan(args.policy, args.iterations)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    shares: dict[str, list[float]] = {way: [0.0] for way in WAYS}
    with Lab(hosts(spec)) as lab:
        run.run(lab, spec, LabPlan(args.policy, 6))  # warm
        for _ in range(args.repeats):
            for way, viewers in WAYS.items():
                if viewers is None:
                    seconds[way].append(run.run(lab, spec, plan).report.mean_iteration_seconds)
                    continue
                listening = socket.create_server(("127.0.0.1", 0))
                port = listening.getsockname()[1]
                readers, stuck, has_metrics = viewers
                watching = [subprocess.Popen([sys.executable, "-c", VIEWERS, f"{port}", f"{readers}", f"{stuck}"])]
                began = time.monotonic()
                wrap = partial(lab.command, server_host(spec, 0))
                with TemporaryDirectory() as logs, PageProcess(listening, PageSetup(title="lab-1mb"), wrap) as page:

                    def show(job: Endpoint) -> None:
                        page.follow(job)  # called in this pass of the loop
                        if has_metrics:  # noqa: B023
                            told = [job.host, f"{job.port}", job.token.hex(), logs]
                            watching.append(subprocess.Popen(wrap([sys.executable, "-c", METRICS, *told])))  # noqa: B023

                    try:
                        report = run.run(lab, spec, plan, None, show).report
                        shares[way].append(cpu(page.pid) / (time.monotonic() - began))
                        if has_metrics and not any(Path(logs).rglob("events.*")):
                            raise SystemExit("No metrics were logged, so their cost was not measured.")
                    finally:
                        for each in watching:
                            each.kill()
                            each.wait()
                seconds[way].append(report.mean_iteration_seconds)
    rows = []
    for way, times in seconds.items():
        ratios = [each / base for each, base in zip(times, seconds["no page"], strict=True)]
        rows.append((way, 1000 * statistics.median(times), statistics.median(ratios), max(shares[way])))
    title = f"{args.policy} on lab-1mb, {args.iterations} iterations, {args.repeats} repeats"
    Output(None).table(title, ("way", "iteration, ms", "× no page", "cores of the page"), rows)


def cpu(pid: int) -> float:
    """The CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


if __name__ == "__main__":
    main()
