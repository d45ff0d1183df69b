"""Losses and gradients of many workers at once, each from weights of its own.

Workers that compute at the same virtual time are handed over together, because that is what makes it quick:
 - on a GPU each has a copy of the network whose forward and backward pass are one captured graph, and the graphs run
   side by side, on a stream each. One after the other, Python and the launching of kernels would be all that counts;
 - on a CPU their weights are stacked and go through one `vmap`, where the layers are matrix products. Convolutions are
   taken one after the other: stacked, they are grouped convolutions, which are slower than that.

Whichever way, a worker's result depends on its weights and samples alone: batch norm looks at its own batch.
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

SLOTS = 8  # graphs side by side; more are no quicker, and each needs memory of its own
MAX_GRAPHS = 64  # captured: where batches are tuned there may be many sizes; beyond that, none are


@dataclass(eq=False)
class GradientJob:
    """A gradient to be computed, or a model to be trained: from these weights, of these samples."""

    weights: torch.Tensor
    samples: torch.Tensor
    gradient: torch.Tensor | None = None
    model: torch.Tensor | None = None  # made of them, where there is local training or models are pushed
    loss: float = float("nan")


class Gradients:
    """Computes jobs. `fetch` gives inputs and labels of samples, on the device where the weights are."""

    def __init__(
        self,
        network: torch.nn.Module,
        loss: Loss,
        fetch: Fetch,
        device: torch.device,
        together: bool = True,
        precision: Precision = "float32",
    ) -> None:
        """together: False takes jobs one after the other, always; to compare with."""
        network = copy.deepcopy(network).to(device).train()
        torch.func.replace_all_batch_norm_modules_(network)  # no running statistics: a pure function of the weights
        self.network, self._fetch, self._device = network, fetch, device
        self.judge = Scorer(loss, device, precision)
        self.layout = layout_of(network)
        self._one = Slot(network, self.judge, fetch)
        self._slots: list[Slot] = []
        self._streams: list[torch.cuda.Stream] = []
        self._graphs = 0
        if not together:
            self._way = self._in_turn
        elif device.type == "cuda":
            self._way = self._side_by_side
        elif has_convolutions(network):
            self._way = self._in_turn
        else:
            self._way = self._stacked

    def compute(self, jobs: Sequence[GradientJob]) -> None:
        """Fill in the jobs' losses and gradients."""
        if jobs:
            losses = self._way(jobs)
            for job, loss in zip(jobs, losses.tolist(), strict=True):
                job.loss = loss

    def _in_turn(self, jobs: Sequence[GradientJob]) -> torch.Tensor:
        return torch.stack([self._one.compute(job) for job in jobs])

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
        gradients, losses = stacked_gradients(self.network, self.judge, self._fetch, weights, samples)
        for job, gradient in zip(jobs, gradients, strict=True):
            job.gradient = gradient
        return losses

    def _side_by_side(self, jobs: Sequence[GradientJob]) -> torch.Tensor:
        while len(self._slots) < min(len(jobs), SLOTS):
            self._slots.append(Slot(copy.deepcopy(self.network), self.judge, self._fetch))
            self._streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        main = torch.cuda.current_stream()
        losses = torch.empty(len(jobs), device=self._device)
        streams = self._streams[: len(jobs)]
        for index, job in enumerate(jobs):  # captures first: nothing else may run meanwhile
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
    """What a network's answers are worth, computed with so much precision."""

    loss: Loss
    device: torch.device
    precision: Precision

    def __call__(
        self, network: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        # The cache would keep weights in bfloat16 from one pass to the next, which a captured graph must not rely on.
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16", cache_enabled=False
        ):
            return self.loss(network(inputs), labels)


class Slot:
    """A copy of the network whose weights lie in one flat row, and their gradients in another."""

    def __init__(self, network: torch.nn.Module, judge: Scorer, fetch: Fetch) -> None:
        self._network, self._judge, self._fetch = network, judge, fetch
        layout = layout_of(network)
        device = next(network.parameters()).device
        self.weights = torch.zeros(layout.size, device=device)
        self.gradient = torch.zeros(layout.size, device=device)
        views, gradients = _views(self.weights, layout), _views(self.gradient, layout)
        for name, parameter in network.named_parameters():
            views[name].copy_(parameter.data)
            parameter.data, parameter.grad = views[name], gradients[name]
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._pool: Any = None  # of memory, one for all of a slot's graphs: they run one after the other

    def compute(self, job: GradientJob) -> torch.Tensor:
        self.weights.copy_(job.weights)
        loss = self.passed(job.samples)
        job.gradient = self.gradient.clone()
        return loss

    def capture(self, job: GradientJob, stream: torch.cuda.Stream) -> None:
        """Make a graph for batches as large as this one."""
        samples = job.samples.clone()
        self.weights.copy_(job.weights)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # cuDNN and cuBLAS want to have seen it once
                self.passed(samples)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, stream):
            loss = self.passed(samples)
        self._pool = graph.pool()
        self.graphs[len(samples)] = (graph, samples, loss)

    def replay(self, job: GradientJob) -> torch.Tensor:
        captured = self.graphs.get(len(job.samples))
        if captured is None:
            return self.compute(job)
        graph, samples, loss = captured
        self.weights.copy_(job.weights)
        samples.copy_(job.samples)
        graph.replay()
        job.gradient = self.gradient.clone()
        return loss

    def passed(self, samples: torch.Tensor) -> torch.Tensor:
        """A pass there and back: leaves the gradient of these samples, and returns their loss."""
        self.gradient.zero_()
        inputs, labels = self._fetch(samples)
        if inputs.is_cuda and inputs.dim() == 4:  # a tenth to a quarter quicker there
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        loss = self._judge(self._network, inputs, labels)
        torch.autograd.backward(loss)
        return loss.detach()


def stacked_gradients(
    network: torch.nn.Module, judge: Scorer, fetch: Fetch, weights: torch.Tensor, samples: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of several models at once: their weights are the rows of one tensor, each one's samples those of the other."""
    layout, count = layout_of(network), len(weights)
    inputs, labels = (each.reshape(count, -1, *each.shape[1:]) for each in fetch(samples.reshape(-1)))

    def loss(flat: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return judge(partial(torch.func.functional_call, network, _views(flat, layout)), inputs, labels)

    gradients, losses = torch.func.vmap(torch.func.grad_and_value(loss))(weights, inputs, labels)
    return gradients, losses.detach()


def has_convolutions(network: torch.nn.Module) -> bool:
    """Stacked, they would be grouped convolutions, which a CPU is slow at."""
    return any(isinstance(layer, torch.nn.modules.conv._ConvNd) for layer in network.modules())


def layout_of(network: torch.nn.Module) -> Layout:
    """Where each parameter lies in the flat row."""
    return Layout(tuple(Tensor(name, tuple(each.shape)) for name, each in network.named_parameters()))


def flat(network: torch.nn.Module) -> torch.Tensor:
    """The network's parameters in one row; a copy."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in network.parameters()])


def load(network: torch.nn.Module, weights: torch.Tensor) -> None:
    """Give the network these weights."""
    with torch.no_grad():
        for name, view in _views(weights, layout_of(network)).items():
            network.get_parameter(name).copy_(view)


def _views(row: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    sizes = [tensor.size for tensor in layout.tensors]
    parts = torch.split(row, sizes)
    return {tensor.name: part.view(tensor.shape) for tensor, part in zip(layout.tensors, parts, strict=True)}
