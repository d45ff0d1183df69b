"""A client of a federation: it trains a model on its own data and exchanges the result with a server.

    model, batches = Net(), DataLoader(dataset, batch_size=16, shuffle=True)
    FederatedClient(model, batches, connect="server:7000", steps=100).run(rounds=200)

Samples never leave the client. It pushes the difference between its model and the one that it pulled, or the model
itself if the policy mixes models. It reconnects automatically. If the server restarts, only the current round is lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from paceline.model.description import Description
from paceline.model.optimizer_spec import SUMS
from paceline.serve.environment import CONNECT, address, job_token, worker_number
from paceline.serve.wire.tls import Tls
from paceline.serve.worker.client import Client as Wire
from paceline.serve.worker.metrics import checked
from paceline.train.flat_model import FlatModel

Batch = tuple[torch.Tensor, torch.Tensor]
Evaluate = Callable[[torch.nn.Module], Mapping[str, float]]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def plain_sgd(rate: float = 0.01) -> MakeOptimizer:
    """Return the default optimizer of a client: SGD with the learning rate of the FL-R²SP paper."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


class FederatedClient:
    """A client of a federation. After each round, `model` holds the newest global model."""

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
        evaluate: Evaluate | None = None,
    ) -> None:
        """batches: pairs of inputs and labels, for example a DataLoader. The client iterates over them repeatedly.

        connect: the server's address, "host:port". The default is PACELINE_CONNECT.
        steps: τ, the number of local iterations in a round.
        samples: the number of samples of this client, which is the weight of its updates. The default is the size of
            the DataLoader's dataset.
        optimizer: creates the optimizer of each round from the parameters.
        loss: computes the loss from the model's output and the labels.
        proximal: FedProx's μ.
        client: the client's number, which decides its group. By default the server assigns one.
        progress: called after each round with the number of rounds and the mean loss of the last one.
        evaluate: called after each round with the model, which is the new global one. It returns finite numbers by
            name. The server passes them to its policy, its trace and its live table.
        """
        server = connect or os.environ.get(CONNECT)
        if not server:
            raise ValueError("Pass the server's address with connect=, or set PACELINE_CONNECT.")
        if steps < 1:
            raise ValueError(f"steps must be at least 1; got {steps}.")
        if proximal < 0:
            raise ValueError(f"proximal must be at least 0; got {proximal}.")
        self.model, self.steps, self.proximal = model, steps, proximal
        self._batches, self._loss, self._make_optimizer = _repeat(batches), loss, optimizer or plain_sgd()
        self._progress, self._evaluate = progress, evaluate
        self.samples = _count_samples(batches) if samples is None else samples
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1; got {self.samples}.")
        # The pulled weights are kept apart from the model, because the difference to them is pushed.
        self._flat = FlatModel(model, torch.optim.SGD(model.parameters(), lr=1.0), apart=True)
        description = Description(self._flat.layout, SUMS, self._flat.fixed, local_steps=steps > 1).as_json()
        if token is None:
            token = job_token()
        secret = token.encode() if isinstance(token, str) else token
        number = worker_number() if client is None else client
        self._wire = Wire(address(server), description, secret, number, tls=tls or Tls.from_environment())
        self.rounds = 0  # completed so far

    @property
    def number(self) -> int:
        """The number of this client."""
        return self._wire.worker

    @property
    def pull_seconds(self) -> float:
        """The duration of the last pull. It is long if too many clients pull at the same time."""
        return self._wire.pull_seconds

    def run(self, rounds: int | None = None) -> int:
        """Take part in this number of rounds, or until the server ends. Then leave, and return the number of rounds."""
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
                self._report_metrics()
                if self._progress:
                    self._progress(self.rounds, loss)
            return self.rounds
        finally:
            wire.close()

    def _report_metrics(self) -> None:
        """Evaluate the model, and report the metrics. Raise ValueError if they are not finite numbers by name."""
        if self._evaluate is None:
            return
        metrics = self._evaluate(self.model)
        if not isinstance(metrics, Mapping):
            raise ValueError(
                f"evaluate must return metrics by name, such as {{'accuracy': 0.9}}; got a {type(metrics).__name__}."
            )
        for name, value in checked(metrics).items():
            self._wire.measured(name, value)

    def _train(self) -> float:
        """Make τ steps on the client's samples, and return the mean loss."""
        model = self.model.train()
        parameters = self._flat.parameters
        start_weights = [parameter.detach().clone() for parameter in parameters] if self.proximal else []
        optimizer = self._make_optimizer(parameters)
        device = parameters[0].device
        total = 0.0
        for _ in range(self.steps):
            inputs, labels = next(self._batches)
            optimizer.zero_grad()
            loss = self._loss(model(inputs.to(device)), labels.to(device))
            torch.autograd.backward(loss)
            for parameter, start in zip(parameters, start_weights, strict=False):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - start, alpha=self.proximal)
            optimizer.step()
            total += float(loss.detach())
        return total / self.steps

    def _gather(self) -> None:
        """Fill the buffer that is pushed with the model, or with its difference to the pulled one."""
        if self._wire.mixes:
            self._flat.gather_weights()
        else:
            self._flat.gather_difference()


def _repeat(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches, and start again after the last one."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError(
                "There are no batches to train on; a generator can be used only once, so pass a list or a DataLoader."
            )


def _count_samples(batches: Any) -> int:
    """Return the number of samples of a DataLoader."""
    try:
        return len(batches.dataset)
    except (AttributeError, TypeError):
        raise ValueError("Pass the number of this client's samples with samples=.") from None
