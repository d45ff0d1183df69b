"""`paceline.join` and `paceline.wrap`: how a training script takes part in a job.

    with paceline.join(model, optimizer) as session:
        for x, y in session.batches(dataset, batch_size=128, epochs=3):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            session.step(loss)

A script that `paceline run` starts, or that finds a server's address in PACELINE_CONNECT, trains together with the
other workers of the job. Under plain `python` the same script trains alone.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import warnings
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
from paceline.serve.worker.client import Client
from paceline.serve.worker.transfers import Refusal
from paceline.train import profile, ranks
from paceline.train.backend import Backend, JobBackend, LocalBackend
from paceline.train.data import JobBatches, PacedLoader, loader_of
from paceline.train.flat_model import FlatModel
from paceline.train.optimizer import PacedOptimizer
from paceline.train.overlap import OverlappedBackend

GRADIENTS = "PACELINE_GRADIENTS"
MAX_METRIC_NAME = 80  # characters; the server cuts off the rest


@contextmanager
def user_errors() -> Iterator[None]:
    """Under `paceline run`, print an error that the user can fix as one sentence, without a traceback.

    The process then exits with a code that ends the job, because a restart of this worker would fail again.
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
    """Join the job whose server is at `connect` ("host:port") or in PACELINE_CONNECT. Without either, train alone.

    gradients: the type in which gradients cross the network: float32, bfloat16 or float16. The default is
        PACELINE_GRADIENTS, or float32 if that is not set.
    buffers: average batch norm's running statistics and similar buffers over the workers. If False, each worker keeps
        its own.
    overlap: where updates are streamed, push gradients while the backward pass computes them. Each backward() must
        then be followed by step(), without clipping, scaling or accumulating gradients in between.
    """
    with user_errors():
        _check_order("join", model, optimizer)
    if profile.wanted():
        return _profiled(model, optimizer, buffers)
    server = connect or os.environ.get(CONNECT)
    if not server:
        return Session(model, optimizer, LocalBackend())
    with user_errors():
        return Session(model, optimizer, _connect(model, optimizer, server, token, gradients, buffers, overlap))


def wrap(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    connect: str | None = None,
    token: str | None = None,
    gradients: str | None = None,
    buffers: bool = True,
    overlap: bool = False,
) -> PacedOptimizer:
    """Join a job and return only the optimizer, for code that has its own training loop.

    `optimizer = paceline.wrap(model, optimizer)` is the whole change. The arguments are those of `join`.
    """
    with user_errors():
        _check_order("wrap", model, optimizer)
    return join(
        model, optimizer, connect=connect, token=token, gradients=gradients, buffers=buffers, overlap=overlap
    ).optimizer


def _check_order(function: str, model: object, optimizer: object) -> None:
    """Raise ValueError if the model and the optimizer are swapped."""
    if isinstance(model, torch.optim.Optimizer) or isinstance(optimizer, torch.nn.Module):
        raise ValueError(f"The model comes first, the optimizer second: paceline.{function}(model, optimizer).")


def _profiled(model: torch.nn.Module, optimizer: torch.optim.Optimizer, buffers: bool) -> Session:
    """Return a session that trains alone and whose steps are timed."""
    session = Session(model, optimizer, LocalBackend())
    with user_errors():
        profiler = profile.StepProfiler(model, session.optimizer, buffers)
    atexit.register(profiler.write)  # the script may end before the profiler has seen enough steps
    return session


def _connect(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    server: str,
    token: str | None,
    gradients: str | None,
    buffers: bool,
    overlap: bool,
) -> Backend:
    """Join the job at this address and return the backend that fits it."""
    server_address = address(server)
    rank, rank_count = ranks.from_environment()
    overlap = overlap and rank_count == 1
    flat = FlatModel(model, optimizer, gradients or os.environ.get(GRADIENTS) or "float32", buffers, apart=overlap)
    description = Description(flat.layout, spec_of(optimizer), flat.fixed).as_json()
    secret = token.encode() if token is not None else bytes.fromhex(os.environ.get(TOKEN, ""))

    def connect() -> Client:
        return Client(server_address, description, secret, worker_number(), tls=Tls.from_environment())

    if rank_count > 1:
        return ranks.RankedBackend(connect, flat, rank, rank_count)
    client = connect()
    return OverlappedBackend(client, flat) if overlap and client.streamed else JobBackend(client, flat)


