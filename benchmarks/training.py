"""Gradient steps a second of 16 workers with different weights: one after the other, together, and a plain loop.

python benchmarks/training.py [--device cuda] [--data FOLDER] [NETWORK ...]

All three in one run, in turns, the best of each. The plain loop is what anybody would write: one model, the same
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
    parser.add_argument("--data", type=Path, help="where CIFAR-10 lies; without it, noise of that shape")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each way")
    parser.add_argument("--precision", default="float32", choices=get_args(Precision))
    parser.add_argument("networks", nargs="*", default=["mlp", "resnet20", "vgg16"])
    asked = parser.parse_args()
    device = device_named(asked.device)
    data = (sets.load("cifar10", asked.data) if asked.data else noise()).to(device)
    print(f"{WORKERS} workers, batches of {BATCH}, on {asked.device} in {asked.precision}, torch {torch.__version__}")
    print()
    print("| network | one after the other | together | ratio | plain loop | together / plain |")
    print("|---|---|---|---|---|---|")
    for name in asked.networks:
        ways = ways_for(name, data, device, asked.precision)
        best = dict.fromkeys(ways, 0.0)
        for way in ways.values():
            way()  # captures, and whatever else is done once
        for _ in range(3):
            for key, way in ways.items():
                best[key] = max(best[key], per_second(way, asked.seconds / 3, device))
        turn, together, plain = (WORKERS * best[key] for key in ("turn", "together", "plain"))
        print(
            f"| {name} | {turn:,.0f} | {together:,.0f} | {together / turn:.2f} | {plain:,.0f} "
            f"| {together / plain:.2f} |",
            flush=True,
        )


def ways_for(name: str, data: sets.Data, device: torch.device, precision: Precision) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    network = make(name, data)

    def fetch(samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return data.prepared(data.inputs[samples]), data.labels[samples]

    weights = [(flat(network) * (1 + 0.01 * worker)).to(device) for worker in range(WORKERS)]
    samples = [torch.randint(len(data.labels), (BATCH,)).to(device) for _ in range(WORKERS)]
    jobs = [GradientJob(*each) for each in zip(weights, samples, strict=True)]
    turn = Gradients(network, loss, fetch, device, together=False, precision=precision)
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

    return {"turn": lambda: turn.compute(jobs), "together": lambda: together.compute(jobs), "plain": plain}


def per_second(way: Callable[[], None], seconds: float, device: torch.device) -> float:
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < seconds:
        way()
        count += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - began)


def noise() -> sets.Data:
    """Of CIFAR-10's shape: how long a step takes does not depend on what is in the pictures."""
    chance = torch.Generator().manual_seed(0)
    inputs = torch.randint(256, (2048, 3, 32, 32), dtype=torch.uint8, generator=chance)
    labels = torch.randint(10, (2048,), generator=chance)
    return sets.Data("noise", inputs, labels, inputs, labels, 10, (0.5,) * 3, (0.25,) * 3)


if __name__ == "__main__":
    main()
