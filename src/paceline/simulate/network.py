"""A flow-level network: every transfer is a flow, and flows share the links max-min fairly.

This module has what all networks have in common, and `Star`: workers and separate servers on a switch. Networks with a
server beside each worker are in `colocated_network`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, Literal, Protocol, TypeAlias

from paceline.simulate.clock import Clock

Direction: TypeAlias = Literal["in", "out"]  # as the servers see it: pushes come in, pulls go out
DIRECTIONS: tuple[Direction, Direction] = ("in", "out")
#: Receives the fraction of the links' capacity that is in use in a direction, whenever it changes.
UseSink: TypeAlias = Callable[[Direction, float], None]

NEAR_BYTES = 1e-3  # a flow that is this near to its end has ended
CLOCK_PRECISION = 1e-15  # relative to the time on the clock: times that are nearer to each other are equal


class Flow:
    """A transfer under way."""

    __slots__ = ("argument", "done", "finish", "flowing", "lane")

    def __init__(self, lane: Any, done: Callable[[Any], None], argument: Any, finish: float) -> None:
        self.lane = lane  # the lane or the network that carries it
        self.done = done
        self.argument = argument
        self.finish = (
            finish  # in a lane: the bytes that the lane has carried when this flow ends; in a Mesh: bytes left
        )
        self.flowing = True

    def land(self) -> None:
        """Call the flow's callback, because the flow has ended."""
        done, self.done = self.done, _ignore
        done(self.argument)

    @property
    def is_over(self) -> bool:
        """Whether the flow's callback was called, or never will be."""
        return self.done is _ignore

    def forget(self) -> float:
        """Stop a flow that has ended, and return 0 bytes left.

        If its callback is still due, because several flows ended at the same instant, it is not called.
        """
        self.done = _ignore
        return 0.0


def _ignore(_: Any) -> None: ...


class Port(Protocol):
    """One direction of the link of one worker."""

    def start(self, size: float, done: Callable[[Any], None], argument: Any) -> Flow:
        """Begin a transfer of `size` bytes. At its end, `done(argument)` is called."""


class Network(Protocol):
    """The interface between a simulated cluster and its network."""

    def occupies(self, size: float, direction: Direction) -> float:
        """Return the seconds for which a transfer of this size would fill the servers' links in its direction."""

    def port(self, worker: int, direction: Direction) -> Port:
        """Return the port at which the transfers of a worker in this direction begin."""

    def stop(self, flow: Flow) -> float:
        """Remove a flow before its end. Return the bytes that it still had to carry."""


class Star:
    """Workers with links of their own around servers whose links they share.

    A model is spread evenly over the servers. So a worker's transfer to all of them is one flow, limited by the
    worker's link and by its fair share of all servers' links together.

    Flows share a single constraint here, and workers with equal links have equal rates. So one lane stands for
    thousands of flows, and a flow that starts or ends changes a few numbers. `fair_sharing.max_min` is for flows over
    arbitrary routes, and computes the rates of all flows each time.
    """

    def __init__(
        self,
        clock: Clock,
        links: Sequence[float],
        capacity: Mapping[Direction, float],
        use: UseSink | None = None,
    ) -> None:
        self._capacity = capacity
        self._lanes: dict[Direction, list[_Lane]] = {}  # one for each worker; workers with equal links share it
        for direction in DIRECTIONS:
            servers = _ServerLinks(clock, sorted(set(links)), capacity[direction], direction, use)
            self._lanes[direction] = [servers.lanes[link] for link in links]

    def occupies(self, size: float, direction: Direction) -> float:
        return size / self._capacity[direction]

    def port(self, worker: int, direction: Direction) -> Port:
        return self._lanes[direction][worker]

    def stop(self, flow: Flow) -> float:
        lane: _Lane = flow.lane
        return lane.servers.stop(flow)


