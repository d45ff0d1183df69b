"""Milliseconds of a small training step: two workers under paceline, beside two processes of PyTorch's DDP.

python benchmarks/overhead.py steps [--repeats 3] [--hidden 64 4096] [--policies bsp asp r2sp]

The model is an MLP with one hidden layer. Every process has one thread, batches of 32 and SGD with momentum. Where a
step takes a few milliseconds, each message and each change of threads counts.

A run times windows of steps after a warm-up. The median window of its slower worker counts. All ways alternate, and
each repeat starts new processes. `python steps.py 64` is the training script itself.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

INPUTS, CLASSES, BATCH, SAMPLES = 64, 10, 32, 8192
WARM_UP, WINDOW, WINDOWS = 100, 50, 12  # steps before the first window, steps of a window, windows
DDP = "torchrun, DDP"


def compare(hidden_units: Sequence[int], policies: Sequence[str], repeats: int) -> None:
    """Print a table for each size of the model: the best and the median of all runs, and their ratios to DDP."""
    print(
        f"\nMilliseconds of a step; {INPUTS} inputs, batches of {BATCH}, 2 processes with 1 thread, {repeats} repeats\n"
    )
    print("| hidden units | way | best | × DDP | median | × DDP |")
    print("|---|---|---|---|---|---|")
    for hidden in hidden_units:
        ways = {DDP: ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]}
        for policy in policies:
            ways[policy] = ["-m", "paceline", "run", "--workers", "2", "--policy", policy]
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, launcher in ways.items():
                found[way].append(milliseconds([sys.executable, *launcher, __file__, str(hidden)]))
        best = {way: min(values) for way, values in found.items()}
        median = {way: statistics.median(values) for way, values in found.items()}
        for way in ways:
            ratios = best[way] / best[DDP], median[way] / median[DDP]
            print(f"| {hidden:,} | {way} | {best[way]:.2f} | {ratios[0]:.2f} | {median[way]:.2f} | {ratios[1]:.2f} |")
        sys.stdout.flush()


def milliseconds(command: list[str]) -> float:
    """Run a command, and return the median window of its slower worker, in milliseconds a step."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    workers: list[list[float]] = [json.loads(found) for found in re.findall(r"windows: (\[.*?\])", ran.stdout)]
    if ran.returncode or len(workers) != 2:
        sys.exit(f"{' '.join(command)} failed:\n{ran.stdout}{ran.stderr}")
    return max(statistics.median(windows) for windows in workers)


def train(hidden: int) -> None:
    """Train an MLP, as a worker of a job or as a rank of torchrun. Print the milliseconds a step of every window."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(INPUTS, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, CLASSES)
    )
    data = TensorDataset(torch.randn(SAMPLES, INPUTS), torch.randint(0, CLASSES, (SAMPLES,)))
    steps = WARM_UP + WINDOW * WINDOWS
    epochs = -(-2 * steps * BATCH // SAMPLES)
    loader: Any
    if "PACELINE_CONNECT" in os.environ:
        import paceline

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        loader = paceline.join(model, optimizer).loader(DataLoader(data, BATCH, shuffle=True), epochs)
    else:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    windows: list[float] = []
    step, began = 0, 0.0
    for _ in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss: Any = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step >= WARM_UP and (step - WARM_UP) % WINDOW == 0:
                now = time.perf_counter()
                if step > WARM_UP:
                    windows.append(1000 * (now - began) / WINDOW)
                began = now
    print(f"windows: {json.dumps([round(each, 4) for each in windows])}", flush=True)


if __name__ == "__main__":
    train(int(sys.argv[1]))
