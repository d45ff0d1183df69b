"""The DDP baseline: PyTorch's DistributedDataParallel over gloo, on the same hosts, with the same bytes and waiting.

A module is wrapped in DDP, its gradients are reduced in DDP's buckets during the backward pass, and a real optimizer
makes the step. Only the computing is replaced by waiting. Each parameter of the module is a part of the model; the
module waits for as long as computing that part would take. It waits in the forward pass or, with `overlap`, one third
in the forward pass and two thirds in the backward pass.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed

from paceline.lab.synthetic_worker import RATE, wait_until
from paceline.simulate.cluster_spec import WorkerSpec, worker_rng

PARTS = 16  # number of the module's parameters


@dataclass(frozen=True)
class Rank:
    """One process of a DDP job."""

    number: int
    of: int  # number of ranks
    store: tuple[str, int]  # address of the TCPStore
    spec: WorkerSpec
    batch: int
    model_bytes: float
    iterations: int
    overlap: bool
    seed: int = 0


class _Wait(torch.autograd.Function):
    """Waits in the forward and in the backward pass for as long as computing one part of the model would take."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: torch.Tensor, gradient: torch.Tensor, clock: _Clock) -> torch.Tensor:
        clock.forward()
        ctx.gradient, ctx.clock = gradient, clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *up: torch.Tensor) -> Any:
        ctx.clock.backward()
        return up[0], ctx.gradient, None, None


class _Clock:
    """Waits until the next part of an iteration's computing would be done."""

    def __init__(self, overlap: bool) -> None:
        self._share = 1 / 3 if overlap else 1.0

    def start(self, seconds: float) -> None:
        self._moment, self._seconds = time.perf_counter(), seconds

    def forward(self) -> None:
        self._moment += self._share * self._seconds / PARTS
        wait_until(self._moment)

    def backward(self) -> None:
        self._moment += (1 - self._share) * self._seconds / PARTS
        wait_until(self._moment)


class _WaitingModel(torch.nn.Module):
    """A model that waits instead of computing. Its gradients are constant."""

    def __init__(self, elements: int, clock: _Clock) -> None:
        super().__init__()
        ends = [elements * part // PARTS for part in range(PARTS + 1)]
        sizes = [stop - start for start, stop in pairwise(ends)]
        self.parts = torch.nn.ParameterList([torch.zeros(size) for size in sizes])
        self._gradients = [torch.full((size,), 1e-3) for size in sizes]
        self._clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, gradient in zip(self.parts, self._gradients, strict=True):
            x = _Wait.apply(x, part, gradient, self._clock)  # type: ignore[no-untyped-call]
        return x


def train(rank: Rank) -> tuple[float, float]:
    """Run one rank. Return the mean seconds and the mean CPU seconds of an iteration, without the first quarter."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    host, port = rank.store
    store = torch.distributed.TCPStore(host, port, rank.of, rank.number == 0)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.of)
    chance, clock = worker_rng(rank.number, rank.seed), _Clock(rank.overlap)
    size = rank.model_bytes / 4
    # With overlap, small buckets, so that several are sent while others are computed; otherwise DDP's default.
    bucket = rank.model_bytes / 8e6 / 1.048576 if rank.overlap else 25.0
    model = torch.nn.parallel.DistributedDataParallel(
        _WaitingModel(round(size), clock), bucket_cap_mb=bucket, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x = torch.zeros(1, requires_grad=True)
    warm_up = rank.iterations // 4
    for iteration in range(rank.iterations):
        if iteration == warm_up:
            began, spent = time.perf_counter(), time.process_time()
        clock.start(rank.spec.draw(rank.batch, chance))
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    count = rank.iterations - warm_up
    took, cpu = (time.perf_counter() - began) / count, (time.process_time() - spent) / count
    torch.distributed.barrier()  # no rank closes its connections before all are done
    return took, cpu
