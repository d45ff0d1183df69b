"""A schedule in virtual time: every transfer is a flow over its route, and flows share links max-min fairly.

A server begins a step of a process when it has sent and received all of the step before; a transfer flows once both its
ends have begun, and its latency has passed. What is sent over several servers is passed on as it comes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.collectives.schedule import Numbers, Schedule, ScheduleProcess, Step
from paceline.collectives.topology import Topology

NEAR = 1e-9  # of a transfer: what is left of it is nothing
SAME = 1e-9  # shares that differ by less are the same


def simulate(net: Topology, schedule: Schedule, rate: float, latency: float = 0.0, element: int = 4) -> float:
    """Seconds that it takes on links of that rate, in bytes a second, with that latency from server to server."""
    return _FlowRun(net, schedule, rate, latency, element).run()


def passes_on(net: Topology, schedule: Schedule) -> bool:
    """Does a server pass on what is for another?"""
    return any(
        net.passed(a, b, process.turn) > 1
        for process in schedule.processes
        for step in process.steps
        for a, b in zip(step.sender.tolist(), step.receiver.tolist(), strict=True)
    )


Reals = npt.NDArray[np.float64]


@dataclass
class _FlowBatch:
    """Transfers that began at the same time."""

    process: int
    sender: Numbers
    receiver: Numbers
    left: Reals  # bytes
    size: Reals
    links: Numbers  # of all their routes, one after the other
    owner: Numbers  # whose each of those is, counted within the lot


class _FlowProgress:
    """How far the servers are in one process."""

    def __init__(self, process: ScheduleProcess, servers: int) -> None:
        self.process = process
        self.step = np.zeros(servers, dtype=np.int64)  # each server's
        self.begun = [np.zeros(len(step), dtype=bool) for step in process.steps]
        self.due = [_due(step, servers) for step in process.steps]  # transfers to go, by server
        self._skip(np.arange(servers))

    def done(self, ends: Numbers) -> None:
        """A transfer of each of these servers is over."""
        who, count = np.unique(ends, return_counts=True)
        for step in np.unique(self.step[who]):
            at = self.step[who] == step
            self.due[step][who[at]] -= count[at]
        self._skip(who)

    def _skip(self, servers: Numbers) -> None:
        """On to the next step that they have a part in."""
        while len(servers):
            servers = servers[self.step[servers] < len(self.due)]
            over = np.array([self.due[self.step[server]][server] == 0 for server in servers], dtype=bool)
            servers = servers[over] if len(servers) else servers
            self.step[servers] += 1

    def ready(self) -> list[tuple[Step, Numbers]]:
        """What can begin now, of each step; it is held to have begun."""
        found = []
        for number in np.unique(self.step):
            if number < len(self.begun):
                step, begun = self.process.steps[number], self.begun[number]
                at = np.flatnonzero(~begun & (self.step[step.sender] == number) & (self.step[step.receiver] == number))
                if len(at):
                    begun[at] = True
                    found.append((step, at))
        return found


def _due(step: Step, servers: int) -> Numbers:
    return np.bincount(step.sender, minlength=servers) + np.bincount(step.receiver, minlength=servers)


@dataclass
class _FlowRun:
    net: Topology
    schedule: Schedule
    rate: float
    latency: float
    element: int
    now: float = 0.0
    flowing: list[_FlowBatch] = field(default_factory=list)
    waiting: list[tuple[float, int, _FlowBatch]] = field(default_factory=list)  # heap, by when they flow
    lots: int = 0

    def __post_init__(self) -> None:
        self._progress = [_FlowProgress(process, self.schedule.servers) for process in self.schedule.processes]
        self._ways: dict[tuple[int, int, int], tuple[list[int], int]] = {}

    def run(self) -> float:
        for number in range(len(self._progress)):
            self._begin(number)
        while self.flowing or self.waiting:
            self._flow()
        return self.now

    def _begin(self, number: int) -> None:
        for step, at in self._progress[number].ready():
            turn = self.schedule.processes[number].turn
            sender, receiver = step.sender[at], step.receiver[at]
            ways = [self._way(a, b, turn) for a, b in zip(sender.tolist(), receiver.tolist(), strict=True)]
            routes = [links for links, _ in ways]
            size = step.elements[at].astype(float) * self.element
            hops = np.array([len(route) for route in routes])
            links = np.concatenate([np.array(route) for route in routes])
            owner = np.repeat(np.arange(len(at)), hops)
            passed = np.array([count for _, count in ways]) if self.latency else np.zeros(len(ways))
            for count in np.unique(passed):  # the near are there before the far
                lot = _lot(number, sender, receiver, size, links, owner, passed == count)
                self.lots += 1
                heapq.heappush(self.waiting, (self.now + self.latency * float(count), self.lots, lot))

    def _way(self, a: int, b: int, turn: int) -> tuple[list[int], int]:
        """The links between two servers, and how often it is from one server to another, each time with the latency."""
        if (a, b, turn) not in self._ways:
            self._ways[a, b, turn] = self.net.route(a, b, turn), self.net.passed(a, b, turn)
        return self._ways[a, b, turn]

    def _flow(self) -> None:
        """Until the next transfer ends, or begins to flow."""
        while self.waiting and self.waiting[0][0] <= self.now:
            self.flowing.append(heapq.heappop(self.waiting)[2])
        if not self.flowing:
            self.now = self.waiting[0][0]
            return
        base = np.cumsum([0, *(len(lot.left) for lot in self.flowing)])
        links = np.concatenate([lot.links for lot in self.flowing])
        owner = np.concatenate([lot.owner + first for lot, first in zip(self.flowing, base[:-1], strict=True)])
        left = np.concatenate([lot.left for lot in self.flowing])
        rates = max_min(links, owner, len(left), np.full(len(self.net.links), self.rate))
        seconds = float((left / rates).min())
        if self.waiting:
            seconds = min(seconds, self.waiting[0][0] - self.now)
        self.now += seconds
        for lot, first, last in zip(self.flowing, base[:-1], base[1:], strict=True):
            lot.left -= rates[first:last] * seconds
        self._end()

    def _end(self) -> None:
        """Take out what has ended, and begin what waited for it."""
        touched = set()
        for lot in self.flowing:
            over = lot.left <= NEAR * lot.size
            if over.any():
                self._progress[lot.process].done(np.concatenate([lot.sender[over], lot.receiver[over]]))
                touched.add(lot.process)
        self.flowing = [rest for lot in self.flowing if (rest := _rest(lot)) is not None]
        for number in sorted(touched):
            self._begin(number)


def _lot(
    process: int,
    sender: Numbers,
    receiver: Numbers,
    size: Reals,
    links: Numbers,
    owner: Numbers,
    chosen: npt.NDArray[np.bool_],
) -> _FlowBatch:
    """Some of these transfers."""
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


def _rest(lot: _FlowBatch) -> _FlowBatch | None:
    going = lot.left > NEAR * lot.size
    if going.all():
        return lot
    if not going.any():
        return None
    rest = _lot(lot.process, lot.sender, lot.receiver, lot.size, lot.links, lot.owner, going)
    rest.left = lot.left[going]
    return rest


def max_min(links: Numbers, owner: Numbers, flows: int, capacity: Reals) -> Reals:
    """The rate of each flow, if none can have more without another having less that has no more than it.

    links and owner: which flow uses which link, pair by pair.
    """
    rates = np.zeros(flows)
    free = np.ones(flows, dtype=bool)
    room = capacity.astype(float).copy()
    while free.any():
        using = free[owner]
        count = np.bincount(links[using], minlength=len(room))
        share = np.where(count > 0, room / np.maximum(count, 1), np.inf)
        least = share.min()
        full = share <= least * (1 + SAME)
        stopped = np.zeros(flows, dtype=bool)
        stopped[owner[using & full[links]]] = True
        rates[stopped] = least
        free &= ~stopped
        room -= np.bincount(links[stopped[owner]], minlength=len(room)) * least
        room = np.maximum(room, 0.0)
    return rates
