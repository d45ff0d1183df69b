"""Attack a running job without its token: how long does a new worker take to join, and how much slower is an iteration?

python benchmarks/attack.py [--seconds 60] [--turns 2] [--burst 500] [--tls]

The server, its two shards, two workers and the attacker are processes of this machine. The attacker opens 20 silent and
20 slow connections a second to every open port, and sends one byte a second over each slow one. Every ten seconds it
opens 500 more at once. Phases without and with the attack alternate. In each phase, new workers join one after another,
make one update and leave. A worker computes for 20 ms, without using a core, and exchanges a model of 1 MB.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import environment
from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.serve import open_files
from paceline.serve.wire.tls import Tls
from paceline.serve.worker.client import Client

ELEMENTS = 250_000
COMPUTING = 0.02  # seconds
EACH_SECOND, BURST, BURST_EVERY = 20, 500, 10.0
JOIN_EVERY = 5.0  # seconds between two joins
DESCRIPTION = Description(Layout((Tensor("w", (ELEMENTS,)),)), OptimizerSpec("SGD", ({"lr": 1e-3},))).as_json()


class Where(NamedTuple):
    """The address of the server, and what a worker needs there."""

    port: int
    token: bytes
    tls: Tls | None

    def client(self) -> Client:
        return Client(("127.0.0.1", self.port), DESCRIPTION, self.token, tls=self.tls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the attack, in all")
    parser.add_argument("--turns", type=int, default=2, help="phases without and with the attack")
    parser.add_argument("--tls", action="store_true", help="the job uses mutual TLS")
    parser.add_argument("--burst", type=int, default=BURST, help="connections at once, every ten seconds")
    args = parser.parse_args()
    open_files.allow(4 * BURST * 10)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), args.tls) as where:
        measure(where, args.seconds / args.turns, args.turns, args.burst)


@contextlib.contextmanager
def serving(folder: Path, encrypted: bool) -> Iterator[Where]:
    """Run `paceline serve` with two shards."""
    token, tls = secrets.token_bytes(16), certificates(folder) if encrypted else None
    (folder / "token").write_bytes(token)
    command = [sys.executable, "-m", "paceline", "serve", "--servers", "2", "--workers", "2", "--policy", "asp"]
    command += ["--token-file", str(folder / "token"), "--port", "0"]
    if tls:
        command += ["--tls-cert", str(tls.cert), "--tls-key", str(tls.key), "--tls-ca", str(tls.ca)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"Listening on \S*:(\d+)\b", line):
                yield Where(int(found[1]), token, tls)
                return
        sys.exit("The server did not start.")
    finally:
        server.terminate()
        server.wait(20.0)


def certificates(folder: Path) -> Tls:
    """Make a CA and a certificate."""
    import trustme

    ca = trustme.CA()
    mine, paths = ca.issue_cert("paceline.test"), [folder / f"{kind}.pem" for kind in ("cert", "key", "ca")]
    mine.cert_chain_pems[0].write_to_path(str(paths[0]))
    mine.private_key_pem.write_to_path(str(paths[1]))
    ca.cert_pem.write_to_path(str(paths[2]))
    return Tls(*map(str, paths))


def measure(where: Where, seconds: float, turns: int, burst: int) -> None:
    """Run all phases, and print a table."""
    spawn = mp.get_context("spawn")
    stop, attacking = spawn.Event(), spawn.Event()
    results: list[tuple[Any, Connection]] = []
    for _ in range(2):
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=work, args=(where, theirs, stop), daemon=True)
        process.start()
        results.append((process, ours))
    joined_in(where)  # when this returns, both workers have joined
    ports = [where.port, *shard_ports(where)]
    attacker = spawn.Process(target=attack, args=(ports, burst, attacking, stop), daemon=True)
    attacker.start()
    phases: list[tuple[bool, float, float, list[float]]] = []
    for number in range(2 * turns):
        is_on = number % 2 == 1
        attacking.set() if is_on else attacking.clear()
        began, joins = time.monotonic(), []
        while (at := time.monotonic()) < began + seconds:
            joins.append(joined_in(where))
            time.sleep(max(0.0, min(at + JOIN_EVERY, began + seconds) - time.monotonic()))
        phases.append((is_on, began, time.monotonic(), joins))
    stop.set()
    durations = [each for _, ours in results for each in ours.recv()]
    for process, _ in [*results, (attacker, None)]:
        process.join(20.0)
    report(phases, durations, "TLS" if where.tls else "plain")


def report(
    phases: list[tuple[bool, float, float, list[float]]], durations: list[tuple[float, float]], transport: str
) -> None:
    print(f"\n{transport}; iterations of two workers, and joins of new ones\n")
    print("| phase | attack | iterations | mean ms | median ms | joins | join, mean s | join, slowest s |")
    print("|---|---|---|---|---|---|---|---|")
    of: dict[bool, list[float]] = {False: [], True: []}
    for number, (is_on, began, ended, joins) in enumerate(phases):
        here = [1e3 * seconds for at, seconds in durations if began <= at - seconds and at <= ended]
        of[is_on] += here
        shown = f"{len(here)} | {mean(here):.2f} | {median(here):.2f}"
        print(
            f"| {number} | {'on' if is_on else 'off'} | {shown} | {len(joins)} | {mean(joins):.2f} | {max(joins):.2f} |"
        )
    slowest = max(each for is_on, _, _, joins in phases if is_on for each in joins)
    change = mean(of[True]) / mean(of[False]) - 1
    print(f"\nUnder attack: iterations take {change:+.1%}, and the slowest join took {slowest:.2f} s.", flush=True)


def work(where: Where, result: Connection, stop: Any) -> None:
    """Train until `stop` is set. Send the end and the duration of each iteration."""
    client, done = where.client(), list[tuple[float, float]]()
    weights, gradient = np.zeros(ELEMENTS, np.float32), np.ones(ELEMENTS, np.float32)
    client.begin(weights.data.cast("B"))
    while not stop.is_set():
        began = time.monotonic()
        time.sleep(COMPUTING)
        exchange(client, gradient, weights)
        done.append((time.monotonic(), time.monotonic() - began))
    client.close()
    result.send(done)


def joined_in(where: Where) -> float:
    """Let a worker join, make an update and leave. Return the seconds from its first connection to its update."""
    weights, gradient = np.zeros(ELEMENTS, np.float32), np.ones(ELEMENTS, np.float32)
    began = time.monotonic()
    client = where.client()
    client.begin(weights.data.cast("B"))
    exchange(client, gradient, weights)
    seconds = time.monotonic() - began
    client.close()
    return seconds


def exchange(client: Client, gradient: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> None:
    client.exchange(
        gradient.data.cast("B"), weights.data.cast("B"), batch_size=1, compute_seconds=COMPUTING, rates=[1e-3]
    )


def shard_ports(where: Where) -> list[int]:
    """Return the ports of the shards, as the coordinator tells them to a worker."""
    client = where.client()
    ports = [port for _, port, _ in client._incarnation.welcome.shards]
    client.begin(np.zeros(ELEMENTS, np.float32).data.cast("B"))
    client.close()
    return ports


def attack(ports: list[int], burst: int, attacking: Any, stop: Any) -> None:
    """Open silent and slow connections to all ports, as long as `attacking` is set."""
    open_files.allow(4 * BURST * 10)
    every = 0.25  # seconds; a quarter of each second's connections at a time
    slow: list[list[socket.socket]] = [[] for _ in range(round(1 / every))]
    silent: list[socket.socket] = []
    tick, last_burst = 0, 0.0
    while not stop.wait(every):
        if not attacking.is_set():
            for sock in [*silent, *(each for group in slow for each in group)]:
                sock.close()
            silent, slow = [], [[] for _ in slow]
            continue
        tick += 1
        group = slow[tick % len(slow)]
        for sock in group:
            with contextlib.suppress(OSError):
                sock.send(b"p")
        count = round(EACH_SECOND * every)
        for port in ports:
            silent += [connect(port) for _ in range(count)]
            group += [connect(port) for _ in range(count)]
        if time.monotonic() > last_burst + BURST_EVERY:
            last_burst = time.monotonic()
            silent += [connect(port) for port in ports for _ in range(burst)]
        silent = forget(silent, 6 * BURST)
        slow[tick % len(slow)] = forget(group, BURST)


def connect(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        sock.connect(("127.0.0.1", port))
    return sock


def forget(sockets: list[socket.socket], most: int) -> list[socket.socket]:
    """Close all but the newest sockets."""
    for sock in sockets[:-most]:
        sock.close()
    return sockets[-most:]


if __name__ == "__main__":
    main()