class _Lane:
    """The flows in one direction of all workers with equal links.

    They all have the same rate, so one number tells how far each of them is. `carried` counts the bytes of a flow that
    has run since the lane was last empty. A flow ends when `carried` has grown by the flow's size.
    """

    __slots__ = ("cap", "carried", "count", "flows", "planned", "rate", "servers", "since", "started")

    def __init__(self, servers: _ServerLinks, cap: float) -> None:
        self.servers = servers
        self.cap = cap
        self.rate = 0.0  # of each flow
        self.carried = 0.0
        self.since = 0.0  # the time for which `carried` is right
        self.flows: list[tuple[float, int, Flow]] = []  # heap, by the end
        self.count = 0
        self.started = 0  # flows started so far; orders flows that end together
        self.planned = 0.0  # when the next end is looked for; 0: no look is planned

    def start(self, size: float, done: Callable[[Any], None], argument: Any) -> Flow:
        servers = self.servers
        now = servers.clock.now
        if self.count:
            self.carried += self.rate * (now - self.since)
        else:
            self.carried = 0.0
            self.flows.clear()
        self.since = now
        self.started += 1
        self.count += 1
        finish = self.carried + size
        flow = Flow(self, done, argument, finish)
        heappush(self.flows, (finish, self.started, flow))
        if servers.only is self and self.planned and self.flows[0][2] is not flow:
            # A shortcut for the common case: all flows get slower, so the planned look is early enough.
            rate = servers.capacity / self.count
            self.rate = rate if rate < self.cap else self.cap
            if servers.use:
                servers.report()
        else:
            servers.share(self)
        return flow

    def advance(self, now: float) -> None:
        """Bring `carried` up to this time."""
        self.carried += self.rate * (now - self.since)
        self.since = now


class _ServerLinks:
    """The links of all servers together, in one direction."""

    LATE_SECONDS = 1e-9  # a look may be this late

    def __init__(
        self, clock: Clock, caps: Sequence[float], capacity: float, direction: Direction, use: UseSink | None
    ) -> None:
        self.clock = clock
        self.capacity = capacity
        self.direction: Direction = direction
        self.use = use
        self.lanes = {cap: _Lane(self, cap) for cap in caps}  # from the slowest link to the fastest
        self.only = next(iter(self.lanes.values())) if len(self.lanes) == 1 else None

    def stop(self, flow: Flow) -> float:
        if not flow.flowing:
            return flow.forget()
        lane: _Lane = flow.lane
        lane.advance(self.clock.now)
        flow.flowing = False
        lane.count -= 1
        self.share(lane)
        return max(0.0, flow.finish - lane.carried)

    def share(self, changed: _Lane) -> None:
        """Set max-min fair rates: slow links get all that they can use, and the others share the rest equally."""
        if changed is self.only:
            count = changed.count
            if count:
                share = self.capacity / count
                changed.rate = share if share < changed.cap else changed.cap
                self._plan_look(changed)
        else:
            left = self.capacity
            flows = sum(lane.count for lane in self.lanes.values())
            for lane in self.lanes.values():
                if not lane.count:
                    continue
                rate = min(lane.cap, left / flows)
                left -= rate * lane.count
                flows -= lane.count
                if rate != lane.rate:
                    lane.advance(self.clock.now)
                    lane.rate = rate
                    self._plan_look(lane)
                elif lane is changed:
                    self._plan_look(lane)
        if self.use:
            self.report()

    def report(self) -> None:
        """Report how full the links are."""
        if self.use:
            used = sum(lane.count * lane.rate for lane in self.lanes.values())
            self.use(self.direction, min(1.0, used / self.capacity))

    def _plan_look(self, lane: _Lane) -> None:
        """Plan a look at a lane for when its next flow ends. A look that is too early does no harm."""
        flows = lane.flows
        while not flows[0][2].flowing:
            heappop(flows)
        ends = lane.since + (flows[0][0] - lane.carried) / lane.rate
        if not lane.planned or ends < lane.planned - self.LATE_SECONDS:
            lane.planned = ends
            self.clock.at(ends, self._look, (lane, ends))

    def _look(self, planned: tuple[_Lane, float]) -> None:
        """End the flows of a lane that are due."""
        lane, time = planned
        if lane.planned != time:
            return  # an earlier look has replaced this one
        lane.planned = 0.0
        if not lane.count:
            return
        now = self.clock.now
        lane.carried = carried = lane.carried + lane.rate * (now - lane.since)
        lane.since = now
        reached = carried + NEAR_BYTES + carried * 1e-12 + lane.rate * now * CLOCK_PRECISION
        flows = lane.flows
        flow = None
        while flows and flows[0][0] <= reached:
            ended = heappop(flows)[2]
            if ended.flowing:
                if flow is not None:
                    self._end_together(lane, flow, ended, reached)
                    return
                flow = ended
        if flow is None:
            self._plan_look(lane)
            return
        flow.flowing = False
        lane.count -= 1
        self.share(lane)
        flow.land()

    def _end_together(self, lane: _Lane, first: Flow, second: Flow, reached: float) -> None:
        """End several flows at once. All are removed before the first callback is called."""
        ended = [first, second]
        flows = lane.flows
        while flows and flows[0][0] <= reached:
            flow = heappop(flows)[2]
            if flow.flowing:
                ended.append(flow)
        for flow in ended:
            flow.flowing = False
        lane.count -= len(ended)
        self.share(lane)
        for flow in ended:
            flow.land()
