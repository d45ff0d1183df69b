"""The coordinator alone: R²SP's order for a data plane that is plain torch.distributed.

paceline run --servers 0 --workers 4 --policy r2sp examples/coordinate.py

One more process keeps the weights, and exchanges them for gradients by send and recv. Nothing in it knows of paceline.
The workers ask before each exchange, and so they come one after the other, evenly gapped, instead of all at once.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F

import paceline
from paceline.workloads.data import load

STEPS, BATCH, RATE = 60, 32, 0.2
RENDEZVOUS = Path(tempfile.gettempdir()) / f"paceline-example-{os.environ.get('PACELINE_CONNECT', 'alone')}"


def connect(rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{RENDEZVOUS}", rank=rank, world_size=size)


def keep_weights(workers: int, weights: torch.Tensor) -> None:
    """The data plane's server: whoever sends a gradient gets the new weights."""
    connect(workers, workers + 1)
    gradient = torch.empty_like(weights)
    for _ in range(workers * STEPS):
        sender = dist.recv(gradient)
        weights -= RATE / workers * gradient
        dist.send(weights, sender)
    dist.destroy_process_group()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load("digits")
    images, labels = digits.inputs.flatten(1) / 255, digits.labels
    workers, rank = int(os.environ.get("PACELINE_WORKERS", "1")), int(os.environ.get("PACELINE_WORKER", "0"))
    weights = torch.zeros(65 * 10)
    keeper = mp.get_context("fork").Process(target=keep_weights, args=(workers, weights.clone()))
    if rank == 0:
        keeper.start()
    connect(rank, workers + 1)  # before we wait for a first permission: all must come to this

    with paceline.coordinate() as pace:
        chosen = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            batch = torch.randint(len(labels), (BATCH,), generator=chosen)
            mine = weights.clone().requires_grad_()
            matrix = mine.view(65, 10)
            loss = F.cross_entropy(images[batch] @ matrix[:64] + matrix[64], labels[batch])
            loss.backward()
            pace.proceed(batch_size=BATCH, loss=loss.item())  # wait for our turn
            dist.send(mine.grad, workers)
            dist.recv(weights, workers)

    if rank == 0:
        keeper.join()
        RENDEZVOUS.unlink(missing_ok=True)
        matrix = weights.view(65, 10)
        scores = digits.test_inputs.flatten(1) / 255 @ matrix[:64] + matrix[64]
        right = (scores.argmax(1) == digits.test_labels).float().mean().item()
        print(f"accuracy on digits not trained on: {right:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
