"""Trains many models at once: clusters of the same shape, whose models are stacked and get one update per tick.

A tick takes the next arrival of every cluster. Its gradient is computed from the weights that the worker pulled when it
was granted. Gradients that have arrived are applied together as soon as a worker is granted again; before that, no
worker could see the difference. So a cluster that always grants the worker whose update arrived is ASP, and one that
waits for all workers is BSP.

Each cluster has its own virtual time (`fleet_links`). Gradients are real. Clusters do not influence each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch.nn import functional as F

from paceline.rlp.fleet_links import FleetLinks
from paceline.rlp.instance import Instance
from paceline.simulate.training import Shares
from paceline.workloads.data import Data
from paceline.workloads.small import mlp

CHUNK = 64  # steps of a worker that are drawn at a time
Tensor = torch.Tensor


@dataclass
class FleetTick:
    """The updates that have arrived, one in each cluster. All tensors have the shape (E,)."""

    worker: Tensor
    seconds: Tensor  # Δt: time since the previous arrival
    staleness: Tensor  # ℓ: updates of other workers that have arrived since the worker was granted
    step_seconds: Tensor  # duration of the worker's computation
    iteration_seconds: Tensor  # time since the worker was granted
    loss: Tensor  # mean loss of the worker's batch, at the weights it had pulled


class Fleet:
    """E clusters of N workers. Tensors of shape (E, …) have one row for each cluster."""

    def __init__(
        self, instances: Sequence[Instance], data: Data, device: str = "cpu", judged: int = 128, tested: int = 1000
    ) -> None:
        """judged, tested: the number of validation samples for the loss and for the accuracy."""
        self.instances, self.device = list(instances), torch.device(device)
        self.E, self.N, self.batch = len(instances), instances[0].workers, instances[0].batch
        E, N = self.E, self.N
        self.inputs, self.labels, *held_back = _tables(data, instances[0].pooled, self.device)
        self._judged = held_back[0][:judged], held_back[1][:judged]
        self._tested = held_back[0][-tested:], held_back[1][-tested:]
        self.rate = self._row([each.rate for each in instances])[:, None, None]
        self.momentum = self._row([each.momentum for each in instances])[:, None, None]
        # For each layer, weights (E, inputs, outputs) and then biases (E, 1, outputs).
        initial = [
            _initial(each.seed, each.hidden, each.units, self.inputs.shape[1], data.classes) for each in instances
        ]
        self.layers = [torch.stack(layer).to(self.device) for layer in zip(*initial, strict=True)]
        # The momentum buffers, to which gradients are added as they arrive.
        self.velocities = [torch.zeros_like(layer) for layer in self.layers]
        self.pulled = [layer[:, None].expand(-1, N, -1, -1).contiguous() for layer in self.layers]  # by each worker
        streams: dict[object, _RandomStream] = {}  # instances that occur several times share a stream
        self._streams = [
            streams.setdefault(_randomness_key(each), _RandomStream(each, len(data.labels))) for each in instances
        ]
        self._step_seconds = torch.empty(E, N, 0, dtype=torch.float64, device=self.device)  # of all steps drawn so far
        self._samples = torch.empty(E, N, 0, self.batch, dtype=torch.int32, device=self.device)
        self._rows = torch.arange(E, device=self.device)
        self.steps = torch.zeros(E, N, dtype=torch.int64, device=self.device)  # begun by each worker
        self._most_steps = 0  # an upper bound of `steps`
        self.now = torch.zeros(E, dtype=torch.float64, device=self.device)
        transfer = torch.tensor([each.transfer for each in instances], dtype=torch.float64, device=self.device)
        self.links = FleetLinks(transfer, N)
        self.granted_at = torch.zeros(E, N, dtype=torch.float64, device=self.device)
        self.base = torch.zeros(E, N, dtype=torch.int64, device=self.device)  # number of updates when it was granted
        self.idle = torch.ones(E, N, dtype=torch.bool, device=self.device)
        self.idle_since = torch.arange(-N, 0, device=self.device).expand(E, N).contiguous()  # update, or an order
        self.updates = 0
        self.grant(self.idle.clone())

    def next_arrivals(self) -> FleetTick:
        """Receive the next update of each cluster."""
        return self.receive(*self.links.next_arrivals())

    def receive(self, worker: Tensor, now: Tensor, step: Tensor | None = None) -> FleetTick:
        """Receive the update of this worker (E,) in each cluster, at this time (E,).

        step: the number of the worker's computation, from 0; by default that of its last Grant.
        """
        rows = self._rows
        seconds, self.now = now - self.now, now
        if step is None:
            step = self.steps[rows, worker] - 1
        staleness, iteration_seconds = self.updates - self.base[rows, worker], now - self.granted_at[rows, worker]
        step_seconds = self._step_seconds[rows, worker, step]
        self.idle[rows, worker] = True
        self.idle_since[rows, worker] = self.updates
        index = rows * self.N + worker
        pulled = [layer.flatten(0, 1).index_select(0, index) for layer in self.pulled]
        loss = self._add_gradients(pulled, self._samples[rows, worker, step])
        self.updates += 1
        return FleetTick(worker, seconds, staleness, step_seconds, iteration_seconds, loss)

    def apply(self, where: Tensor) -> None:
        """Apply the gradients that have arrived, in the clusters where (E,) is true."""
        step = where.to(torch.float32)[:, None, None]
        rate, decay = -self.rate * step, 1 - step + self.momentum * step
        for layer, velocity in zip(self.layers, self.velocities, strict=True):
            layer.addcmul_(velocity, rate)
            velocity.mul_(decay)

    def grant(self, workers: Tensor) -> None:
        """Let these workers (E, N) pull the newest weights and begin their next step."""
        self.pull(workers | self.links.queued(self.now))
        self._most_steps += 1
        if self._most_steps > self._step_seconds.shape[2]:
            self._most_steps = int(self.steps.max()) + 1
            self.draw(self._most_steps)
        seconds = self._step_seconds.gather(2, self.steps[:, :, None])[:, :, 0]
        self.links.begin(workers, self.idle_since, self.now, seconds)
        self.granted_at = torch.where(workers, self.now[:, None], self.granted_at)
        self.base = torch.where(workers, self.updates, self.base)
        self.steps = self.steps + workers
        self.idle = self.idle & ~workers

    def pull(self, workers: Tensor) -> None:
        """Give these workers (E, N) the newest weights."""
        self._pull(*workers.nonzero(as_tuple=True))

    def draw(self, steps: int) -> None:
        """Draw the step times and samples of at least the first `steps` steps of all workers."""
        while steps > self._step_seconds.shape[2]:
            self._draw_chunk()

    def loss(self) -> Tensor:
        """Return the loss of each model on the validation batch."""
        inputs, labels = self._judged
        logs = self._logits(inputs).log_softmax(-1)
        return logs[:, torch.arange(len(labels), device=self.device), labels].mean(1).neg()

    def accuracy(self) -> Tensor:
        """Return the accuracy of each model on the validation set."""
        inputs, labels = self._tested
        return (self._logits(inputs).argmax(-1) == labels).to(torch.float32).mean(1)

    def keep(self, rows: Tensor) -> None:
        """Drop all clusters but these."""
        for name in ("rate", "momentum", "steps", "now", "idle", "idle_since", "granted_at", "base"):
            setattr(self, name, getattr(self, name)[rows])
        self.links.keep(rows)
        self._step_seconds, self._samples = self._step_seconds[rows], self._samples[rows]
        for models in (self.layers, self.velocities, self.pulled):
            for index in range(len(models)):
                models[index] = models[index][rows]
        chosen = rows.tolist()
        self.instances = [self.instances[row] for row in chosen]
        self._streams = [self._streams[row] for row in chosen]
        self.E = len(chosen)
        self._rows = torch.arange(self.E, device=self.device)

    def _pull(self, rows: Tensor, columns: Tensor) -> None:
        """Copy the newest weights to these workers."""
        for pulled, layer in zip(self.pulled, self.layers, strict=True):
            pulled.flatten(0, 1).index_copy_(0, rows * self.N + columns, layer.index_select(0, rows))

    def _row(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _logits(self, inputs: Tensor) -> Tensor:
        """Return the outputs of each model for the same inputs."""
        # The inputs of the first layer are the same for all models, so one product computes it for all.
        weight, bias, *rest = self.layers
        first = torch.einsum("vi,eio->evo", inputs, weight).add_(bias)
        return _forward(rest, first.relu_())[-1] if rest else first

    def _add_gradients(self, layers: list[Tensor], samples: Tensor) -> Tensor:
        """Compute the gradient of each network, add it to the momentum buffers, and return the loss.

        The backward pass is written by hand, since the layers are simple.
        """
        labels = self.labels[samples]
        *inputs, logits = _forward(layers, self.inputs[samples])
        logs = logits.log_softmax(-1)
        loss = -logs.gather(2, labels[:, :, None]).mean((1, 2))
        gradient = logs.exp_()
        gradient.scatter_add_(2, labels[:, :, None], torch.full_like(gradient[:, :, :1], -1.0))
        gradient /= self.batch
        for layer in range(len(inputs) - 1, -1, -1):
            self.velocities[2 * layer].baddbmm_(inputs[layer].transpose(1, 2), gradient)
            self.velocities[2 * layer + 1] += gradient.sum(1, keepdim=True)
            if layer:
                gradient = torch.bmm(gradient, layers[2 * layer].transpose(1, 2)).mul_(inputs[layer] > 0)
        return loss

    def _draw_chunk(self) -> None:
        """Draw the step times and samples of the next CHUNK steps."""
        steps = self._step_seconds.shape[2] + CHUNK
        streams = {id(stream): stream for stream in self._streams}
        numbers = {key: number for number, key in enumerate(streams)}
        which = torch.tensor([numbers[id(stream)] for stream in self._streams])
        seconds, samples = zip(*(stream.chunk_up_to(steps) for stream in streams.values()), strict=True)
        new = torch.from_numpy(np.stack(seconds))[which].to(self.device)
        self._step_seconds = torch.cat([self._step_seconds, new], 2)
        chosen = torch.stack(samples)[which].view(self.E, self.N, CHUNK, self.batch)
        self._samples = torch.cat([self._samples, chosen.to(self.device)], 2)


class _RandomStream:
    """The random numbers of an instance: step times, as the simulator draws them, and samples."""

    def __init__(self, instance: Instance, samples: int) -> None:
        self._instance, self._chances = instance, instance.step_chances()
        chosen = torch.randperm(samples, generator=torch.Generator().manual_seed(instance.seed))
        chosen = chosen[: int(instance.share * samples)]
        N = instance.workers
        self._shares = Shares([chosen[worker::N] for worker in range(N)], instance.seed)
        self._chunks: list[tuple[np.ndarray, Tensor]] = []

    def chunk_up_to(self, steps: int) -> tuple[np.ndarray, Tensor]:
        """Return the chunk whose last step is number `steps`: step times (N, CHUNK) and samples."""
        instance = self._instance
        specs = instance.cluster().workers
        while len(self._chunks) * CHUNK < steps:
            seconds = np.array(
                [
                    [spec.draw(instance.batch, chance) for _ in range(CHUNK)]
                    for spec, chance in zip(specs, self._chances, strict=True)
                ]
            )
            taken = [self._shares.take(worker, CHUNK * instance.batch) for worker in range(instance.workers)]
            self._chunks.append((seconds, torch.stack(taken).to(torch.int32)))
        return self._chunks[steps // CHUNK - 1]


def _randomness_key(instance: Instance) -> object:
    """Return a key that is equal for instances with the same random numbers."""
    return (instance.seed, instance.steps, instance.sleeps, instance.batch, instance.share)


@lru_cache(maxsize=4)
def _tables(data: Data, pooled: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return training inputs and labels, and held-back inputs and labels, on the device."""

    def flat(images: Tensor) -> Tensor:
        prepared = data.prepared(images)
        return (pooled * F.avg_pool2d(prepared, pooled) if pooled > 1 else prepared).flatten(1).to(device)

    return flat(data.inputs), data.labels.to(device), flat(data.test_inputs), data.test_labels.to(device)


@lru_cache(maxsize=64)
def _initial(seed: int, hidden: int, units: int, inputs: int, classes: int) -> list[Tensor]:
    """Return the initial weights and biases of an instance's network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = mlp((1, 1, inputs), classes, (units,) * hidden)
    layers = [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)]
    return [each for layer in layers for each in (layer.weight.detach().T.contiguous(), layer.bias.detach()[None])]


def _forward(layers: list[Tensor], inputs: Tensor) -> list[Tensor]:
    """Return the inputs of each layer, and the outputs of the last."""
    each = [inputs]
    for weight, bias in zip(layers[::2], layers[1::2], strict=True):
        rectified = each[-1].relu() if len(each) > 1 else each[-1]
        each[-1] = rectified
        each.append(torch.baddbmm(bias, rectified, weight))
    return each
