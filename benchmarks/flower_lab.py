"""The load of a federation on its server's link: Flower's own FedAvg, FL-R²SP on Flower, and paceline's own server.

    make .venv-flower/.ready
    sudo .venv/bin/python benchmarks/flower_lab.py [--rounds 8] 2> log

16 clients, each on a host with a link of 20 Mbit/s, share a server with 100 Mbit/s; the model has 2 MB. On Flower these
are a superlink and 16 supernodes. A client sleeps for 20 s instead of training, with a log-normal delay, because two
cores are not 16 devices. A pull alone takes 0.8 s.

- The peak is the largest number of bytes that the server's link carried in any second, as a share of its rate.
- A pull begins when the first byte may come, and ends when the client has the whole model. Flower's nodes ask for
  messages every three seconds; the time from the message to the question is the wait.
- The first two rounds are left out: all clients begin together, and FL-R²SP does not know T yet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks import ROOT
from benchmarks.output import Output
from paceline.federated import FederatedClient
from paceline.lab.host_process import Command
from paceline.lab.namespaces import Lab
from paceline.lab.shaping import SPARSE

CLIENTS = 16
CLIENT_RATE, SERVER_RATE = 20e6 / 8, 100e6 / 8  # bytes per second
PARAMETERS = 500_000  # a model of 2 MB
COMPUTE = 20.0  # seconds of a round on a device, without a log-normal delay (as in the FL-R²SP paper: μ = -2, σ = 1)
WARM_UP = 2  # rounds that are left out
WINDOW = 1.0  # seconds over which the load of the link is averaged; about a pull
EVERY = 0.05  # seconds between two looks at the link's counters
FLOWER = ROOT / ".venv-flower" / "bin"
PORT = 8000  # of the superlink
PATIENCE = 1200.0  # seconds before a run is given up


@dataclass(frozen=True)
class Pull:
    """The download of a model by a client."""

    begin: float
    end: float
    wait: float = 0.0  # from the server's message to the client's question


@dataclass
class Link:
    """The bytes that the server's host has sent and received, by time."""

    samples: list[tuple[float, int, int]] = field(default_factory=list)

    @contextmanager
    def watched(self, lab: Lab) -> Iterator[None]:
        """Sample the counters until the block ends."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(lab.namespace("server"), over))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, namespace: str, over: threading.Event) -> None:
        from pyroute2 import IPRoute

        with IPRoute(netns=namespace) as server:
            index = server.link_lookup(ifname="eth0")[0]
            while not over.wait(EVERY):
                counted = server.get_links(index)[0].get_attr("IFLA_STATS64")
                self.samples.append((time.monotonic(), int(counted["tx_bytes"]), int(counted["rx_bytes"])))

    def peak(self, column: int, begin: float, end: float) -> float:
        """Return the largest share of the link's rate that was used in a window. column: 1: sent, 2: received."""
        samples = [(sample[0], sample[column]) for sample in self.samples if begin <= sample[0] <= end]
        found, last = 0.0, 0
        for at, carried in samples:
            while samples[last + 1][0] <= at - WINDOW:
                last += 1
            if samples[last][0] <= at - WINDOW:
                found = max(found, (carried - samples[last][1]) / (at - samples[last][0]))
        return found / SERVER_RATE

    def mean(self, column: int, begin: float, end: float) -> float:
        """Return the mean share of the link's rate that was used."""
        samples = [(sample[0], sample[column]) for sample in self.samples if begin <= sample[0] <= end]
        (first, before), (last, after) = samples[0], samples[-1]
        return (after - before) / (last - first) / SERVER_RATE


@dataclass
class Run:
    """The measurements of a federation: its link, and the pulls of each client."""

    link: Link
    pulls: list[list[Pull]]

    def row(self, name: str) -> list[str]:
        """Return the measured figures, without the first rounds."""
        begin = min(each[WARM_UP].begin for each in self.pulls)
        end = max(each[-1].end for each in self.pulls)
        settled = [pull for each in self.pulls for pull in each if pull.begin >= begin]
        rounds = [(each[-1].begin - each[WARM_UP].begin) / (len(each) - 1 - WARM_UP) for each in self.pulls]
        return [
            name,
            *(f"{self.link.peak(column, begin, end):.0%}" for column in (1, 2)),
            f"{self.link.mean(1, begin, end):.0%}",
            f"{mean(pull.end - pull.begin for pull in settled):.2f} s",
            f"{mean(pull.wait for pull in settled):.1f} s",
            f"{mean(rounds):.1f} s",
            str(len(settled)),
        ]


# Flower


