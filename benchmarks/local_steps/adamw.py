"""AdamW for the models of all workers at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.local_steps.size import Size

BETAS, DECAY, EPSILON = (0.9, 0.95), 0.1, 1e-8
LARGEST_NORM = 1.0  # of a worker's gradient


def adamw(
    flat: Tensor, copy: Tensor, gradient: Tensor, first: Tensor, second: Tensor, decays: Tensor, settings: Tensor
) -> None:
    """Step all workers with clipped gradients. A worker with a rate of 0 does not change.

    copy: gets the new weights in its own type. decays: 1 for elements with weight decay. settings: for each worker its
    rate, and the two bias corrections.
    """
    rate, mean_scale, square_scale = settings[:, 0:1], settings[:, 1:2], settings[:, 2:3]
    gradient = gradient.float()
    norm = gradient.square().sum(1, keepdim=True).sqrt()
    gradient = gradient * (LARGEST_NORM / (norm + 1e-6)).clamp(max=1.0)
    moves = rate > 0
    mean = torch.where(moves, first + (1 - BETAS[0]) * (gradient - first), first)
    square = torch.where(moves, BETAS[1] * second + (1 - BETAS[1]) * gradient.square(), second)
    new = flat * (1 - rate * DECAY * decays)
    new = new - rate * mean_scale * mean / ((square * square_scale).sqrt() + EPSILON)
    first.copy_(mean)
    second.copy_(square)
    flat.copy_(new)
    copy.copy_(new)


def step_settings(size: Size) -> npt.NDArray[np.float32]:
    """Return for each step of a worker its rate and AdamW's two bias corrections: [steps, 3].

    The rate rises linearly during the warm-up. Then it falls along a cosine to a tenth.
    """
    steps = size.rounds * size.local_steps
    done = np.arange(1, steps + 1)
    progress = np.clip((done - size.warm_up) / max(1, steps - size.warm_up), 0, 1)
    rate = size.rate * np.minimum(done / size.warm_up, 0.55 + 0.45 * np.cos(np.pi * progress))
    return np.stack([rate, 1 / (1 - BETAS[0] ** done), 1 / (1 - BETAS[1] ** done)], axis=1).astype(np.float32)
