"""The training of eight workers and a server, on one device and without a network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.local_steps.adamw import adamw, step_settings
from benchmarks.local_steps.arms import Arm
from benchmarks.local_steps.codecs import EXACT, decoded
from benchmarks.local_steps.data import Data, sample_starts
from benchmarks.local_steps.model import elements, losses, new_model, shapes
from benchmarks.local_steps.rules import Server, average
from benchmarks.local_steps.schedules import NOBODY, Exchange
from benchmarks.local_steps.size import WORKERS, Size
from paceline.model.codecs import KEPT, codec, encoded_size
from paceline.model.combination import Term
from paceline.model.differences import way_back
from paceline.model.sparse_mean import SparseMean

DIVERGED = 8.0  # nats a byte; a model that knows nothing has 5.5


@dataclass(frozen=True)
class Machine:
    """A device, and the functions that train the models on it."""

    device: str
    losses: Callable[[Tensor, Tensor, Tensor, Size], Tensor]
    adamw: Callable[..., None]
    dtype: torch.dtype  # of activations and gradients


def machine(device: str, compiled: bool) -> Machine:
    """Return a machine with plain or compiled functions."""
    if not compiled:
        return Machine(device, losses, adamw, torch.bfloat16 if device == "cuda" else torch.float32)
    return Machine(device, torch.compile(losses, dynamic=False), torch.compile(adamw, dynamic=False), torch.bfloat16)


class Training:
    """Eight workers and a server."""

    def __init__(self, data: Data, arm: Arm, rate: float, updates: str, seed: int, on: Machine) -> None:
        size = arm.size
        self.size, self.arm, self.updates, self.on = size, arm, updates, on
        first = new_model(size, seed).to(on.device)
        self.server = Server(first, rate)
        self.models = first.repeat(WORKERS, 1)
        self.copies = self.models.to(on.dtype, copy=True).requires_grad_()
        self.held = self.models.clone()  # the server's model, as each worker knows it
        self.begins = self.models.clone()  # each worker's model at the beginning of its round
        self.ends = self.models.clone()  # each worker's model at its last push
        self.left = torch.zeros_like(self.models) if updates != EXACT else None  # by the encoding of the pushes
        self.is_sparse = updates != EXACT and codec(updates).is_sparse
        self.kept = KEPT if self.is_sparse else 1.0  # the share of `left` that is added to the next push
        self.means: dict[int, SparseMean] = {}  # by the start of the part that is exchanged
        self.mean, self.square = torch.zeros_like(self.models), torch.zeros_like(self.models)
        decays = [torch.full((math.prod(shape),), float(len(shape) > 1)) for shape in shapes(size).values()]
        self.decays = torch.cat(decays).to(on.device)
        self.corpus = torch.from_numpy(data.training).to(on.device)
        self.validation = torch.from_numpy(data.validation).to(on.device)
        count = size.validation * WORKERS * size.batch
        places = np.linspace(0, len(data.validation) - size.context - 1, count).astype(np.int64)
        self.validation_starts = torch.from_numpy(places.reshape(size.validation, WORKERS, -1)).to(on.device)
        own, waits = np.maximum(arm.plan.steps, 0), arm.plan.steps[..., None] < 0
        starts = sample_starts(size, seed, len(data.training))[own, np.arange(WORKERS)]
        settings = np.where(waits, np.array([0, 1, 1], np.float32), step_settings(size)[own])
        self.starts, self.settings = torch.from_numpy(starts).to(on.device), torch.from_numpy(settings).to(on.device)
        self.pushed = 0  # bytes
        self.pulled = WORKERS * encoded_size(EXACT, elements(size))  # the first model is sent in float32

    def step(self, at: int) -> None:
        """Make step number `at` of the plan."""
        lost = self.on.losses(self.copies, self.corpus, self.starts[at], self.size)
        (gradient,) = torch.autograd.grad(lost.sum(), self.copies)
        with torch.no_grad():
            copies = self.copies.detach()
            self.on.adamw(self.models, copies, gradient, self.mean, self.square, self.decays, self.settings[at])

    @torch.no_grad()
    def exchange(self, exchange: Exchange) -> None:
        """Change the server's model by the pushes, and then the models of the workers that pull."""
        part = exchange.part
        if exchange.pushing != NOBODY:
            self._push((exchange.pushing, part), exchange.averaged)
        if exchange.pulling != NOBODY:
            self._pull((exchange.pulling, part), exchange)
        count = part.stop - part.start
        self.pushed += encoded_size(self.updates, count) * (exchange.pushing.stop - exchange.pushing.start)
        self.pulled += encoded_size(way_back(self.updates), count) * (exchange.pulling.stop - exchange.pulling.start)

    def _push(self, place: tuple[slice, slice], averaged: bool) -> None:
        difference = self.models[place] - self.begins[place]
        if self.arm.blend and not averaged:
            difference += self.arm.blend * (self.begins[place] - self.ends[place])
        self.ends[place] = self.models[place]
        if self.left is not None:
            difference += self.kept * self.left[place]
            received = decoded(difference, self.updates)
            self.left[place] = difference - received
            difference = received
        if self.is_sparse:
            difference = self._mean_of_senders(difference, place[1])
        rule = partial(average, rate=1.0) if averaged else self.arm.rule
        rule(self.server, place[1], difference)

    def _mean_of_senders(self, differences: Tensor, part: slice) -> Tensor:
        """Return one difference whose Nth part is the step of the server."""
        mean = self.means.setdefault(part.start, SparseMean(differences[0]))
        terms = [Term.of(each, 1 / WORKERS, ()) for each in differences]
        return WORKERS * mean.of(differences.sum(0) / WORKERS, terms)[None]

    def _pull(self, place: tuple[slice, slice], exchange: Exchange) -> None:
        before = self.held[place].clone()
        if self.updates == EXACT:
            self.held[place] = self.server.weights[place[1]]
        else:
            self.held[place] += decoded(self.server.weights[place[1]] - before, way_back(self.updates))
        moved = self.held[place] - before
        if exchange.pushing == NOBODY:  # in the middle of a round
            self.models[place] += moved
            self.begins[place] += moved
        else:
            ends, begins = self.models[place], self.held[place]
            if not exchange.averaged:
                begins = begins + self.arm.predict * moved
                begins = begins + self.arm.keep * (ends - begins)
            self.models[place] = begins
            self.begins[place] = begins
        self.copies[place] = self.models[place].to(self.copies.dtype)

    @torch.no_grad()
    def loss_of(self, weights: Tensor) -> float:
        """Return the validation loss of a model."""
        model = weights.to(self.copies.dtype).repeat(WORKERS, 1)
        found = [self.on.losses(model, self.validation, starts, self.size) for starts in self.validation_starts]
        return float(torch.stack(found).mean())

    def run(self) -> dict[str, Any]:
        """Train, and return the measurements."""
        every, plan = self.size.evaluate_every * self.size.local_steps, self.arm.plan
        curve: list[tuple[int, float]] = []
        for at in range(len(plan.steps)):
            self.step(at)
            for each in plan.exchanges.get(at + 1, ()):
                self.exchange(each)
            if (at + 1) % every == 0 or at + 1 == len(plan.steps):
                loss = self.loss_of(self.server.weights)
                curve.append((at + 1, round(loss, 5)))
                if not loss < DIVERGED:
                    break
        last, loss = curve[-1]
        steps = int((plan.steps[:last] >= 0).sum())
        return {
            "loss": loss if loss < DIVERGED else None,
            "curve": curve,
            "end_points": round(self.loss_of(self.ends.mean(0)), 5),  # the loss of the mean of the end points
            "tokens": steps * self.size.batch * self.size.context,
            "steps": steps,
            "elements": elements(self.size),
            "pushed": self.pushed,
            "pulled": self.pulled,
        }
