"""Losses and gradients of many workers at once, each computed from its own weights.

Gradients of workers that compute at the same virtual time are computed together, because that is fast:

- On a GPU each has a copy of the network whose forward and backward pass are one captured graph. The graphs run side by
  side, on a stream each. One after the other, they would take as long as Python and the launches of kernels take.
- On a CPU their weights are stacked and go through one `vmap`, if the layers are matrix products. Networks with
  convolutions are computed one after the other, because stacked convolutions are grouped ones, which are slower.

Either way, the result of a worker depends on its weights and samples alone. Batch norm uses the worker's own batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paceline.model.layout import Layout, Tensor
from paceline.simulate.task import Precision

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Fetch = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

SLOTS = 8  # graphs side by side; more are no faster, and each needs its own memory
MAX_GRAPHS = 64  # captured graphs in all; tuned batches may have many sizes, and the rest run without a graph


@dataclass(eq=False)
class GradientJob:
    """A gradient to compute, or a model to train, from these weights and samples."""

    weights: torch.Tensor
    samples: torch.Tensor
    gradient: torch.Tensor | None = None
    model: torch.Tensor | None = None  # the resulting model, if there is local training or models are pushed
    loss: float = float("nan")


class Gradients:
    """Computes gradients. `fetch` returns the inputs and labels of samples, on the device of the weights."""

    def __init__(
        self,
        network: torch.nn.Module,
        loss: Loss,
        fetch: Fetch,
        device: torch.device,
        together: bool = True,
        precision: Precision = "float32",
    ) -> None:
        """together: compute several jobs at once where that is faster. False is for comparison."""
        network = copy.deepcopy(network).to(device).train()
        torch.func.replace_all_batch_norm_modules_(network)  # no running statistics: a pure function of the weights
        self.network, self._fetch, self._device = network, fetch, device
        self.scorer = Scorer(loss, device, precision)
        self.layout = layout_of(network)
        self._single_slot = Slot(network, self.scorer, fetch)
        self._slots: list[Slot] = []
        self._streams: list[torch.cuda.Stream] = []
        self._graphs = 0
        if not together:
            self._compute = self._in_turn
        elif device.type == "cuda":
            self._compute = self._side_by_side
        elif has_convolutions(network):
            self._compute = self._in_turn
        else:
            self._compute = self._stacked

    def compute(self, jobs: Sequence[GradientJob]) -> None:
        """Set the losses and gradients of the jobs."""
        if jobs:
            losses = self._compute(jobs)
            for job, loss in zip(jobs, losses.tolist(), strict=True):
                job.loss = loss

    def _in_turn(self, jobs: Sequence[GradientJob]) -> torch.Tensor:
        return torch.stack([self._single_slot.compute(job) for job in jobs])

    def _stacked(self, jobs: Sequence[GradientJob]) -> torch.Tensor:
        of_size: dict[int, list[int]] = {}
        for index, job in enumerate(jobs):
            of_size.setdefault(len(job.samples), []).append(index)
        losses = torch.empty(len(jobs), device=self._device)
        for size, indices in of_size.items():
            alike = [jobs[index] for index in indices]
            losses[indices] = self._stack(alike) if len(alike) > 1 and size else self._in_turn(alike)
        return losses

    def _stack(self, jobs: Sequence[GradientJob]) -> torch.Tensor:
        weights, samples = (
            torch.stack(each) for each in zip(*((job.weights, job.samples) for job in jobs), strict=True)
        )
        gradients, losses = stacked_gradients(self.network, self.scorer, self._fetch, weights, samples)
        for job, gradient in zip(jobs, gradients, strict=True):
            job.gradient = gradient
        return losses

    def _side_by_side(self, jobs: Sequence[GradientJob]) -> torch.Tensor:
        while len(self._slots) < min(len(jobs), SLOTS):
            self._slots.append(Slot(copy.deepcopy(self.network), self.scorer, self._fetch))
            self._streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        main = torch.cuda.current_stream()
        losses = torch.empty(len(jobs), device=self._device)
        streams = self._streams[: len(jobs)]
        for index, job in enumerate(jobs):  # captures first: nothing else may run during a capture
            slot = self._slots[index % SLOTS]
            if len(job.samples) not in slot.graphs and self._graphs < MAX_GRAPHS:
                self._graphs += 1
                slot.capture(job, self._streams[index % SLOTS])
        for stream in streams:
            stream.wait_stream(main)
        for index, job in enumerate(jobs):
            slot = self._slots[index % SLOTS]
            with torch.cuda.stream(self._streams[index % SLOTS]):
                losses[index] = slot.replay(job)
        for stream in streams:
            main.wait_stream(stream)
        return losses


@dataclass(frozen=True)
class Scorer:
    """Computes the loss of a network, with the given precision."""

    loss: Loss
    device: torch.device
    precision: Precision

    def __call__(
        self, network: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        # The cache would keep bfloat16 weights from one pass to the next, on which a captured graph must not rely.
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16", cache_enabled=False
        ):
            return self.loss(network(inputs), labels)


class Slot:
    """A copy of the network whose weights are one flat tensor, and whose gradients are another."""

    def __init__(self, network: torch.nn.Module, scorer: Scorer, fetch: Fetch) -> None:
        self._network, self._scorer, self._fetch = network, scorer, fetch
        layout = layout_of(network)
        device = next(network.parameters()).device
        self.weights = torch.zeros(layout.size, device=device)
        self.gradient = torch.zeros(layout.size, device=device)
        views, gradients = _views(self.weights, layout), _views(self.gradient, layout)
        for name, parameter in network.named_parameters():
            views[name].copy_(parameter.data)
            parameter.data, parameter.grad = views[name], gradients[name]
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._pool: Any = None  # memory shared by the graphs of this slot, which run one after the other

    def compute(self, job: GradientJob) -> torch.Tensor:
        """Set the gradient of a job, and return its loss."""
        self.weights.copy_(job.weights)
        loss = self.forward_backward(job.samples)
        job.gradient = self.gradient.clone()
        return loss

    def capture(self, job: GradientJob, stream: torch.cuda.Stream) -> None:
        """Capture a graph for batches of this size."""
        samples = job.samples.clone()
        self.weights.copy_(job.weights)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # cuDNN and cuBLAS need a warm-up
                self.forward_backward(samples)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, stream):
            loss = self.forward_backward(samples)
        self._pool = graph.pool()
        self.graphs[len(samples)] = (graph, samples, loss)

    def replay(self, job: GradientJob) -> torch.Tensor:
        """Do the same as `compute`, with the captured graph if there is one for this batch size."""
        captured = self.graphs.get(len(job.samples))
        if captured is None:
            return self.compute(job)
        graph, samples, loss = captured
        self.weights.copy_(job.weights)
        samples.copy_(job.samples)
        graph.replay()
        job.gradient = self.gradient.clone()
        return loss

    def forward_backward(self, samples: torch.Tensor) -> torch.Tensor:
        """Run a forward and a backward pass. Store the gradient of these samples, and return their loss."""
        self.gradient.zero_()
        inputs, labels = self._fetch(samples)
        if inputs.is_cuda and inputs.dim() == 4:  # 10 to 25% faster there
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        loss = self._scorer(self._network, inputs, labels)
        torch.autograd.backward(loss)
        return loss.detach()


def stacked_gradients(
    network: torch.nn.Module, scorer: Scorer, fetch: Fetch, weights: torch.Tensor, samples: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients and losses of several models at once.

    Row i of `weights` is the weights of model i, and row i of `samples` its samples.
    """
    layout, count = layout_of(network), len(weights)
    inputs, labels = (each.reshape(count, -1, *each.shape[1:]) for each in fetch(samples.reshape(-1)))

    def loss(flat: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return scorer(partial(torch.func.functional_call, network, _views(flat, layout)), inputs, labels)

    gradients, losses = torch.func.vmap(torch.func.grad_and_value(loss))(weights, inputs, labels)
    return gradients, losses.detach()


def has_convolutions(network: torch.nn.Module) -> bool:
    """Return whether the network has convolutions. Stacked, they become grouped ones, at which a CPU is slow."""
    return any(isinstance(layer, torch.nn.modules.conv._ConvNd) for layer in network.modules())


def layout_of(network: torch.nn.Module) -> Layout:
    """Return the place of each parameter in the flat tensor."""
    return Layout(tuple(Tensor(name, tuple(each.shape)) for name, each in network.named_parameters()))


def flat(network: torch.nn.Module) -> torch.Tensor:
    """Return a copy of the network's parameters as one flat tensor."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in network.parameters()])


def load(network: torch.nn.Module, weights: torch.Tensor) -> None:
    """Copy flat weights into the network."""
    with torch.no_grad():
        for name, view in _views(weights, layout_of(network)).items():
            network.get_parameter(name).copy_(view)


def _views(row: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    sizes = [tensor.size for tensor in layout.tensors]
    parts = torch.split(row, sizes)
    return {tensor.name: part.view(tensor.shape) for tensor, part in zip(layout.tensors, parts, strict=True)}
