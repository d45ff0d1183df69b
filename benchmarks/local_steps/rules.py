"""The server's rules: how the differences of the workers change its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks.local_steps.size import WORKERS

MOMENTUM = 0.9


@dataclass
class Server:
    """The server's model, and the state of its rule."""

    weights: Tensor
    rate: float
    momentum: Tensor = field(init=False)
    summed: Tensor = field(init=False)  # differences since the momentum changed
    received: int = 0  # differences

    def __post_init__(self) -> None:
        self.momentum, self.summed = torch.zeros_like(self.weights), torch.zeros_like(self.weights)


Rule = Callable[[Server, slice, Tensor], None]  # changes a part of the server's model by differences, [workers, part]


def average(server: Server, part: slice, differences: Tensor, rate: float | None = None) -> None:
    """Add the mean difference. A worker that pushes nothing counts with a difference of zero."""
    server.weights[part] += (server.rate if rate is None else rate) / WORKERS * differences.sum(0)


def nesterov(server: Server, part: slice, differences: Tensor, full: bool = False) -> None:
    """Step by Nesterov momentum. full: take the mean of these differences for the mean of all workers."""
    step = differences.mean(0) if full else differences.sum(0) / WORKERS
    server.momentum[part] = MOMENTUM * server.momentum[part] + step
    server.weights[part] += server.rate * (step + MOMENTUM * server.momentum[part])


def delayed_nesterov(server: Server, part: slice, differences: Tensor) -> None:
    """Add each difference. Change and add the momentum once for every N differences (the paper's c is 0)."""
    server.summed[part] += differences.sum(0)
    server.received += len(differences)
    average(server, part, differences)
    if server.received % WORKERS == 0:
        server.momentum[part] = MOMENTUM * server.momentum[part] + server.summed[part] / WORKERS
        server.weights[part] += server.rate * MOMENTUM * server.momentum[part]
        server.summed[part] = 0.0


RULES: dict[str, Rule] = {"nesterov": nesterov, "naive": partial(nesterov, full=True), "delayed": delayed_nesterov}
