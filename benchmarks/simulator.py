"""CPU time of the simulator and of policy decisions. Figures are ratios within one run.

make bench            or            python benchmarks/simulator.py
"""

from __future__ import annotations

import heapq
import random
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from paceline.policies import Decision, Grant, Policy, Update, WakeAt, make
from paceline.simulate import Cluster, ClusterSpec, load_cluster

SCHEMES = ("bsp", "asp", "ssp", "dssp", "r2sp")


def bare_heapq(events: int = 300_000, size: int = 16) -> float:
    """Return the events per second of a loop that pops the earliest event, calls it, and pushes it back for later."""
    draw = random.Random(0).random
    heap: list[tuple[float, int, Callable[[object], None], object]] = []

    def nothing(_: object) -> None: ...

    for sequence in range(size):
        heapq.heappush(heap, (draw(), sequence, nothing, None))
    began = time.process_time()
    for sequence in range(size, size + events):
        now, _, do, argument = heapq.heappop(heap)
        do(argument)
        heapq.heappush(heap, (now + draw(), sequence, nothing, None))
    return events / (time.process_time() - began)


def simulated(spec: ClusterSpec, policy: str, iterations: int) -> tuple[float, float]:
    """Return the heap pops per second of a simulated run, with network and reporting, and its seconds."""
    cluster = Cluster(spec, make(policy), iterations)
    began = time.process_time()
    events = cluster.run().events
    seconds = time.process_time() - began
    return events / seconds, seconds


def with_workers(spec: ClusterSpec, count: int) -> ClusterSpec:
    """Return the cluster with `count` workers and the same number of servers per worker."""
    servers = spec.servers * count // len(spec.workers)
    return replace(spec, workers=spec.workers[:1] * count, servers=servers)


def decision_microseconds(policy: Policy, workers: int, decisions: int) -> float:
    """Return the microseconds of one decision after all workers have started. Iteration times vary by 5%."""
    draw = random.Random(0).gauss
    heap: list[tuple[float, int, int, int]] = []  # (time, sequence, worker, iteration); worker -1 wakes the policy
    iteration = [0] * workers
    sequence = total = counted = 0
    wake = -1.0
    spent = 0.0
    clock = time.perf_counter

    def carry_out(made: list[Decision], now: float) -> None:
        nonlocal sequence, wake
        for decision in made:
            sequence += 1
            if isinstance(decision, Grant):
                worker = decision.worker
                iteration[worker] += 1
                heapq.heappush(heap, (now + max(0.1, draw(1.0, 0.05)), sequence, worker, iteration[worker]))
            elif isinstance(decision, WakeAt):
                wake = decision.time
                heapq.heappush(heap, (wake, sequence, -1, 0))

    for worker in range(workers):
        carry_out(policy.joined(worker, 0.0), 0.0)
    while counted < decisions:
        now, _, worker, number = heapq.heappop(heap)
        if worker < 0:
            if now != wake:
                continue  # replaced by a newer WakeAt
            began = clock()
            made = policy.woke(now)
            ended = clock()
        elif number != iteration[worker]:
            continue  # cancelled
        else:
            update = Update(worker, number, 0, 32, 1.0)
            began = clock()
            made = policy.arrived(update, now)
            ended = clock()
        total += len(made)
        if total > 4 * workers:
            spent += ended - began
            counted += len(made)
        carry_out(made, now)
    return spent / counted * 1e6


def verdict(value: float, target: float, unit: str = "×") -> str:
    return f"(target ≤ {target:g}{unit}: {'reached' if value <= target else 'MISSED'})"


def main() -> None:
    spec = load_cluster("r2sp-a-vgg16").with_jitter(0.05)
    print("Events: r2sp-a-vgg16, 5% jitter, network on. Median of five, each beside its own bare heapq loop.")
    for policy in SCHEMES:
        ratios, rates = [], []
        for _ in range(5):
            bare, (rate, _) = bare_heapq(), simulated(spec, policy, 600)
            ratios.append(bare / rate)
            rates.append(rate)
        rate, ratio = statistics.median(rates), statistics.median(ratios)
        print(f"  {policy:14s} {rate:10,.0f} events/s   {ratio:5.1f}× a bare loop {verdict(ratio, 12)}")

    print("\nOne decision: microseconds in the policy.")
    for policy in (*SCHEMES, "r2sp:groups=4", "ksync:k=8", "kbatch:k=8", "safa", "groups:count=8"):
        few = min(decision_microseconds(make(policy), 16, 60_000) for _ in range(3))
        many = min(decision_microseconds(make(policy), 10_000, 60_000) for _ in range(3))
        growth = many / few
        print(
            f"  {policy:18s} {few:6.2f} µs at 16 workers, {many:6.2f} µs at 10,000: {growth:4.2f}× {verdict(growth, 2)}"
        )

    print("\nScale: 5% jitter, as many servers per worker as in cluster A.")
    small, _ = simulated(spec, "asp", 2000)
    large, seconds = simulated(with_workers(spec, 10_000), "asp", 20)
    print(
        f"  asp, 10,000 workers, 20 rounds: {seconds:6.1f} s, {large:,.0f} events/s, {large / small:.2f} of the "
        f"{small:,.0f} at 16 workers (target ≥ 0.33: {'reached' if large >= small / 3 else 'MISSED'}), "
        f"peak memory {_peak_memory():,.0f} MB"
    )
    rate, seconds = simulated(with_workers(spec, 1_000), "r2sp", 20)
    memory = _peak_memory()
    print(f"  r2sp, 1,000 workers, 20 rounds: {seconds:6.1f} s, {rate:,.0f} events/s, peak memory {memory:,.0f} MB")


def _peak_memory() -> float:
    """Return the peak memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
