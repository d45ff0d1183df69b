"""The sizes of the models and of their trainings."""

from __future__ import annotations

from dataclasses import dataclass

WORKERS = 8
VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True)
class Size:
    """A model, and the length of its training."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int  # sequences of a worker's step
    local_steps: int
    rounds: int
    warm_up: int  # steps
    rate: float  # the largest learning rate of the workers
    validation: int  # batches of all workers
    evaluate_every: int  # rounds


SIZES = {
    "tiny": Size(1, 32, 2, 32, 2, 8, 4, 4, 1e-3, 1, 2),
    "cpu": Size(2, 64, 2, 64, 8, 24, 32, 48, 8e-3, 8, 2),
    "small": Size(6, 384, 6, 256, 26, 50, 40, 100, 1e-3, 8, 2),
}
