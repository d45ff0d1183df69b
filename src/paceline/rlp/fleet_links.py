"""The arrival times of many clusters: pull, compute, push, over one link to the server that the workers share.

The transfers of RLP use the link one after the other, in the order in which they are requested: pulls in the order of
the Grants, and pushes in the order in which workers have computed. Each direction has its own queue. This is what the
simulator does with one server and equal links for a policy that queues its transfers, and it needs no event loop: the
next update to arrive is that of the worker that has computed first, because a worker that is granted later cannot
overtake it. A worker that waits for its pull gets the weights as they are when its pull begins.
"""

from __future__ import annotations

import torch

from paceline.rlp.instance import PUSH

Tensor = torch.Tensor


class FleetLinks:
    """The queues of E clusters with N workers. transfer (E,): the seconds of one pull."""

    def __init__(self, transfer: Tensor, workers: int) -> None:
        self._transfer = transfer
        self._pull_begins = torch.zeros(len(transfer), workers, dtype=transfer.dtype, device=transfer.device)
        self._out_free, self._in_free = torch.zeros_like(transfer), torch.zeros_like(transfer)
        self._computed_at = torch.full((len(transfer), workers), torch.inf, dtype=transfer.dtype).to(transfer.device)

    def begin(self, granted: Tensor, idle_since: Tensor, now: Tensor, seconds: Tensor) -> None:
        """Let granted workers (E, N) pull, those first that have been idle longest, and compute for these seconds.

        idle_since: increases with the time since when a worker is idle; differs from worker to worker.
        """
        last = torch.iinfo(idle_since.dtype).max
        waited = torch.where(granted, idle_since, last)
        place = (waited[:, None, :] <= waited[:, :, None]).sum(2)  # 1 for the first
        free = torch.maximum(self._out_free, now)
        begins = free[:, None] + (place - 1) * self._transfer[:, None]
        self._pull_begins = torch.where(granted, begins, self._pull_begins)
        self._computed_at = torch.where(granted, begins + self._transfer[:, None] + seconds, self._computed_at)
        count = granted.sum(1)
        self._out_free = torch.where(count > 0, free + count * self._transfer, self._out_free)

    def next_arrivals(self) -> tuple[Tensor, Tensor]:
        """Return the worker (E,) whose update arrives next in each cluster, and the time (E,) of its arrival."""
        computed_at, worker = self._computed_at.min(1)
        self._in_free = torch.maximum(self._in_free, computed_at) + PUSH * self._transfer
        self._computed_at.scatter_(1, worker[:, None], torch.inf)
        return worker, self._in_free

    def queued(self, now: Tensor) -> Tensor:
        """Return which workers (E, N) are granted and have not begun to pull."""
        return self._pull_begins > now[:, None]

    def keep(self, rows: Tensor) -> None:
        """Drop all clusters but these."""
        for name in ("_transfer", "_pull_begins", "_out_free", "_in_free", "_computed_at"):
            setattr(self, name, getattr(self, name)[rows])