def on_flower(lab: Lab, policy: str, rounds: int, compute: float, folder: Path) -> Run:
    """Run a federation on Flower. policy: of paceline; empty: Flower's own FedAvg."""
    home = folder / "home"
    home.mkdir()
    connection = f'[superlink]\ndefault = "lab"\n\n[superlink.lab]\naddress = "127.0.0.1:{PORT}"\ninsecure = true\n'
    (home / "config.toml").write_text(connection)
    environment = {
        **os.environ,
        "PATH": f"{FLOWER}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    command = ["--insecure", "--host", "0.0.0.0", "--port", str(PORT), "--disable-runtime-dependency-installation"]
    superlink = lab.spawn("server", [str(FLOWER / "flower-superlink"), *command], environment)
    _wait_until_open(lab, superlink)
    namespaces = [lab.namespace(f"client{number}") for number in range(CLIENTS)]
    where = [f"{lab.address('server')}:{PORT}", str(folder)]
    nodes = subprocess.Popen(
        [FLOWER / "python", ROOT / "benchmarks" / "flower_nodes.py", *where, *namespaces],
        env=environment,
        stdout=sys.stderr.fileno(),
    )
    link = Link()
    settings = f"policy='{policy}' nodes={CLIENTS} rounds={rounds} parameters={PARAMETERS} compute={compute}"
    app = [str(FLOWER / "flwr"), "run", str(ROOT / "benchmarks" / "flower_link"), "lab", "--stream"]
    try:
        with link.watched(lab):
            running = lab.spawn("server", [*app, "--run-config", settings], environment)
            running.join(PATIENCE)
            if running.exitcode != 0:
                raise SystemExit(f"flwr run ended with {running.exitcode}; see the log on standard error.")
    finally:
        nodes.terminate()
        nodes.wait()
        lab.stop([superlink])
    return Run(link, [_pulls_in(folder / f"pulls-{number}") for number in range(CLIENTS)])


def _pulls_in(file: Path) -> list[Pull]:
    """Return the pulls that a node has written down."""
    found = map(json.loads, file.read_text().splitlines())
    return [Pull(each["begin"], each["end"], each["wait"]) for each in found]


def _wait_until_open(lab: Lab, superlink: Command) -> None:
    """Wait until the superlink accepts connections."""
    while not lab.call("server", _is_open, PORT):
        if not superlink.is_alive():
            raise SystemExit("flower-superlink ended; see the log on standard error.")
        time.sleep(0.5)


def _is_open(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# paceline's own server


class Sleeping:
    """The batches of a client that sleeps instead of training. A round has one."""

    dataset = range(32)

    def __init__(self, compute: float, seed: int) -> None:
        self._compute, self._chance = compute, random.Random(seed)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        time.sleep(self._compute + self._chance.lognormvariate(-2, 1))
        yield torch.randn(4, 499), torch.zeros(4, dtype=torch.long)


def take_part(pipe: Any, address: str, token: bytes, number: int, rounds: int, compute: float) -> None:
    """Run a client in its own process. It reports the end and the duration of each pull."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    client = FederatedClient(
        torch.nn.Linear(499, PARAMETERS // 500),
        Sleeping(compute, number),
        connect=address,
        steps=1,
        client=number,
        token=token,
        progress=lambda done, loss: pipe.send((time.monotonic(), client.pull_seconds)),
    )
    client.run(rounds)


def on_own_server(lab: Lab, policy: str, rounds: int, compute: float, folder: Path) -> Run:
    """Run a federation on paceline's own server."""
    token = secrets.token_hex(16)
    (folder / "token").write_text(token)
    (folder / "token").chmod(0o600)
    command = [sys.executable, "-m", "paceline", "federate", "serve", "-p", policy, "--clients", str(CLIENTS)]
    where = ["--host", lab.address("server"), "--port", str(SPARSE), "--token-file", str(folder / "token")]
    where.append("--insecure")  # the lab's links are private to it
    server = lab.spawn("server", [*command, *where], os.environ)
    link, pipes, clients = Link(), [], []
    with link.watched(lab):
        for number in range(CLIENTS):
            ours, theirs = lab.pipe()
            what = (theirs, f"{lab.address('server')}:{SPARSE}", token.encode(), number, rounds, compute)
            clients.append(lab.start(f"client{number}", take_part, *what))
            pipes.append(ours)
            theirs.close()
        pulls = [_reported(pipe) for pipe in pipes]
    server.join(30)
    lab.stop([server, *clients])
    return Run(link, pulls)


def _reported(pipe: Any) -> list[Pull]:
    """Return the pulls that a client reports until it ends."""
    found = []
    try:
        while True:
            end, seconds = pipe.recv()
            found.append(Pull(end - seconds, end))
    except EOFError:
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--compute", type=float, default=COMPUTE, help="seconds that a client sleeps in a round")
    parser.add_argument("--only", action="append", choices=WAYS, help="run this way alone; may be repeated")
    given = parser.parse_args(arguments)
    if not (FLOWER / "flwr").exists():
        raise SystemExit("Flower has an environment of its own: run make .venv-flower/.ready first.")
    if given.rounds < WARM_UP + 2:
        raise SystemExit(f"--rounds must be at least {WARM_UP + 2}: the first {WARM_UP} are left out.")
    rates = {"server": SERVER_RATE} | {f"client{number}": CLIENT_RATE for number in range(CLIENTS)}
    rows = []
    for name in given.only or WAYS:
        run, policy = WAYS[name]
        policy = policy.format(groups=given.groups)
        print(f"{name} {policy} ...", file=sys.stderr)
        with Lab(rates) as lab, tempfile.TemporaryDirectory() as folder:
            rows.append(run(lab, policy, given.rounds, given.compute, Path(folder)).row(f"{name} {policy}"))
    headings = ["", "peak sent", "peak received", "mean sent", "a pull", "wait before it", "a round", "pulls"]
    Output(None).table(f"{CLIENTS} clients, {given.compute:g} s of computing", headings, rows)


#: For each way: the function that runs it, and its policy.
WAYS = {
    "flower-fedavg": (on_flower, ""),
    "flower-fl-r2sp": (on_flower, "fl-r2sp:groups={groups}"),
    "own-fedavg": (on_own_server, "bsp:weights=mean"),
    "own-fl-r2sp": (on_own_server, "fl-r2sp:groups={groups}"),
}

if __name__ == "__main__":
    main()