class Session:
    """The part of one process in a job, or a training run of its own."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, backend: Backend) -> None:
        self.model = model
        #: The optimizer for loops that call step() themselves, and for schedulers, scalers and clipping.
        self.optimizer = PacedOptimizer(optimizer, backend)
        self._backend = backend
        self._job_batches: dict[int, tuple[Any, JobBatches]] = {}
        atexit.register(self.close)

    @property
    def worker(self) -> int:
        """The number of this worker; 0 when it trains alone."""
        return self._backend.worker

    @property
    def is_main(self) -> bool:
        """Whether this is the one process of the job that should print, evaluate and save.

        It is True in rank 0 of worker 0, and under plain `python`.
        """
        return self._backend.worker == self._backend.rank == 0

    def batches(self, data: Any, batch_size: int | None = None, epochs: int = 1, seed: int = 0) -> Iterator[Any]:
        """Yield this worker's batches of a Dataset or a DataLoader. All workers together see each sample once an epoch.

        If the policy tunes batch sizes, the batches follow it. Another call with the same data continues with the next
        epochs.
        """
        return self._batches_of(data, batch_size, seed).batches(epochs)

    def loader(self, loader: DataLoader[Any], epochs: int | None = None, seed: int = 0) -> PacedLoader:
        """Return a DataLoader that yields this worker's batches of one epoch each time it is iterated over.

        If `epochs` is given, the worker finishes and leaves the job after that number of epochs.
        """

        def leave() -> None:
            self.finish()
            self.close()

        return PacedLoader(loader, self._batches_of(loader, None, seed), leave, epochs)

    def _batches_of(self, data: Any, batch_size: int | None, seed: int) -> JobBatches:
        if id(data) not in self._job_batches:
            with user_errors():
                batches = JobBatches(loader_of(data, batch_size), self.optimizer, self._backend, seed)
            self._job_batches[id(data)] = data, batches  # holding the data keeps its id from being reused
        return self._job_batches[id(data)][1]

    def step(
        self,
        loss: torch.Tensor | float | None = None,
        *,
        batch_size: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Push the model's gradients, pull the newest weights into the model, and clear the gradients.

        scaler: the GradScaler that scaled the loss. It skips the step if the gradients overflowed, and is updated.
        """
        if scaler is None:
            self.optimizer.step(loss=loss, batch_size=batch_size)
        else:
            scaler.step(self.optimizer, loss=loss, batch_size=batch_size)
            scaler.update()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """End training: wait until the other workers are done too, and pull the final model.

        Leaving the `with` block calls it, and so does a loader after its last epoch. Call it yourself to evaluate the
        final model inside the block.
        """
        self.optimizer.finish()

    def log(self, **metrics: Any) -> None:
        """Report metrics: `session.log(accuracy=0.98, val_loss=0.07)`.

        The policy, `paceline watch` and the trace receive every value. Of a worker with several ranks, only rank 0
        reports. A session that trains alone checks the values and drops them.
        """
        values = {_metric_name(name): _metric_value(name, value) for name, value in metrics.items()}
        if values and self.optimizer.closed and not self._backend.alone:
            warnings.warn(
                f"This worker has left the job, so {', '.join(values)} cannot be reported; call session.log() earlier.",
                stacklevel=2,
            )
            return
        for name, value in values.items():
            self._backend.report_metric(name, value)

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


def _metric_name(name: str) -> str:
    """Return the name, or raise ValueError if it is not a plain word."""
    if not name.isidentifier() or len(name) > MAX_METRIC_NAME:
        raise ValueError(
            f"A metric's name has letters, digits and underscores, at most {MAX_METRIC_NAME} of them; "
            f"got {name!r:.100}."
        )
    return name


def _metric_value(name: str, value: Any) -> float:
    """Return the value as a float, or raise ValueError if it is not one finite number."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError("float() would parse it")
        number = float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"The metric {name} must be a number; got a value of type {type(value).__name__}.") from None
    if not math.isfinite(number):
        raise ValueError(f"The metric {name} must be a finite number; got {number}.")
    return number
