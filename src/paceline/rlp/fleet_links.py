"""When the updates of many clusters arrive: pull, compute, push, over one link to the server that the workers share.

The transfers in one direction share the link equally: while n of them are under way, each has an n-th of its rate. This
is what the simulator's network does with one server and equal links (`paceline.simulate.network.Star`), and roughly
what TCP does. Pushes do not slow pulls down. A worker pulls when it is granted, and pushes when it has computed.

Each cluster has its own virtual time, so its next event may be any of the three. A step of the loop takes one event of
every cluster that still waits for an arrival. Where transfers take no time, every event is an arrival.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
IDLE, PULLING, COMPUTING, PUSHING = range(4)
TOGETHER = 1e-9  # pulls that end within this share of a transfer end together
LOOKS = 4  # events between two looks at whether all clusters have an arrival; a look waits for a GPU


class FleetLinks:
    """The phases of E × N workers. transfer (E,): the seconds in which one transfer alone would be over."""

    def __init__(self, transfer: Tensor, workers: int) -> None:
        self._transfer = transfer[:, None]
        self._free = transfer == 0
        shape, device = (len(transfer), workers), transfer.device
        self._phase = torch.full(shape, IDLE, dtype=torch.int8, device=device)
        self._left = torch.zeros(shape, dtype=torch.float64, device=device)  # of a transfer: seconds, if it were alone
        self._ends = torch.full(shape, torch.inf, dtype=torch.float64, device=device)  # of a computation
        self._computing = torch.zeros(shape, dtype=torch.float64, device=device)  # seconds of the computation
        self._numbers = torch.arange(workers, device=device)[None]
        self._all_free = bool(self._free.all())

    def begin(self, rows: Tensor, columns: Tensor, now: Tensor, seconds: Tensor) -> None:
        """Let workers pull, and then compute for these seconds. All arguments have one entry for each worker."""
        free = self._free[rows]
        self._computing[rows, columns] = seconds
        self._phase[rows, columns] = torch.where(free, COMPUTING, PULLING).to(torch.int8)
        self._ends[rows, columns] = torch.where(free, now + seconds, torch.inf)
        self._left[rows, columns] = self._transfer[rows, 0]

    def next_arrivals(self, now: Tensor) -> tuple[Tensor, Tensor]:
        """Return the worker (E,) whose update arrives next in each cluster, and the time (E,) of its arrival."""
        if self._all_free:
            arrival, worker = self._ends.min(1)
            self.stop(worker)
            return worker, arrival
        waits = torch.ones_like(self._free)
        found = torch.zeros_like(waits, dtype=torch.int64)
        steps = 0
        while True:
            now, worker, arrived = self._advance(now, waits)
            found = torch.where(arrived, worker, found)
            waits = waits & ~arrived
            steps += 1
            if steps % LOOKS == 0 and not bool(waits.any()):
                return found, now

    def stop(self, worker: Tensor) -> None:
        """Note that this worker (E,) is idle."""
        at = worker[:, None]
        self._phase.scatter_(1, at, IDLE)
        self._ends.scatter_(1, at, torch.inf)

    def keep(self, rows: Tensor) -> None:
        """Drop all clusters but these."""
        for name in ("_transfer", "_free", "_phase", "_left", "_ends", "_computing"):
            setattr(self, name, getattr(self, name)[rows])
        self._all_free = bool(self._free.all())

    def _advance(self, now: Tensor, waits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take the next event of the clusters that wait (E,).

        Return the times, the workers of the events, and the clusters in which the event is an arrival.
        """
        phase = self._phase
        pulling, pushing = phase == PULLING, phase == PUSHING
        moving = pulling | pushing
        flows = torch.where(pulling, pulling.sum(1, keepdim=True), pushing.sum(1, keepdim=True)).double()
        events = torch.where(moving, now[:, None] + self._left * flows, self._ends)
        time, worker = events.min(1)
        time = torch.where(waits, time, now)
        carried = (time - now)[:, None] / flows.clamp(min=1)
        self._left = torch.where(moving, self._left - carried, self._left)
        active = waits[:, None]
        begins = pulling & (self._left <= TOGETHER * self._transfer) & active
        of_event = (self._numbers == worker[:, None]) & active
        ends = of_event & (phase == COMPUTING)
        pushes = ends & ~self._free[:, None]
        arrives = (of_event & pushing) | (ends & self._free[:, None])
        self._ends = torch.where(begins, time[:, None] + self._computing, self._ends)
        self._ends = torch.where(ends, torch.inf, self._ends)
        self._left = torch.where(pushes, self._transfer, self._left)
        phase = torch.where(begins, COMPUTING, phase)
        phase = torch.where(pushes, PUSHING, phase)
        self._phase = torch.where(arrives, IDLE, phase).to(torch.int8)
        return time, worker, arrives.any(1)
