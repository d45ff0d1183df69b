"""A client of a federation: it trains a model on data of its own, and exchanges what came of it with a server.

    model, batches = Net(), DataLoader(mine, batch_size=16, shuffle=True)
    paceline.federated.Client(model, batches, connect="server:7000", steps=100).run(rounds=200)

Samples never leave it. What it pushes is how far its model has come from the one that it was given, or where the
policy mixes models, the model itself. A lost connection comes back by itself; if the server restarts, the round is lost
that was under way, and nothing else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from paceline.model.description import Description
from paceline.model.optimizer_spec import SUMS
from paceline.serve.environment import CONNECT, TOKEN, address, worker_number
from paceline.serve.wire.tls import Tls
from paceline.serve.worker.client import Client as Wire
from paceline.train.flat_model import FlatModel

Batch = tuple[torch.Tensor, torch.Tensor]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def plain_sgd(rate: float = 0.01) -> MakeOptimizer:
    """What clients train with, if nothing else is said; the FL-R²SP paper's rate."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


class FederatedClient:
    """One client. `model` has the newest global model after each round, and at the end."""

    def __init__(
        self,
        model: torch.nn.Module,
        batches: Iterable[Batch],
        *,
        connect: str | None = None,
        steps: int = 100,
        samples: int | None = None,
        optimizer: MakeOptimizer | None = None,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.nn.functional.cross_entropy,
        proximal: float = 0.0,
        client: int | None = None,
        token: str | bytes | None = None,
        tls: Tls | None = None,
        progress: Callable[[int, float], None] | None = None,
    ) -> None:
        """batches: pairs of inputs and labels; gone through again and again, a DataLoader for example.

        connect: the server's address, host:port; that of PACELINE_CONNECT if left out.
        steps: τ, local iterations in a round. samples: how many this client has, by which it counts; those of the
        DataLoader's dataset if left out. optimizer: made anew for each round. proximal: FedProx's μ.
        client: its number, which decides its group; the server gives one if nobody does.
        progress: hears how many rounds are done, and the loss of the last.
        """
        where = connect or os.environ.get(CONNECT)
        if not where:
            raise ValueError("Say with connect= where the server is, or set PACELINE_CONNECT.")
        if steps < 1:
            raise ValueError(f"A client makes at least one step in a round, not {steps}.")
        if proximal < 0:
            raise ValueError(f"FedProx's term is at least 0, not {proximal}.")
        self.model, self.steps, self.proximal = model, steps, proximal
        self._batches, self._loss, self._make_optimizer = _again_and_again(batches), loss, optimizer or plain_sgd()
        self._progress = progress
        self.samples = _counted(batches) if samples is None else samples
        if self.samples < 1:
            raise ValueError(f"A client has at least one sample, not {self.samples}.")
        # Its own copy, apart from the model: what was pulled is needed when the model has moved on.
        self._flat = FlatModel(model, torch.optim.SGD(model.parameters(), lr=1.0), apart=True)
        described = Description(self._flat.layout, SUMS, self._flat.fixed).as_json()
        if token is None:
            token = bytes.fromhex(os.environ.get(TOKEN, ""))
        secret = token.encode() if isinstance(token, str) else token
        number = worker_number() if client is None else client
        self._wire = Wire(address(where), described, secret, number, tls=tls or Tls.from_environment())
        self.rounds = 0  # so far

    @property
    def number(self) -> int:
        """Which client this is."""
        return self._wire.worker

    @property
    def pull_seconds(self) -> float:
        """What the last pull took: where it is long, too many pull at the same time."""
        return self._wire.pull_seconds

    def run(self, rounds: int | None = None) -> int:
        """Take part for so many rounds, or until the server is gone; how many there were. Then leave."""
        flat, wire = self._flat, self._wire
        try:
            wire.begin(flat.weights_bytes())
            flat.scatter()
            while rounds is None or self.rounds < rounds:
                began = time.perf_counter()
                loss = self._train()
                self._gather()
                wire.exchange(
                    flat.gradient_bytes(),
                    flat.weights_bytes(),
                    batch_size=self.samples,
                    compute_seconds=time.perf_counter() - began,
                    rates=(1.0,),
                    loss=loss,
                )
                flat.scatter()
                self.rounds += 1
                if self._progress:
                    self._progress(self.rounds, loss)
            return self.rounds
        finally:
            wire.close()

    def _train(self) -> float:
        """τ steps on its own samples; the mean loss."""
        model = self.model.train()
        parameters = self._flat.parameters
        began = [parameter.detach().clone() for parameter in parameters] if self.proximal else []
        optimizer = self._make_optimizer(parameters)
        device = parameters[0].device
        total = 0.0
        for _ in range(self.steps):
            inputs, labels = next(self._batches)
            optimizer.zero_grad()
            loss = self._loss(model(inputs.to(device)), labels.to(device))
            torch.autograd.backward(loss)
            for parameter, start in zip(parameters, began, strict=False):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - start, alpha=self.proximal)
            optimizer.step()
            total += float(loss.detach())
        return total / self.steps

    def _gather(self) -> None:
        """What is pushed: the model, or how far it has come. Statistics are pushed as they are, and averaged."""
        flat = self._flat
        flat.gather_weights()
        if not self._wire.mixes:
            pulled, _ = flat.split(flat.weights)
            pushed, _ = flat.split(flat.gradient)
            torch.sub(pulled, pushed, out=pushed)  # as a gradient: the server goes against it


def _again_and_again(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError(
                "There are no batches to train on; a generator can be gone through only once, so give a list."
            )


def _counted(batches: Any) -> int:
    """How many samples a DataLoader has."""
    try:
        return len(batches.dataset)
    except (AttributeError, TypeError):
        raise ValueError("Say with samples= how many samples this client has.") from None
