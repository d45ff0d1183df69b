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

import os
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from paceline.model.optimizer import spec_of
from paceline.serve.client import Client
from paceline.serve.description import Description
from paceline.serve.messages import Granted
from paceline.serve.samples import Range, Samples
from paceline.train.flat import Flat

CONNECT, TOKEN, WORKER = "PACELINE_CONNECT", "PACELINE_TOKEN", "PACELINE_WORKER"


class Dataset(Protocol):
    """Anything with a length and samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def join(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, connect: str | None = None, token: str | None = None
) -> Session:
    """Take part in a job: the one at `connect` ("host:port"), or in PACELINE_CONNECT; without either, train alone."""
    address = connect or os.environ.get(CONNECT)
    if not address:
        return Session(model, optimizer, None)
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"A server's address is written host:port, not {address!r}.")
    flat = Flat(model, optimizer)
    described = Description(flat.layout, spec_of(optimizer)).as_json()
    secret = token.encode() if token is not None else bytes.fromhex(os.environ.get(TOKEN, ""))
    worker = os.environ.get(WORKER)
    client = Client((host, int(port)), described, secret, int(worker) if worker else None)
    return Session(model, optimizer, _Remote(client, flat))


class _Remote:
    """What a session needs when it trains with others."""

    def __init__(self, client: Client, flat: Flat) -> None:
        self.client, self.flat = client, flat
        self.granted: Granted = client.begin(flat.weights_bytes())
        flat.scatter()

    def go_on(self) -> None:
        """Wait for another Grant."""
        self.granted = self.client.go_on(self.flat.weights_bytes())
        self.flat.scatter()


class Session:
    """One worker's part in a job, or a job of its own."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, remote: _Remote | None) -> None:
        self.model, self.optimizer = model, optimizer
        self._remote = remote
        self._batch = 0  # samples since the last step
        self._taken: list[int] = []  # and the numbers they were given under
        self._batches_alone = 0
        self._since = time.perf_counter()

    @property
    def worker(self) -> int:
        """This worker's number; 0 when it trains alone."""
        return self._remote.client.worker if self._remote else 0

    def batches(self, dataset: Dataset, batch_size: int, epochs: int = 1, seed: int = 0) -> Iterator[Any]:
        """Batches of samples, each sample once an epoch over all workers. The batch size follows the Grants."""
        if len(dataset) < batch_size:
            raise ValueError(f"The dataset has {len(dataset)} samples, fewer than a batch of {batch_size}.")
        order: tuple[int, Sequence[int]] = (-1, ())
        for taken in self._ranges(len(dataset), batch_size, epochs):
            if order[0] != taken.epoch:
                shuffled = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed + taken.epoch))
                order = (taken.epoch, shuffled.tolist())
            self._batch += taken.stop - taken.start
            yield default_collate([dataset[index] for index in order[1][taken.start : taken.stop]])

    def _ranges(self, size: int, batch_size: int, epochs: int) -> Iterator[Range]:
        """What to train on next, until there is no more."""
        alone, remote = Samples(size, epochs), self._remote
        while remote is None:
            self._batches_alone += 1
            taken = alone.take(0, self._batches_alone, batch_size)
            if taken is None:
                return
            yield taken
        while True:
            given = remote.client.take(remote.granted.batch_size or batch_size, size, epochs)
            if given.start == given.stop:
                return
            self._taken.append(given.number)
            yield Range(given.epoch, given.start, given.stop)

    def step(self, loss: torch.Tensor | float | None = None, *, batch_size: int | None = None) -> None:
        """Give the gradients that are in the model, and go on with the newest weights."""
        samples = batch_size or self._batch
        if not samples:
            raise ValueError("step() does not know how many samples the gradient is of; pass batch_size.")
        self._batch = 0
        remote = self._remote
        if remote is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
            return
        remote.flat.gather()
        remote.granted = remote.client.exchange(
            remote.flat.gradient_bytes(),
            remote.flat.weights_bytes(),
            batch_size=samples,
            compute_seconds=time.perf_counter() - self._since,
            rates=[float(group["lr"]) for group in self.optimizer.param_groups],
            loss=float(loss.detach()) if isinstance(loss, torch.Tensor) else loss,
            taken=self._taken,
        )
        self._taken = []
        remote.flat.scatter()
        self._since = time.perf_counter()

    def close(self) -> None:
        """Leave the job."""
        if self._remote:
            self._remote.client.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
