"""Federations: the simulator's time over the number of clients, and a real server under load.

python benchmarks/federation.py growth
python benchmarks/federation.py load [--clients 2000] [--rounds 3] [--bytes 1000000] [--policy fl-r2sp …]
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the package `benchmarks`

from benchmarks.crowd import bare_server as bare
from benchmarks.crowd import clients as crowd
from benchmarks.crowd.load import CrowdError, Load
from paceline.policies import make
from paceline.simulate import Cluster, load_cluster

SIZES = (100, 1_000, 10_000, 100_000)
GROUP = 16  # clients per group
ROUNDS = 4


def growth(sizes: tuple[int, ...] = SIZES) -> None:
    """Print the seconds of a simulated round of n clients in groups of 16, relative to n·log n."""
    base: tuple[int, float] | None = None
    for clients in sizes:
        spec = load_cluster("fl-cnn-literal")
        # The server's link grows with the number of clients, because the simulator is measured and not the link.
        scale = clients / len(spec.workers)
        spec = replace(spec, workers=spec.workers[:1] * clients, server_link=spec.server_link * scale)
        policy = make(f"fl-r2sp:groups={max(1, clients // GROUP)}")
        began = time.perf_counter()
        run = Cluster(spec, policy, ROUNDS).run()
        seconds = (time.perf_counter() - began) / ROUNDS
        base = base or (clients, seconds)
        expected = base[1] * clients * math.log(clients) / (base[0] * math.log(base[0]))
        per_event = 1e6 * seconds * ROUNDS / run.events
        print(
            f"{clients:>7,} clients: {seconds:8.3f} s per round, {per_event:5.1f} µs per event, "
            f"{seconds / expected:5.2f} × n·log n of {base[0]} (target ≤ 1)"
        )


def load(wanted: Load, policies: list[str]) -> None:
    """Print the memory and CPU time of a real server with many connected clients, relative to a bare TCP server."""
    tcp = bare.exchange(wanted)
    print(
        f"Bare TCP: {wanted.clients:,} connections, {wanted.rounds} exchanges each of {wanted.bytes:,} bytes in both "
        f"directions: {1e3 * tcp.cpu_each:.2f} ms of CPU per exchange, {tcp.seconds / wanted.rounds:.1f} s per round."
    )
    for named in policies:
        groups = max(1, wanted.clients // GROUP)
        policy = named if "groups=" in named else f"{named}{',' if ':' in named else ':'}groups={groups}"
        bound = crowd.bound(wanted, policy)
        result = crowd.serve(wanted, policy, progress=lambda line: print(f"  {line}", file=sys.stderr))
        coordinator, shard = result.memory
        allowed = shard.connected + crowd.thread_bytes(wanted) + bound
        print(
            f"\n{policy}: {wanted.clients:,} clients connected in {result.connecting:.1f} s, "
            f"with {result.retries} retries.\n"
            f"  rounds      each client did at least {result.least}, {result.exchanges:,} in total, "
            f"{result.seconds * wanted.clients / result.exchanges:.1f} s per round; {result.versions} versions; "
            f"every pulled model matches the pushes\n"
            f"  CPU         {1e3 * result.cpu_each:.2f} ms per client-round, "
            f"{result.cpu_each / tcp.cpu_each:.1f} × bare TCP\n"
            f"  shard       {_mb(shard.empty)} with one client, {_mb(shard.connected)} with all, at most "
            f"{_mb(shard.peak)}, {_mb(shard.settled)} at the end\n"
            f"  its bound   {_mb(bound)} for updates and copies, {_mb(allowed)} in total: "
            f"{'kept' if shard.peak <= allowed else 'BROKEN'}\n"
            f"  coordinator {_mb(coordinator.empty)} with one client, {_mb(coordinator.connected)} with all, at most "
            f"{_mb(coordinator.peak)}, {_mb(coordinator.settled)} at the end"
        )


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("growth", "load"))
    parser.add_argument("--clients", type=int, default=2000, help="load: number of clients")
    parser.add_argument("--rounds", type=int, default=3, help="load: minimum number of rounds per client")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="load: size of the model, a multiple of 4")
    parser.add_argument("--policy", action="append", help="load: fl-r2sp with options; can be repeated")
    args = parser.parse_args()
    if args.what == "growth":
        growth()
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # run the finally blocks that stop the servers
        try:
            load(Load(args.clients, args.rounds, args.bytes), args.policy or ["fl-r2sp", "fl-r2sp:filter=false"])
        except (CrowdError, ValueError) as error:
            sys.exit(str(error))
