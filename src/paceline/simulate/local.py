"""Local training: what a federated client does between two exchanges with the server, many steps of SGD by itself.

On a GPU all steps of a client are one captured graph, and the graphs of several clients run side by side. On a CPU
clients are stacked, where the layers are matrix products, and make each step together; with convolutions they are
taken one after the other. Whichever way, the result depends on a client's weights and samples alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.model.spec import OptimizerSpec
from paceline.simulate.gradients import Fetch, Job, Judge, Slot, has_convolutions, stacked_gradients
from paceline.simulate.task import Local

SLOTS = 16  # clients side by side: their networks are small
WARM_UP = 2  # steps that cuDNN and cuBLAS want to have seen


class LocalTraining:
    """Carries out jobs whose samples are a batch for each step: fills in their models, and their mean losses."""

    def __init__(
        self,
        network: torch.nn.Module,
        judge: Judge,
        fetch: Fetch,
        local: Local,
        optimizer: OptimizerSpec,
        together: bool = True,
    ) -> None:
        """The optimizer's settings are SGD's; each client begins with no momentum."""
        self._network, self._judge, self._fetch, self._local = network, judge, fetch, local
        self._device = next(network.parameters()).device
        (settings, *_) = optimizer.settings_of_groups
        momentum, decay = (float(settings.get(key) or 0.0) for key in ("momentum", "weight_decay"))  # type: ignore[arg-type]
        rate = torch.zeros((), device=self._device)  # there, so that graphs need not be made anew
        self._descent = _Descent(rate, momentum, decay, local.proximal)
        self._stackable = together and self._device.type != "cuda" and not has_convolutions(network)
        self._slots: list[_Client] = []

    def compute(self, jobs: Sequence[Job], rate: float) -> None:
        """Train each job's model from its weights, at this learning rate."""
        self._descent.rate.fill_(rate)
        if self._device.type == "cuda":
            self._side_by_side(jobs)
        elif self._stackable and len(jobs) > 1:
            self._stacked(jobs)
        else:
            self._have_slots(1)
            for job in jobs:
                job.model, loss = self._slots[0].run(job)
                job.loss = float(loss)

    def _have_slots(self, count: int) -> None:
        while len(self._slots) < count:
            slot = Slot(copy.deepcopy(self._network), self._judge, self._fetch)
            self._slots.append(_Client(slot, self._local.steps, self._descent))

    def _stacked(self, jobs: Sequence[Job]) -> None:
        weights = torch.stack([job.weights for job in jobs])
        memory = self._descent.begin(weights)
        losses = torch.zeros(len(jobs))
        for step in range(self._local.steps):
            samples = torch.stack([job.samples[step] for job in jobs])
            gradients, of_step = stacked_gradients(self._network, self._judge, self._fetch, weights, samples)
            losses += of_step
            self._descent.step(weights, gradients, memory)
        for job, model, loss in zip(jobs, weights, losses.tolist(), strict=True):
            job.model, job.loss = model.clone(), loss / self._local.steps

    def _side_by_side(self, jobs: Sequence[Job]) -> None:
        self._have_slots(min(len(jobs), SLOTS))
        for slot, job in zip(self._slots, jobs, strict=False):  # captures first: nothing else may run meanwhile
            slot.capture(job)
        main = torch.cuda.current_stream()
        streams = [slot.stream for slot in self._slots[: len(jobs)]]
        losses = torch.empty(len(jobs), device=self._device)
        for stream in streams:
            stream.wait_stream(main)
        for index, job in enumerate(jobs):
            slot = self._slots[index % SLOTS]
            with torch.cuda.stream(slot.stream):
                job.model, losses[index] = slot.replay(job)
        for stream in streams:
            main.wait_stream(stream)
        for job, loss in zip(jobs, losses.tolist(), strict=True):
            job.loss = loss


@dataclass
class _Memory:
    """What SGD remembers of one round."""

    began: torch.Tensor | None
    velocity: torch.Tensor | None

    def start(self, weights: torch.Tensor) -> None:
        if self.began is not None:
            self.began.copy_(weights)
        if self.velocity is not None:
            self.velocity.zero_()


@dataclass(frozen=True)
class _Descent:
    """A step of SGD, with momentum, weight decay and FedProx's term, in place."""

    rate: torch.Tensor
    momentum: float
    decay: float
    proximal: float

    def begin(self, weights: torch.Tensor) -> _Memory:
        memory = _Memory(
            torch.empty_like(weights) if self.proximal else None, torch.empty_like(weights) if self.momentum else None
        )
        memory.start(weights)
        return memory

    @torch.no_grad()
    def step(self, weights: torch.Tensor, gradient: torch.Tensor, memory: _Memory) -> None:
        if self.decay:
            gradient.add_(weights, alpha=self.decay)
        if memory.began is not None:
            gradient.add_(weights - memory.began, alpha=self.proximal)
        if memory.velocity is not None:
            gradient = memory.velocity.mul_(self.momentum).add_(gradient)
        weights.sub_(gradient * self.rate)


class _Client:
    """A client's network, and the steps that it makes."""

    def __init__(self, slot: Slot, steps: int, descent: _Descent) -> None:
        self._slot, self._count, self._descent = slot, steps, descent
        self._memory = descent.begin(slot.weights)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._samples: torch.Tensor | None = None
        self._loss: torch.Tensor | None = None
        self.stream: Any = torch.cuda.Stream() if slot.weights.is_cuda else None  # type: ignore[no-untyped-call]

    def run(self, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
        self._slot.weights.copy_(job.weights)
        loss = self._steps(job.samples, self._count)
        return self._slot.weights.clone(), loss

    def capture(self, job: Job) -> None:
        """Make a graph of all the steps."""
        if self._graph is not None:
            return
        self._samples = job.samples.clone()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._slot.weights.copy_(job.weights)
            self._steps(self._samples, min(WARM_UP, self._count))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self._loss = self._steps(self._samples, self._count)
        self._graph = graph

    def replay(self, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._graph is not None and self._samples is not None and self._loss is not None
        self._slot.weights.copy_(job.weights)
        self._samples.copy_(job.samples)
        self._graph.replay()
        return self._slot.weights.clone(), self._loss

    def _steps(self, samples: torch.Tensor, count: int) -> torch.Tensor:
        """So many steps from where the weights are; the mean of their losses."""
        self._memory.start(self._slot.weights)
        losses = torch.zeros((), device=self._slot.weights.device)
        for step in range(count):
            losses += self._slot.passed(samples[step])
            self._descent.step(self._slot.weights, self._slot.gradient, self._memory)
        return losses / count
