"""Gradient steps per second of 16 workers with different weights: in sequence, together, and in a plain loop.

python benchmarks/training.py [--device cuda] [--data FOLDER] [NETWORK ...]

All three alternate in one run, and the best of each counts. The plain loop is ordinary PyTorch: one model, the same
samples, forward, backward and the optimizer's step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch

from paceline.simulate.gradients import GradientJob, Gradients, flat
from paceline.simulate.task import Precision, device_named
from paceline.workloads import data as sets
from paceline.workloads.networks import loss, make

WORKERS = 16
BATCH = 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, help="the folder with CIFAR-10; without it, noise of that shape")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds for each of the three")
    parser.add_argument("--precision", default="float32", choices=get_args(Precision))
    parser.add_argument("networks", nargs="*", default=["mlp", "resnet20", "vgg16"])
    args = parser.parse_args()
    device = device_named(args.device)
    data = (sets.load("cifar10", args.data) if args.data else noise()).to(device)
    print(f"{WORKERS} workers, batches of {BATCH}, on {args.device} in {args.precision}, torch {torch.__version__}")
    print()
    print("| network | in sequence | together | ratio | plain loop | together / plain |")
    print("|---|---|---|---|---|---|")
    for name in args.networks:
        ways = ways_for(name, data, device, args.precision)
        best = dict.fromkeys(ways, 0.0)
        for way in ways.values():
            way()  # captures CUDA graphs, and does all other one-time work
        for _ in range(3):
            for key, way in ways.items():
                best[key] = max(best[key], per_second(way, args.seconds / 3, device))
        sequence, together, plain = (WORKERS * best[key] for key in ("sequence", "together", "plain"))
        print(
            f"| {name} | {sequence:,.0f} | {together:,.0f} | {together / sequence:.2f} | {plain:,.0f} "
            f"| {together / plain:.2f} |",
            flush=True,
        )


def ways_for(name: str, data: sets.Data, device: torch.device, precision: Precision) -> dict[str, Callable[[], None]]:
    """Return the three ways to compute a gradient step of every worker."""
    torch.manual_seed(0)
    network = make(name, data)

    def fetch(samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return data.prepared(data.inputs[samples]), data.labels[samples]

    weights = [(flat(network) * (1 + 0.01 * worker)).to(device) for worker in range(WORKERS)]
    samples = [torch.randint(len(data.labels), (BATCH,)).to(device) for _ in range(WORKERS)]
    jobs = [GradientJob(*each) for each in zip(weights, samples, strict=True)]
    sequence = Gradients(network, loss, fetch, device, together=False, precision=precision)
    together = Gradients(network, loss, fetch, device, precision=precision)
    model = make(name, data).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def plain() -> None:
        for each in samples:
            optimizer.zero_grad()
            inputs, labels = fetch(each)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                judged = loss(model(inputs), labels)
            torch.autograd.backward(judged)
            optimizer.step()

    return {"sequence": lambda: sequence.compute(jobs), "together": lambda: together.compute(jobs), "plain": plain}


def per_second(way: Callable[[], None], seconds: float, device: torch.device) -> float:
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < seconds:
        way()
        count += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - began)


def noise() -> sets.Data:
    """Return random data of CIFAR-10's shape. The time of a step does not depend on the content of the images."""
    chance = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (2048, 3, 32, 32), dtype=torch.uint8, generator=chance)
    labels = torch.randint(10, (2048,), generator=chance)
    return sets.Data("noise", inputs, labels, inputs, labels, 10, (0.5,) * 3, (0.25,) * 3)


if __name__ == "__main__":
    main()
