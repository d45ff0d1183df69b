"""Federations: how the simulator grows with the number of clients, and what a real server bears.

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
GROUP = 16  # clients
ROUNDS = 4


def growth(sizes: tuple[int, ...] = SIZES) -> None:
    """Seconds for a simulated round of n clients in groups of 16, beside n·log n."""
    base: tuple[int, float] | None = None
    for clients in sizes:
        spec = load_cluster("fl-cnn-literal")
        # The server's link grows with them: what is asked is what the simulator does, not what a link does.
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
            f"{clients:>7,} clients: {seconds:8.3f} s a round, {per_event:5.1f} µs an event, "
            f"{seconds / expected:5.2f} × n·log n of {base[0]} (target ≤ 1)"
        )


def load(asked: Load, policies: list[str]) -> None:
    """A real server with so many clients connected at the same time: its memory and CPU, beside a bare TCP server's."""
    tcp = bare.exchange(asked)
    print(
        f"Bare TCP: {asked.clients:,} connections, {asked.rounds} exchanges each of {asked.bytes:,} bytes both ways: "
        f"{1e3 * tcp.cpu_each:.2f} ms of CPU an exchange, {tcp.seconds / asked.rounds:.1f} s a round."
    )
    for named in policies:
        groups = max(1, asked.clients // GROUP)
        policy = named if "groups=" in named else f"{named}{',' if ':' in named else ':'}groups={groups}"
        most = crowd.bound(asked, policy)
        borne = crowd.serve(asked, policy, progress=lambda said: print(f"  {said}", file=sys.stderr))
        coordinator, shard = borne.memory
        allowed = shard.connected + crowd.at_work(asked) + most
        print(
            f"\n{policy}: {asked.clients:,} clients connected in {borne.connecting:.1f} s, "
            f"{borne.turned_away} times after another try.\n"
            f"  rounds      each client did {borne.least} or more, {borne.exchanges:,} in all, "
            f"{borne.seconds * asked.clients / borne.exchanges:.1f} s a round; {borne.versions} versions, "
            f"every model that was pulled is what the pushes come to\n"
            f"  CPU         {1e3 * borne.cpu_each:.2f} ms a client-round, "
            f"{borne.cpu_each / tcp.cpu_each:.1f} × bare TCP\n"
            f"  shard       {_mb(shard.empty)} with one client, {_mb(shard.connected)} with all, at most "
            f"{_mb(shard.peak)}, {_mb(shard.settled)} at the end\n"
            f"  its bound   {_mb(most)} for updates and copies, {_mb(allowed)} in all: "
            f"{'kept' if shard.peak <= allowed else 'BROKEN'}\n"
            f"  coordinator {_mb(coordinator.empty)} with one client, {_mb(coordinator.connected)} with all, at most "
            f"{_mb(coordinator.peak)}, {_mb(coordinator.settled)} at the end"
        )


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("growth", "load"))
    parser.add_argument("--clients", type=int, default=2000, help="load: how many are connected")
    parser.add_argument("--rounds", type=int, default=3, help="load: how many each does, at least")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="load: of the model, a multiple of 4")
    parser.add_argument("--policy", action="append", help="load: fl-r2sp with options; may be given several times")
    chosen = parser.parse_args()
    if chosen.what == "growth":
        growth()
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is stopped
        try:
            wanted = Load(chosen.clients, chosen.rounds, chosen.bytes)
            load(wanted, chosen.policy or ["fl-r2sp", "fl-r2sp:filter=false"])
        except (CrowdError, ValueError) as error:
            sys.exit(str(error))
