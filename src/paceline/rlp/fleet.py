"""Many trainings at once: clusters of the same shape, whose models are stacked and advance by one update each tick.

A tick takes the next arrival of every cluster: a gradient computed from the weights that its worker was given when it
was let go. Gradients that have come in are applied together as soon as anybody is let go again; nobody could see the
difference before. So a cluster that always lets the one go who came is ASP, and one that waits for all of them is BSP.

Time is virtual and each cluster has its own; gradients are real. What one cluster does depends on nothing of the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch.nn import functional as F

from paceline.rlp.instance import Instance
from paceline.simulate.training import Shares
from paceline.workloads.data import Data
from paceline.workloads.small import mlp

CHUNK = 64  # steps of a worker that are drawn at a time
Tensor = torch.Tensor


@dataclass
class FleetTick:
    """What came in: one update in each cluster."""

    worker: Tensor  # who (E,)
    seconds: Tensor  # since the arrival before
    stale: Tensor  # ℓ: updates of others that came in since it was let go
    took: Tensor  # seconds of its step
    loss: Tensor  # of its samples, at its weights


class Fleet:
    """Clusters side by side; what is (E, …) has one row for each."""

    def __init__(
        self, instances: Sequence[Instance], data: Data, device: str = "cpu", judged: int = 128, tested: int = 1000
    ) -> None:
        """judged, tested: how many validation samples the loss is of, and the accuracy."""
        self.instances, self.device = list(instances), torch.device(device)
        self.E, self.N, self.batch = len(instances), instances[0].workers, instances[0].batch
        E, N = self.E, self.N
        self.inputs, self.labels, *held_back = _tables(data, instances[0].pooled, self.device)
        self._judged = held_back[0][:judged], held_back[1][:judged]
        self._tested = held_back[0][-tested:], held_back[1][-tested:]
        self.rate = self._row([each.rate for each in instances])[:, None, None]
        self.momentum = self._row([each.momentum for each in instances])[:, None, None]
        # Weights (E, inputs, outputs) and biases (E, 1, outputs) of one layer after the other.
        begun = [_started(each.seed, each.hidden, each.units, self.inputs.shape[1], data.classes) for each in instances]
        self.layers = [torch.stack(layer).to(self.device) for layer in zip(*begun, strict=True)]
        # What the next step moves each layer by: gradients come on top of what momentum has left of the last one.
        self.moves = [torch.zeros_like(layer) for layer in self.layers]
        self.held = [layer[:, None].expand(-1, N, -1, -1).contiguous() for layer in self.layers]
        self._drawn: dict[object, _Drawn] = {}
        self._draws = [self._drawn.setdefault(_key(each), _Drawn(each, len(data.labels))) for each in instances]
        self._seconds = torch.empty(E, N, 0, dtype=torch.float64, device=self.device)  # of each step of each worker
        self._samples = torch.empty(E, N, 0, self.batch, dtype=torch.int32, device=self.device)
        self._rows = torch.arange(E, device=self.device)
        self.steps = torch.zeros(E, N, dtype=torch.int64, device=self.device)  # begun by each worker
        self._begun = 0  # at most so many, by any
        self.now = torch.zeros(E, dtype=torch.float64, device=self.device)
        self.ends = torch.full((E, N), torch.inf, dtype=torch.float64, device=self.device)
        self.began = torch.zeros(E, N, dtype=torch.float64, device=self.device)
        self.based = torch.zeros(E, N, dtype=torch.int64, device=self.device)  # updates when it was let go
        self.idle = torch.ones(E, N, dtype=torch.bool, device=self.device)
        self.updates = 0
        self.go(self.idle.clone())

    def arrive(self) -> FleetTick:
        """The next update of each cluster comes in."""
        ends, worker = self.ends.min(1)
        return self.take(worker, ends)

    def take(self, worker: Tensor, now: Tensor) -> FleetTick:
        """These workers' updates come in."""
        rows = self._rows
        seconds, self.now = now - self.now, now
        tick_of = self.steps[rows, worker] - 1
        stale, took = self.updates - self.based[rows, worker], now - self.began[rows, worker]
        self.ends[rows, worker] = torch.inf
        self.idle[rows, worker] = True
        at = rows * self.N + worker
        held = [layer.flatten(0, 1).index_select(0, at) for layer in self.held]
        loss = self._pass(held, self._samples[rows, worker, tick_of])
        self.updates += 1
        return FleetTick(worker, seconds, stale, took, loss)

    def apply(self, where: Tensor) -> None:
        """In these clusters (E,), what has come in changes the model."""
        step = where.to(torch.float32)[:, None, None]
        rate, left = -self.rate * step, 1 - step + self.momentum * step
        for layer, move in zip(self.layers, self.moves, strict=True):
            layer.addcmul_(move, rate)
            move.mul_(left)

    def go(self, who: Tensor) -> None:
        """These (E, N) are given the newest weights and begin their next step."""
        rows, workers = who.nonzero(as_tuple=True)
        for held, layer in zip(self.held, self.layers, strict=True):
            held.flatten(0, 1).index_copy_(0, rows * self.N + workers, layer.index_select(0, rows))
        self._begun += 1
        if self._begun > self._seconds.shape[2]:
            self._begun = int(self.steps.max()) + 1
            if self._begun > self._seconds.shape[2]:
                self._draw()
        self.began[rows, workers] = self.now[rows]
        self.ends[rows, workers] = self.now[rows] + self._seconds[rows, workers, self.steps[rows, workers]]
        self.based[rows, workers] = self.updates
        self.steps[rows, workers] += 1
        self.idle[rows, workers] = False

    def loss(self) -> Tensor:
        """Of each model, on the validation batch."""
        inputs, labels = self._judged
        logs = self._answers(inputs).log_softmax(-1)
        return logs[:, torch.arange(len(labels), device=self.device), labels].mean(1).neg()

    def accuracy(self) -> Tensor:
        """Of each model, on the validation set."""
        inputs, labels = self._tested
        return (self._answers(inputs).argmax(-1) == labels).to(torch.float32).mean(1)

    def keep(self, rows: Tensor) -> None:
        """Go on with these clusters alone."""
        for name in ("rate", "momentum", "steps", "now", "ends", "began", "based", "idle", "_seconds", "_samples"):
            setattr(self, name, getattr(self, name)[rows])
        for models in (self.layers, self.moves, self.held):
            for index in range(len(models)):
                models[index] = models[index][rows]
        chosen = rows.tolist()
        self.instances = [self.instances[row] for row in chosen]
        self._draws = [self._draws[row] for row in chosen]
        self.E = len(chosen)
        self._rows = torch.arange(self.E, device=self.device)

    def _row(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _answers(self, inputs: Tensor) -> Tensor:
        # All first layers at once: the inputs are the same for everyone.
        weight, bias, *rest = self.layers
        first = torch.einsum("vi,eio->evo", inputs, weight).add_(bias)
        return _through(rest, first.relu_())[-1] if rest else first

    def _pass(self, layers: list[Tensor], samples: Tensor) -> Tensor:
        """There and back through each one's network, by hand because layers are plain; the loss."""
        labels = self.labels[samples]
        *seen, answers = _through(layers, self.inputs[samples])
        logs = answers.log_softmax(-1)
        loss = -logs.gather(2, labels[:, :, None]).mean((1, 2))
        back = logs.exp_()
        back.scatter_add_(2, labels[:, :, None], torch.full_like(back[:, :, :1], -1.0))
        back /= self.batch
        for layer in range(len(seen) - 1, -1, -1):
            self.moves[2 * layer].baddbmm_(seen[layer].transpose(1, 2), back)
            self.moves[2 * layer + 1] += back.sum(1, keepdim=True)
            if layer:
                back = torch.bmm(back, layers[2 * layer].transpose(1, 2)).mul_(seen[layer] > 0)
        return loss

    def _draw(self) -> None:
        upto = self._seconds.shape[2] + CHUNK
        each = {id(drawn): drawn for drawn in self._draws}  # the same instance may be there many times
        numbers = {key: number for number, key in enumerate(each)}
        which = torch.tensor([numbers[id(drawn)] for drawn in self._draws])
        seconds, samples = zip(*(drawn.upto(upto) for drawn in each.values()), strict=True)
        new = torch.from_numpy(np.stack(seconds))[which].to(self.device)
        self._seconds = torch.cat([self._seconds, new], 2)
        chosen = torch.stack(samples)[which].view(self.E, self.N, CHUNK, self.batch)
        self._samples = torch.cat([self._samples, chosen.to(self.device)], 2)


class _Drawn:
    """What chance has in store for an instance's workers: step times, as the simulator draws them, and samples."""

    def __init__(self, instance: Instance, samples: int) -> None:
        self._instance, self._chance = instance, instance.seconds()
        chosen = torch.randperm(samples, generator=torch.Generator().manual_seed(instance.seed))
        chosen = chosen[: int(instance.share * samples)]
        N = instance.workers
        self._shares = Shares([chosen[worker::N] for worker in range(N)], instance.seed)
        self._chunks: list[tuple[np.ndarray, Tensor]] = []

    def upto(self, steps: int) -> tuple[np.ndarray, Tensor]:
        """The chunk that ends at so many steps."""
        instance = self._instance
        specs = instance.cluster().workers
        while len(self._chunks) * CHUNK < steps:
            seconds = np.array(
                [
                    [spec.draw(instance.batch, chance) for _ in range(CHUNK)]
                    for spec, chance in zip(specs, self._chance, strict=True)
                ]
            )
            taken = [self._shares.take(worker, CHUNK * instance.batch) for worker in range(instance.workers)]
            self._chunks.append((seconds, torch.stack(taken).to(torch.int32)))
        return self._chunks[steps // CHUNK - 1]


def _key(instance: Instance) -> object:
    return (instance.seed, instance.steps, instance.sleeps, instance.batch, instance.share)


@lru_cache(maxsize=4)
def _tables(data: Data, pooled: int, device: torch.device) -> tuple[Tensor, ...]:
    """Training inputs and labels, and those held back, on the device."""

    def flat(images: Tensor) -> Tensor:
        prepared = data.prepared(images)
        return (pooled * F.avg_pool2d(prepared, pooled) if pooled > 1 else prepared).flatten(1).to(device)

    return flat(data.inputs), data.labels.to(device), flat(data.test_inputs), data.test_labels.to(device)


@lru_cache(maxsize=64)
def _started(seed: int, hidden: int, units: int, inputs: int, classes: int) -> list[Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = mlp((1, 1, inputs), classes, (units,) * hidden)
    layers = [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)]
    return [each for layer in layers for each in (layer.weight.detach().T.contiguous(), layer.bias.detach()[None])]


def _through(layers: list[Tensor], inputs: Tensor) -> list[Tensor]:
    """What goes into each layer, and the answers."""
    each = [inputs]
    for weight, bias in zip(layers[::2], layers[1::2], strict=True):
        rectified = each[-1].relu() if len(each) > 1 else each[-1]
        each[-1] = rectified
        each.append(torch.baddbmm(bias, rectified, weight))
    return each
