"""`paceline.coordinate`: the coordinator alone, for a job that exchanges gradients by other means.

A worker asks to proceed. The policy decides when it may, and with what batch size. Each request takes a few bytes.
Something else moves the gradients (torch.distributed, MPI, a store of your own), so no shard is needed:

    with paceline.coordinate() as pace:
        while training:
            ...                                    # compute a gradient of pace.batch_size samples
            permission = pace.proceed(batch_size=32, loss=...)  # waits
            ...                                    # exchange the gradient by your own means, with permission.weight

Run the script with `paceline run --servers 0 --policy r2sp script.py`. Under plain `python` every request is permitted
at once.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from paceline.serve.environment import CONNECT, address, job_token, worker_number
from paceline.serve.wire.tls import Tls
from paceline.serve.worker import uncaught
from paceline.serve.worker.client import Client
from paceline.serve.worker.departure import Departure
from paceline.serve.worker.notices import notice

EMPTY = memoryview(b"")


@dataclass(frozen=True)
class Permission:
    """The permission to run an iteration."""

    iteration: int
    batch_size: int | None  # samples to compute the next gradient from; None: as many as the script likes
    #: The weight of the gradient that asked for this permission: the factor of its learning rate. It is 0 if the policy
    #: discards the gradient, as `bsp:backup=1` discards late ones.
    weight: float = 1.0


class Pace:
    """One worker that asks the coordinator before each exchange."""

    def __init__(self, client: Client | None) -> None:
        self._client = client
        self._iteration = 1
        self.batch_size: int | None = None  # that the policy last chose
        if client:
            self.batch_size = client.begin(EMPTY).batch_size
        self._since = time.perf_counter()

    @property
    def worker(self) -> int:
        """This worker's number; 0 without a job."""
        return self._client.worker if self._client else 0

    def proceed(self, *, batch_size: int, loss: float | None = None, seconds: float | None = None) -> Permission:
        """Ask to proceed, and wait for the permission.

        batch_size: samples that the gradient was computed from. seconds: that this took; by default the time since the
        last permission.
        """
        self._iteration += 1
        if self._client is None:
            return Permission(self._iteration, None)
        spent = time.perf_counter() - self._since if seconds is None else seconds
        granted = self._client.exchange(EMPTY, EMPTY, batch_size=batch_size, compute_seconds=spent, rates=(), loss=loss)
        self.batch_size = granted.batch_size
        self._since = time.perf_counter()
        return Permission(granted.iteration, granted.batch_size, 1.0 if granted.weight is None else granted.weight)

    def close(self) -> None:
        """Leave the job. The policy goes on without this worker."""
        if self._client:
            self._client.close()

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def coordinate(*, connect: str | None = None, token: str | None = None) -> Pace:
    """Join the job at `connect` ("host:port") or in PACELINE_CONNECT. Without either, permit every request at once.

    Wait for the first permission. Under some policies it comes only after other workers have begun, so do everything
    that all workers must do together before this call.
    """
    where = connect or os.environ.get(CONNECT)
    if not where:
        return Pace(None)
    uncaught.shorten()
    secret = token.encode() if token is not None else job_token()
    here, number, tls, departure = address(where), worker_number(), Tls.from_environment(), Departure.at_sigterm()
    return Pace(Client(here, b"", secret, number, tls=tls, tell=notice, departure=departure))
