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
import os
import warnings
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.model.description import Description
from paceline.model.optimizer import spec_of
from paceline.serve.environment import CONNECT, GRADIENTS, address, check_token, is_launched, job_token, worker_number
from paceline.serve.wire.tls import Tls
from paceline.serve.worker import uncaught
from paceline.serve.worker.client import Client
from paceline.serve.worker.departure import Departure
from paceline.serve.worker.metrics import checked
from paceline.serve.worker.notices import notice
from paceline.train import profile, ranks
from paceline.train.backend import Backend, JobBackend, LocalBackend
from paceline.train.data import EpochBatches, PacedLoader, batches_of, loader_of
from paceline.train.flat_model import FlatModel
from paceline.train.job_epochs import JobEpochs
from paceline.train.loading import Loading
from paceline.train.local_steps import LocalRounds, LocalStepsBackend, local_rounds
from paceline.train.optimizer import PacedOptimizer
from paceline.train.overlap import OverlappedBackend
from paceline.train.overlapped_rounds import OverlappedRoundsBackend
from paceline.train.processes import JobProcess, check_process


def join(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    connect: str | None = None,
    token: str | None = None,
    gradients: str | None = None,
    buffers: bool = True,
    overlap: bool = False,
    local_steps: int | None = None,
    outer: str | None = None,
    ahead: bool = False,
) -> Session:
    """Join the job whose server is at `connect` ("host:port") or in PACELINE_CONNECT. Without either, train alone.

    gradients: the type in which gradients cross the network: float32, bfloat16 or float16. The default is
        PACELINE_GRADIENTS, or float32 if that is not set.
    buffers: average batch norm's running statistics and similar buffers over the workers. If False, each worker keeps
        its own.
    overlap: where updates are streamed, push gradients while the backward pass computes them. Each backward() must
        then be followed by step(), without clipping, scaling or accumulating gradients in between. With local steps:
        make the steps of the next round while the exchange of the last one is on its way.
    local_steps: make this number of steps with the worker's own optimizer, then exchange how far they moved the model.
        The default is to exchange every gradient, and to let the server make the steps.
    outer: the optimizer that the server steps by these differences, such as "sgd:lr=0.7,momentum=0.9,nesterov=true".
        By default it adds their mean to the model.
    ahead: begin each round of local steps ahead of the pulled model, for policies under which workers take turns.
    """
    server = _server("join", model, optimizer, connect)
    local = local_rounds(local_steps, outer, ahead)
    if profile.wanted():
        return _profiled(model, optimizer, buffers)
    if not server:
        return Session(model, optimizer, LocalBackend())
    return Session(model, optimizer, _connect(model, optimizer, server, token, gradients, buffers, overlap, local))


def wrap(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    connect: str | None = None,
    token: str | None = None,
    gradients: str | None = None,
    buffers: bool = True,
    overlap: bool = False,
    local_steps: int | None = None,
    outer: str | None = None,
    ahead: bool = False,
) -> PacedOptimizer:
    """Join a job and return only the optimizer, for code that has its own training loop.

    `optimizer = paceline.wrap(model, optimizer)` is the whole change. The arguments are those of `join`.
    """
    _server("wrap", model, optimizer, connect)
    return join(
        model,
        optimizer,
        connect=connect,
        token=token,
        gradients=gradients,
        buffers=buffers,
        overlap=overlap,
        local_steps=local_steps,
        outer=outer,
        ahead=ahead,
    ).optimizer


def _server(function: str, model: object, optimizer: object, connect: str | None) -> str | None:
    """Return the address of the job's server, or None to train alone. In a job, errors are sentences from now on.

    Raise ValueError if the model and the optimizer are swapped.
    """
    server = connect or os.environ.get(CONNECT)
    if server or is_launched():
        uncaught.shorten()
    if isinstance(model, torch.optim.Optimizer) or isinstance(optimizer, torch.nn.Module):
        raise ValueError(f"The model comes first, the optimizer second: paceline.{function}(model, optimizer).")
    return server


