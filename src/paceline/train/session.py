"""`paceline.join`: a worker's session. The loop body stays as it is.

    with paceline.join(model, optimizer) as session:
        for x, y in session.batches(dataset, batch_size=128, epochs=3):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            session.step(loss)

Started by `paceline run` or with a server's address in PACELINE_CONNECT, the session trains together with others. Run
with plain `python`, it trains alone.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.model.description import Description
from paceline.model.optimizer import spec_of
from paceline.serve.environment import CONNECT, LAUNCHED, REFUSAL, REFUSED, TOKEN, address, worker_number
from paceline.serve.wire.tls import Tls
from paceline.serve.worker.client import Client, Refusal
from paceline.train import profile, ranks
from paceline.train.backend import Backend, JobBackend, LocalBackend
from paceline.train.data import JobBatches, PacedLoader, loader_of
from paceline.train.flat_model import FlatModel
from paceline.train.optimizer import PacedOptimizer
from paceline.train.overlap import OverlappedBackend

GRADIENTS = "PACELINE_GRADIENTS"


@contextmanager
def user_errors() -> Iterator[None]:
    """Under `paceline run`, what a person can put right is said in one sentence, without a traceback.

    The job ends with it: to start this worker again would not help.
    """
    try:
        yield
    except (Refusal, ValueError) as error:
        if LAUNCHED not in os.environ:
            raise
        print(f"{REFUSAL}{error}", file=sys.stderr, flush=True)  # noqa: T201
        raise SystemExit(REFUSED) from None


def join(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    connect: str | None = None,
    token: str | None = None,
    gradients: str | None = None,
    buffers: bool = True,
    overlap: bool = False,
) -> Session:
    """Take part in a job: the one at `connect` ("host:port"), or in PACELINE_CONNECT; without either, train alone.

    gradients: how they cross the wire: float32, bfloat16 or float16. Else PACELINE_GRADIENTS says it, else float32.
    buffers: are batch norm's running statistics and the like averaged? If not, each worker keeps its own.
    overlap: push gradients while the backward pass makes them, where updates are streamed? Then each backward() is
        followed by a step(), and nothing is done to gradients in between: no clipping, scaling or adding up.
    """
    if profile.wanted():
        return _probed(model, optimizer, buffers)
    where = connect or os.environ.get(CONNECT)
    if not where:
        return Session(model, optimizer, LocalBackend())
    with user_errors():
        return Session(model, optimizer, _link(model, optimizer, where, token, gradients, buffers, overlap))


def _probed(model: torch.nn.Module, optimizer: torch.optim.Optimizer, buffers: bool) -> Session:
    """A session alone, whose steps are timed."""
    session = Session(model, optimizer, LocalBackend())
    with user_errors():
        atexit.register(
            profile.StepProfiler(model, session.optimizer, buffers).write
        )  # should the script end before it is told
    return session


def _link(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    where: str,
    token: str | None,
    gradients: str | None,
    buffers: bool,
    overlap: bool,
) -> Backend:
    server = address(where)
    rank, size = ranks.from_environment()
    overlap = overlap and size == 1
    flat = FlatModel(model, optimizer, gradients or os.environ.get(GRADIENTS) or "float32", buffers, apart=overlap)
    described = Description(flat.layout, spec_of(optimizer), flat.fixed).as_json()
    secret = token.encode() if token is not None else bytes.fromhex(os.environ.get(TOKEN, ""))

    def client() -> Client:
        return Client(server, described, secret, worker_number(), tls=Tls.from_environment())

    if size > 1:
        return ranks.RankedBackend(client, flat, rank, size)
    joined = client()
    return OverlappedBackend(joined, flat) if overlap and joined.streamed else JobBackend(joined, flat)


def wrap(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    connect: str | None = None,
    token: str | None = None,
    gradients: str | None = None,
    buffers: bool = True,
    overlap: bool = False,
) -> PacedOptimizer:
    """`join` for code that owns its loop: `optimizer = paceline.wrap(optimizer, model)`, and nothing else."""
    return join(
        model, optimizer, connect=connect, token=token, gradients=gradients, buffers=buffers, overlap=overlap
    ).optimizer


class Session:
    """One worker's part in a job, or a job of its own."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, link: Backend) -> None:
        self.model = model
        #: The optimizer, for loops that call its step() and for schedulers, scalers and clipping.
        self.optimizer = PacedOptimizer(optimizer, link)
        self._link = link
        self._feeds: dict[int, tuple[Any, JobBatches]] = {}
        atexit.register(self.close)

    @property
    def worker(self) -> int:
        """This worker's number; 0 when it trains alone."""
        return self._link.worker

    @property
    def is_first(self) -> bool:
        """Is this the one process of the job that should print results and save the model?"""
        return self._link.worker == self._link.rank == 0

    def batches(self, data: Any, batch_size: int | None = None, epochs: int = 1, seed: int = 0) -> Iterator[Any]:
        """Batches of a Dataset or a DataLoader, each sample once an epoch over all workers.

        The batch size follows the Grants. Called again for the same data, it goes on with the epochs that follow.
        """
        return self._feed(data, batch_size, seed).batches(epochs)

    def loader(self, loader: DataLoader[Any], epochs: int | None = None, seed: int = 0) -> PacedLoader:
        """A DataLoader to be iterated over once an epoch. After so many epochs, if given, the worker leaves the job."""

        def over() -> None:
            self.finish()
            self.close()

        return PacedLoader(loader, self._feed(loader, None, seed), over, epochs)

    def _feed(self, data: Any, batch_size: int | None, seed: int) -> JobBatches:
        if id(data) not in self._feeds:
            with user_errors():
                feed = JobBatches(loader_of(data, batch_size), self.optimizer, self._link, seed)
            self._feeds[id(data)] = data, feed  # the data too, so that its id stays its own
        return self._feeds[id(data)][1]

    def step(
        self,
        loss: torch.Tensor | float | None = None,
        *,
        batch_size: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Give the gradients that are in the model, go on with the newest weights, and clear the gradients.

        scaler: one that the loss was scaled by. It skips the step if the gradients overflowed, and is updated.
        """
        if scaler is None:
            self.optimizer.step(loss=loss, batch_size=batch_size)
        else:
            scaler.step(self.optimizer, loss=loss, batch_size=batch_size)
            scaler.update()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """No more steps: wait until the other workers are done too, and have the last model.

        Leaving the `with` block does it, and so does a loader after its last epoch; call it to measure the last model
        before that.
        """
        self.optimizer.finish()

    def measured(self, kind: str, value: float) -> None:
        """Tell the policy, and whoever watches, what was measured: `session.measured("accuracy", 0.97)`."""
        self._link.measured(kind, float(value))

    def close(self) -> None:
        """Leave the job."""
        atexit.unregister(self.close)
        self.optimizer.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()
