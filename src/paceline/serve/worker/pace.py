"""`paceline.coordinate`: only the coordinator, beside somebody else's data plane.

A worker asks to proceed; the policy decides when it may, and with what batch; a few bytes each way. What moves the
gradients (torch.distributed, MPI, a store of your own) is not our business, and no shard is needed:

    with paceline.coordinate() as pace:
        while training:
            ...                                    # compute a gradient of pace.batch_size samples
            pace.proceed(batch_size=32, loss=...)  # waits for permission
            ...                                    # now exchange it, by whatever you use

Run it with `paceline run --servers 0 --policy r2sp script.py`; run with plain `python`, every request is permitted at
once.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from paceline.serve.environment import CONNECT, TOKEN, address, worker_number
from paceline.serve.wire.tls import Tls
from paceline.serve.worker.client import Client

NOTHING = memoryview(b"")


@dataclass(frozen=True)
class Permission:
    """To go on with iteration number `iteration`, with so many samples (None: your own batch)."""

    iteration: int
    batch_size: int | None


class Pace:
    """One worker's place in the order."""

    def __init__(self, client: Client | None) -> None:
        self._client = client
        self._iteration = 1
        self.batch_size: int | None = None  # what the policy last said
        if client:
            self.batch_size = client.begin(NOTHING).batch_size
        self._since = time.perf_counter()

    @property
    def worker(self) -> int:
        """This worker's number; 0 when it is alone."""
        return self._client.worker if self._client else 0

    def proceed(self, *, batch_size: int, loss: float | None = None, seconds: float | None = None) -> Permission:
        """Ask to proceed, and wait until it is permitted.

        batch_size: of what was just computed. seconds: that took; the time since the last permission if left out.
        """
        self._iteration += 1
        if self._client is None:
            return Permission(self._iteration, None)
        spent = time.perf_counter() - self._since if seconds is None else seconds
        granted = self._client.exchange(
            NOTHING, NOTHING, batch_size=batch_size, compute_seconds=spent, rates=(), loss=loss
        )
        self.batch_size = granted.batch_size
        self._since = time.perf_counter()
        return Permission(granted.iteration, granted.batch_size)

    def close(self) -> None:
        """Leave the order; the others close up."""
        if self._client:
            self._client.close()

    def __enter__(self) -> Pace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def coordinate(*, connect: str | None = None, token: str | None = None) -> Pace:
    """Take a place in the order of the job at `connect` ("host:port") or in PACELINE_CONNECT; without either, alone.

    Waits for the first permission, which under some policies comes only when others have begun: do first what all
    workers must do together.
    """
    where = connect or os.environ.get(CONNECT)
    if not where:
        return Pace(None)
    secret = token.encode() if token is not None else bytes.fromhex(os.environ.get(TOKEN, ""))
    return Pace(Client(address(where), b"", secret, worker_number(), tls=Tls.from_environment()))