def _profiled(model: torch.nn.Module, optimizer: torch.optim.Optimizer, buffers: bool) -> Session:
    """Return a session that trains alone and whose steps are timed."""
    session = Session(model, optimizer, LocalBackend())
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
    local: LocalRounds | None,
) -> Backend:
    """Join the job at this address and return the backend that fits it."""
    check_process(model)
    server_address = address(server)
    rank, rank_count = ranks.from_environment()
    if local and rank_count > 1:
        raise ValueError("A worker of several ranks cannot make local steps; use --ranks-per-worker 1.")
    overlap = overlap and rank_count == 1
    on_server = local.optimizer_on_server(optimizer) if local else optimizer
    apart = overlap or local is not None
    flat = FlatModel(model, on_server, gradients or os.environ.get(GRADIENTS) or "float32", buffers, apart)
    several = local is not None and local.steps > 1
    description = Description(flat.layout, spec_of(on_server), flat.fixed, several).as_json()
    secret = token.encode() if token is not None else job_token()
    if token:
        check_token(secret, "the argument token")

    def connect(departure: Departure) -> Client:
        number, tls = worker_number(), Tls.from_environment()
        return Client(server_address, description, secret, number, tls=tls, tell=notice, departure=departure)

    if rank_count > 1:
        return ranks.RankedBackend(connect, flat, Loading(flat, optimizer), rank, rank_count)
    client, loading = connect(Departure.at_sigterm()), Loading(flat, on_server)
    if local:
        backend = OverlappedRoundsBackend if overlap else LocalStepsBackend
        return backend(client, flat, loading, local, optimizer.step)
    if overlap and client.streamed:
        return OverlappedBackend(client, flat, loading)
    return JobBackend(client, flat, loading)


class Session(JobProcess):
    """The part of one process in a job, or a training run of its own."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, backend: Backend) -> None:
        self.model = model
        #: The optimizer for loops that call step() themselves, and for schedulers, scalers and clipping.
        self.optimizer = PacedOptimizer(optimizer, backend)
        self._backend = backend
        self._job_batches: dict[int, tuple[Any, EpochBatches]] = {}
        atexit.register(self.close)

    def batches(
        self,
        data: Any,
        batch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        *,
        sharded: bool = False,
    ) -> Iterator[Any]:
        """Yield this worker's batches of a Dataset or a DataLoader. All workers together see each sample once an epoch.

        If the policy tunes batch sizes, the batches follow it. Another call with the same data continues with the next
        epochs. A stream (IterableDataset) and a sampler of your own are divided among the processes in fixed parts:
        each sample is seen once an epoch if their order is the same in all processes, and if no worker is lost.

        epochs: the number of epochs; 1 by default.
        sharded: the data is this process's part already. It is used as it is, without dividing it.
        """
        return self._batches_of(data, batch_size, seed, sharded).batches(epochs)

    def loader(
        self, loader: DataLoader[Any], epochs: int | None = None, seed: int = 0, *, sharded: bool = False
    ) -> PacedLoader:
        """Return a DataLoader that yields this worker's batches of one epoch each time it is iterated over.

        If `epochs` is given, training is finished after that number of epochs: the model is the final one then, and
        metrics of it can be logged. The worker leaves the job when the script ends, or with `close`. `seed` and
        `sharded` are those of `batches`, which says what is promised.
        """
        return PacedLoader(loader, self._batches_of(loader, None, seed, sharded), self.finish, epochs)

    def epochs(self, loader: DataLoader[Any], seed: int = 0, *, fetches_ahead: bool = False) -> JobEpochs:
        """Return a loader for a library that owns the training loop.

        fetches_ahead: the library fetches batches before it trains on them, and calls `use` for each.
        """
        batches = self._batches_of(loader, None, seed, sharded=False)
        return JobEpochs(loader, batches, self.optimizer, self._backend, fetches_ahead)

    @property
    def has_trained(self) -> bool:
        """Whether the job had trained before this process joined it."""
        return self._backend.has_trained

    def _batches_of(self, data: Any, batch_size: int | None, seed: int, sharded: bool) -> EpochBatches:
        if id(data) not in self._job_batches:
            loader = loader_of(data, batch_size)
            batches = batches_of(loader, self.optimizer, self._backend, seed, sharded)
            self._job_batches[id(data)] = data, batches  # holding the data keeps its id from being reused
            self._backend.knows_its_part = True
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

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Load weights into the model of every worker, as `model.load_state_dict(state_dict)` does in one process.

        The main worker's call counts, and other workers may call it too. They get the weights with their next batch or
        step, and updates that they are computing are discarded. The optimizer's state is kept.
        """
        if self._backend.alone or self._backend.worker == 0:
            self.model.load_state_dict(state_dict)
            self._backend.load_weights()

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
        values = checked(metrics)
        if values and self.optimizer.closed and not self._backend.alone:
            warnings.warn(
                f"This worker has left the job, so {', '.join(values)} cannot be reported; call session.log() before "
                "session.close(), or inside the `with` block after session.finish().",
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
