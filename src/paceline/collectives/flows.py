"""A schedule in virtual time: every transfer is a flow over its route, and flows share links max-min fairly.

A server begins a step of a process when it has sent and received everything of the step before. A transfer flows once
both of its ends have begun the step and its latency has passed. A server that forwards data for others does so as the
data arrives.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.collectives.schedule import Numbers, Schedule, ScheduleProcess, Step
from paceline.collectives.topology import Topology
from paceline.simulate.fair_sharing import max_min

DONE = 1e-9  # a transfer is complete when at most this fraction of it is left

Reals = npt.NDArray[np.float64]


def simulate(net: Topology, schedule: Schedule, rate: float, latency: float = 0.0, element: int = 4) -> float:
    """Return the seconds that a schedule takes on links of `rate` bytes per second.

    A network with rates of its own uses those instead. `latency` is in seconds from one server to the next. `element`
    is the size of an element in bytes.
    """
    return _FlowRun(net, schedule, rate, latency, element).run()


def busiest_link(net: Topology, schedule: Schedule, rate: float, element: int = 4) -> float:
    """Return the seconds that the busiest link needs for all it carries. The schedule cannot be faster."""
    carried = np.zeros(len(net.links))
    for process in schedule.processes:
        pairs: dict[tuple[int, int], int] = {}
        for step in process.steps:
            for a, b, count in zip(step.sender.tolist(), step.receiver.tolist(), step.elements.tolist(), strict=True):
                pairs[a, b] = pairs.get((a, b), 0) + count
        for (a, b), count in pairs.items():
            carried[net.route(a, b, process.direction)] += count * element
    return float((carried / np.array(net.link_rates(rate))).max())


def forwards_packets(net: Topology, schedule: Schedule) -> bool:
    """Return whether a server forwards data that is meant for another."""
    return any(
        net.server_hops(a, b, process.direction) > 1
        for process in schedule.processes
        for step in process.steps
        for a, b in zip(step.sender.tolist(), step.receiver.tolist(), strict=True)
    )


@dataclass
class _FlowBatch:
    """Transfers of one process that began at the same time."""

    process: int
    sender: Numbers
    receiver: Numbers
    left: Reals  # bytes
    size: Reals
    links: Numbers  # the links of all routes, one route after the other
    owner: Numbers  # for each entry of `links`, the transfer whose route it belongs to, counted within the batch


class _FlowProgress:
    """How far each server is in one process."""

    def __init__(self, process: ScheduleProcess, servers: int) -> None:
        self.process = process
        self.step = np.zeros(servers, dtype=np.int64)  # the step that each server is in
        self.begun = [np.zeros(len(step), dtype=bool) for step in process.steps]
        self.due = [_transfers_by_server(step, servers) for step in process.steps]  # transfers left, by server
        self._advance(np.arange(servers))

    def done(self, ends: Numbers) -> None:
        """Count one finished transfer for each entry of `ends`, and advance the servers that have finished a step."""
        servers, count = np.unique(ends, return_counts=True)
        for step in np.unique(self.step[servers]):
            at = self.step[servers] == step
            self.due[step][servers[at]] -= count[at]
        self._advance(servers)

    def _advance(self, servers: Numbers) -> None:
        """Move these servers on to the next step in which they have a transfer left."""
        while len(servers):
            servers = servers[self.step[servers] < len(self.due)]
            over = np.array([self.due[self.step[server]][server] == 0 for server in servers], dtype=bool)
            servers = servers[over] if len(servers) else servers
            self.step[servers] += 1

    def begin_ready(self) -> list[tuple[Step, Numbers]]:
        """Begin the transfers whose sender and receiver are both in their step. Return them by step, as indices."""
        found = []
        for number in np.unique(self.step):
            if number < len(self.begun):
                step, begun = self.process.steps[number], self.begun[number]
                at = np.flatnonzero(~begun & (self.step[step.sender] == number) & (self.step[step.receiver] == number))
                if len(at):
                    begun[at] = True
                    found.append((step, at))
        return found


def _transfers_by_server(step: Step, servers: int) -> Numbers:
    return np.bincount(step.sender, minlength=servers) + np.bincount(step.receiver, minlength=servers)


@dataclass
class _FlowRun:
    """One simulated run of a schedule."""

    net: Topology
    schedule: Schedule
    rate: float
    latency: float
    element: int
    now: float = 0.0
    flowing: list[_FlowBatch] = field(default_factory=list)
    waiting: list[tuple[float, int, _FlowBatch]] = field(default_factory=list)  # heap, by when the batch begins to flow
    batches: int = 0  # batches so far; orders those that begin together

    def __post_init__(self) -> None:
        self._progress = [_FlowProgress(process, self.schedule.servers) for process in self.schedule.processes]
        self._capacity = np.array(self.net.link_rates(self.rate))
        self._routes: dict[tuple[int, int, int], tuple[list[int], int]] = {}

    def run(self) -> float:
        """Return the seconds that the schedule takes."""
        for number in range(len(self._progress)):
            self._begin(number)
        while self.flowing or self.waiting:
            self._flow()
        return self.now

    def _begin(self, number: int) -> None:
        """Begin the transfers of a process that are ready."""
        for step, at in self._progress[number].begin_ready():
            direction = self.schedule.processes[number].direction
            sender, receiver = step.sender[at], step.receiver[at]
            found = [self._route(a, b, direction) for a, b in zip(sender.tolist(), receiver.tolist(), strict=True)]
            routes = [links for links, _ in found]
            size = step.elements[at].astype(float) * self.element
            hops = np.array([len(route) for route in routes])
            links = np.concatenate([np.array(route) for route in routes])
            owner = np.repeat(np.arange(len(at)), hops)
            passed = np.array([count for _, count in found]) if self.latency else np.zeros(len(found))
            for count in np.unique(
                passed
            ):  # transfers between near servers begin to flow before those between far ones
                batch = _batch(number, sender, receiver, size, links, owner, passed == count)
                self.batches += 1
                heapq.heappush(self.waiting, (self.now + self.latency * float(count), self.batches, batch))

    def _route(self, a: int, b: int, direction: int) -> tuple[list[int], int]:
        """Return the links between two servers, and how many times the route goes from one server to the next."""
        if (a, b, direction) not in self._routes:
            self._routes[a, b, direction] = self.net.route(a, b, direction), self.net.server_hops(a, b, direction)
        return self._routes[a, b, direction]

    def _flow(self) -> None:
        """Advance to the time at which the next transfer ends or begins to flow."""
        while self.waiting and self.waiting[0][0] <= self.now:
            self.flowing.append(heapq.heappop(self.waiting)[2])
        if not self.flowing:
            self.now = self.waiting[0][0]
            return
        base = np.cumsum([0, *(len(batch.left) for batch in self.flowing)])
        links = np.concatenate([batch.links for batch in self.flowing])
        owner = np.concatenate([batch.owner + first for batch, first in zip(self.flowing, base[:-1], strict=True)])
        left = np.concatenate([batch.left for batch in self.flowing])
        rates = max_min(links, owner, len(left), self._capacity)
        seconds = float((left / rates).min())
        if self.waiting:
            seconds = min(seconds, self.waiting[0][0] - self.now)
        self.now += seconds
        for batch, first, last in zip(self.flowing, base[:-1], base[1:], strict=True):
            batch.left -= rates[first:last] * seconds
        self._end()

    def _end(self) -> None:
        """Remove the transfers that have ended, and begin those that waited for them."""
        touched = set()
        for batch in self.flowing:
            over = batch.left <= DONE * batch.size
            if over.any():
                self._progress[batch.process].done(np.concatenate([batch.sender[over], batch.receiver[over]]))
                touched.add(batch.process)
        self.flowing = [rest for batch in self.flowing if (rest := _unfinished(batch)) is not None]
        for number in sorted(touched):
            self._begin(number)


def _batch(
    process: int,
    sender: Numbers,
    receiver: Numbers,
    size: Reals,
    links: Numbers,
    owner: Numbers,
    chosen: npt.NDArray[np.bool_],
) -> _FlowBatch:
    """Return a batch of the chosen transfers."""
    kept = chosen[owner]
    renumbered = np.cumsum(chosen) - 1
    return _FlowBatch(
        process,
        sender[chosen],
        receiver[chosen],
        size[chosen].copy(),
        size[chosen],
        links[kept],
        renumbered[owner[kept]],
    )


def _unfinished(batch: _FlowBatch) -> _FlowBatch | None:
    """Return a batch of the transfers that have not ended, or None if all have."""
    going = batch.left > DONE * batch.size
    if going.all():
        return batch
    if not going.any():
        return None
    rest = _batch(batch.process, batch.sender, batch.receiver, batch.size, batch.links, batch.owner, going)
    rest.left = batch.left[going]
    return rest
