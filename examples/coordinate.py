"""Use only paceline's coordinator: R²SP decides the order of exchanges that torch.distributed makes.

paceline run --servers 0 --workers 4 --policy r2sp examples/coordinate.py

A separate process holds the weights and exchanges them for gradients with send and recv; it does not use paceline.
The workers call `proceed` before each exchange. They therefore exchange one after another, evenly spaced, instead of
all at the same time.
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

STEPS, BATCH_SIZE, LEARNING_RATE = 60, 32, 0.2
PIXELS, CLASSES = 64, 10
RENDEZVOUS = Path(tempfile.gettempdir()) / f"paceline-example-{os.environ.get('PACELINE_CONNECT', 'alone')}"


def connect(rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{RENDEZVOUS}", rank=rank, world_size=size)


def serve_weights(workers: int, weights: torch.Tensor) -> None:
    """Apply each gradient that arrives, and send the new weights back to its sender."""
    connect(workers, workers + 1)
    gradient = torch.empty_like(weights)
    for _ in range(workers * STEPS):
        sender = dist.recv(gradient)
        weights -= LEARNING_RATE * gradient
        dist.send(weights, sender)
    dist.destroy_process_group()


def scores(weights: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Return the output of a linear model whose last row of weights is the bias."""
    matrix = weights.view(PIXELS + 1, CLASSES)
    return images @ matrix[:PIXELS] + matrix[PIXELS]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load("digits")
    images, labels = digits.inputs.flatten(1) / 255, digits.labels
    workers, rank = int(os.environ.get("PACELINE_WORKERS", "1")), int(os.environ.get("PACELINE_WORKER", "0"))

    weights = torch.zeros((PIXELS + 1) * CLASSES)
    server = mp.get_context("fork").Process(target=serve_weights, args=(workers, weights.clone()))
    if rank == 0:
        server.start()
    connect(rank, workers + 1)  # before the first turn, because all processes must connect

    with paceline.coordinate() as pace:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            batch_size = pace.batch_size or BATCH_SIZE
            batch = torch.randint(len(labels), (batch_size,), generator=generator)
            local = weights.clone().requires_grad_()
            loss = F.cross_entropy(scores(local, images[batch]), labels[batch])
            loss.backward()
            permission = pace.proceed(batch_size=batch_size, loss=loss.item())  # wait for this worker's turn
            dist.send(local.grad * permission.weight, workers)
            dist.recv(weights, workers)

    if rank == 0:
        server.join()
        RENDEZVOUS.unlink(missing_ok=True)
        predicted = scores(weights, digits.test_inputs.flatten(1) / 255).argmax(1)
        accuracy = (predicted == digits.test_labels).float().mean().item()
        print(f"accuracy on the test set: {accuracy:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
