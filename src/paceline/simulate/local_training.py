"""Local training: many steps of SGD that a federated client makes between two exchanges with the server.

Clients are stacked: their weights are the rows of one tensor, and each step is made for all of them at once. On a GPU
the step is a captured graph, and convolutions are written as matrix products (`batched_convolution`), because stacked
convolutions would be grouped ones. On a CPU grouped convolutions are slower than one client after the other, so
networks with convolutions are trained that way there. Either way, the result depends on a client's weights and samples
alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.model.optimizer_spec import OptimizerSpec
from paceline.simulate.batched_convolution import as_products
from paceline.simulate.gradients import Fetch, GradientJob, Scorer, Slot, has_convolutions, stacked_gradients
from paceline.simulate.task import LocalSettings

STACK = 64  # clients at once on a GPU; more are no faster, and need more memory
STACK_MULTIPLE = 8  # stacks on a GPU are filled up to a multiple of this, so that few sizes need a graph
WARM_UP = 2  # warm-up steps for cuBLAS

#: Returns the gradients and losses of several clients from their weights and samples.
Stacked = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LocalTraining:
    """Trains the models of jobs whose samples are one batch for each step. Sets their models and mean losses."""

    def __init__(
        self,
        network: torch.nn.Module,
        scorer: Scorer,
        fetch: Fetch,
        local: LocalSettings,
        optimizer: OptimizerSpec,
        together: bool = True,
    ) -> None:
        """The settings of the optimizer are those of SGD. Each client begins without momentum."""
        self._scorer, self._fetch, self._local = scorer, fetch, local
        self._device = next(network.parameters()).device
        (settings, *_) = optimizer.settings_of_groups
        momentum, decay = (float(settings.get(key) or 0.0) for key in ("momentum", "weight_decay"))  # type: ignore[arg-type]
        rate = torch.zeros((), device=self._device)  # a tensor, so that captured graphs stay valid when it changes
        self._descent = _Descent(rate, momentum, decay, local.proximal)
        on_gpu = self._device.type == "cuda"
        self._together = together and (on_gpu or not has_convolutions(network))
        self._network = as_products(network) if on_gpu and together else network
        self._single_slot: Slot | None = None
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = torch.cuda.graph_pool_handle() if on_gpu else None  # shared: graphs run one after the other

    def compute(self, jobs: Sequence[GradientJob], rate: float) -> None:
        """Train the model of each job from its weights, with this learning rate."""
        self._descent.rate.fill_(rate)
        if not self._together or (len(jobs) == 1 and self._device.type != "cuda"):
            for job in jobs:
                self._train_single(job)
        elif self._device.type == "cuda":
            for first in range(0, len(jobs), STACK):
                self._train_captured(jobs[first : first + STACK])
        else:
            self._train_stacked(jobs)

    def _train_single(self, job: GradientJob) -> None:
        slot = self._single_slot = self._single_slot or Slot(copy.deepcopy(self._network), self._scorer, self._fetch)
        slot.weights.copy_(job.weights)
        memory = self._descent.begin(slot.weights)
        losses = torch.zeros((), device=self._device)
        for samples in job.samples:
            losses += slot.forward_backward(samples)
            self._descent.step(slot.weights, slot.gradient, memory)
        job.model, job.loss = slot.weights.clone(), float(losses) / self._local.steps

    def _train_stacked(self, jobs: Sequence[GradientJob]) -> None:
        weights = torch.stack([job.weights for job in jobs])
        memory = self._descent.begin(weights)
        losses = torch.zeros(len(jobs), device=self._device)
        for step in range(self._local.steps):
            gradients, of_step = self._gradients(weights, torch.stack([job.samples[step] for job in jobs]))
            losses += of_step
            self._descent.step(weights, gradients, memory)
        self._store_results(jobs, weights, losses)

    def _train_captured(self, jobs: Sequence[GradientJob]) -> None:
        size = -(-len(jobs) // STACK_MULTIPLE) * STACK_MULTIPLE
        filled = [*jobs, *[jobs[-1]] * (size - len(jobs))]
        weights = torch.stack([job.weights for job in filled])
        samples = torch.stack([job.samples for job in filled], 1)
        if size not in self._graphs:
            self._graphs[size] = _Graph(self._gradients, self._descent, weights, samples, self._pool)
        self._store_results(jobs, *self._graphs[size].run(weights, samples))

    def _store_results(self, jobs: Sequence[GradientJob], weights: torch.Tensor, losses: torch.Tensor) -> None:
        for job, model, loss in zip(jobs, weights, losses.tolist(), strict=False):
            job.model, job.loss = model.clone(), loss / self._local.steps

    def _gradients(self, weights: torch.Tensor, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return stacked_gradients(self._network, self._scorer, self._fetch, weights, samples)


@dataclass
class _Memory:
    """The state of SGD during one round of local training."""

    anchor: torch.Tensor | None
    velocity: torch.Tensor | None

    def start(self, weights: torch.Tensor) -> None:
        if self.anchor is not None:
            self.anchor.copy_(weights)
        if self.velocity is not None:
            self.velocity.zero_()


@dataclass(frozen=True)
class _Descent:
    """A step of SGD with momentum, weight decay and the proximal term of FedProx, in place."""

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
        if memory.anchor is not None:
            gradient.add_(weights - memory.anchor, alpha=self.proximal)
        if memory.velocity is not None:
            gradient = memory.velocity.mul_(self.momentum).add_(gradient)
        weights.sub_(gradient * self.rate)


class _Graph:
    """A captured step of a fixed number of clients."""

    def __init__(
        self, gradients: Stacked, descent: _Descent, weights: torch.Tensor, samples: torch.Tensor, pool: Any
    ) -> None:
        self._gradients, self._descent = gradients, descent
        self._weights, self._samples = weights.clone(), samples[0].clone()
        self._memory = descent.begin(self._weights)
        self._losses = torch.zeros(len(weights), device=weights.device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool, stream):
            self._step()

    def _step(self) -> None:
        gradients, losses = self._gradients(self._weights, self._samples)
        self._losses += losses
        self._descent.step(self._weights, gradients, self._memory)

    def run(self, weights: torch.Tensor, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and the sums of losses after all steps. They are valid until the next run."""
        self._weights.copy_(weights)
        self._memory.start(weights)
        self._losses.zero_()
        for of_step in samples:
            self._samples.copy_(of_step)
            self._graph.replay()
        return self._weights, self._losses
