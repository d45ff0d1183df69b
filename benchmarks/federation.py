"""Federations: how the simulator grows with the number of clients.

python benchmarks/federation.py growth
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace

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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("growth",))
    parser.parse_args()
    growth()
