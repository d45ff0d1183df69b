"""A flow-level network: every transfer is a flow, and flows share the links max-min fairly.

`Star`: workers and separate servers on a switch. A model's bytes are spread evenly over the servers, so a worker's
transfer to all of them is one flow, limited by the worker's link and by its fair share of all the servers' links
together. `Mesh`: a server beside every worker (`--colocate`); a transfer then leaves by one worker's link and arrives
over all the others'. `Rounds`: the same servers, but visited one after the other by workers who take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from paceline.simulate.clock import Clock

Direction: TypeAlias = Literal["in", "out"]  # as the servers see it: pushes come in, pulls go out
DIRECTIONS: tuple[Direction, Direction] = ("in", "out")
UseSink: TypeAlias = Callable[[Direction, float], None]

NEAR = 1e-3  # bytes: nearer than this to its end, a flow has ended
TICK = 1e-15  # of the time on the clock: what is nearer in time than this cannot be told apart


class Flow:
    """One transfer under way."""

    __slots__ = ("argument", "done", "finish", "flowing", "lane")

    def __init__(self, lane: Any, done: Callable[[Any], None], argument: Any, finish: float) -> None:
        self.lane = lane
        self.done = done
        self.argument = argument
        self.finish = finish  # in a Lane: the bytes the lane has carried when this flow ends; in a Mesh: bytes to go
        self.flowing = True

    def land(self) -> None:
        """It has ended: tell so."""
        done, self.done = self.done, _nothing
        done(self.argument)

    @property
    def is_over(self) -> bool:
        """Has it been told that it ended?"""
        return self.done is _nothing

    def forget(self) -> float:
        """It has ended: if nobody has heard of that yet, because others ended at the same instant, nobody will."""
        self.done = _nothing
        return 0.0


def _nothing(_: Any) -> None: ...


class Port(Protocol):
    """One direction of one worker's link."""

    def start(self, size: float, done: Callable[[Any], None], argument: Any) -> Flow:
        """Begin a transfer; at its end `done(argument)` is called."""


class Network(Protocol):
    """What the simulated cluster asks of a network."""

    def occupies(self, size: float, direction: Direction) -> float:
        """Seconds for which a transfer of this size would fill the servers' links, in its direction."""

    def port(self, worker: int, direction: Direction) -> Port:
        """Where a worker's transfers in this direction begin."""

    def stop(self, flow: Flow) -> float:
        """Take a flow away before its end; the bytes it still had to carry."""


class Star:
    """Workers with links of their own around servers whose links they share."""

    def __init__(
        self,
        clock: Clock,
        links: Sequence[float],
        capacity: Mapping[Direction, float],
        use: UseSink | None = None,
    ) -> None:
        self._capacity = capacity
        self._lanes: dict[Direction, list[_Lane]] = {}  # of each worker
        for direction in DIRECTIONS:
            side = _Side(clock, sorted(set(links)), capacity[direction], direction, use)
            self._lanes[direction] = [side.lanes[link] for link in links]

    def occupies(self, size: float, direction: Direction) -> float:
        return size / self._capacity[direction]

    def port(self, worker: int, direction: Direction) -> Port:
        return self._lanes[direction][worker]

    def stop(self, flow: Flow) -> float:
        lane: _Lane = flow.lane
        return lane.side.stop(flow)


class _Lane:
    """Flows in one direction from workers with equal links. They all have the same rate, so one number, the bytes
    carried by each of them so far, tells how far they have all come."""

    __slots__ = ("cap", "carried", "count", "flows", "planned", "rate", "side", "since", "started")

    def __init__(self, side: _Side, cap: float) -> None:
        self.side = side
        self.cap = cap
        self.rate = 0.0  # of each flow
        self.carried = 0.0
        self.since = 0.0  # when `carried` was right
        self.flows: list[tuple[float, int, Flow]] = []  # heap by the end
        self.count = 0
        self.started = 0  # flows, ever
        self.planned = 0.0  # when the next end is looked for; 0: it is not

    def start(self, size: float, done: Callable[[Any], None], argument: Any) -> Flow:
        side = self.side
        now = side.clock.now
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
        if side.only is self and self.planned and self.flows[0][2] is not flow:
            # The common case, made quick: everybody gets a little slower, so the look that is planned is soon enough.
            rate = side.capacity / self.count
            self.rate = rate if rate < self.cap else self.cap
            if side.use:
                side.report()
        else:
            side.share(self)
        return flow

    def advance(self, now: float) -> None:
        self.carried += self.rate * (now - self.since)
        self.since = now


class _Side:
    """One direction of all the servers' links."""

    SOON = 1e-9  # seconds: a look that is this late is not late

    def __init__(
        self, clock: Clock, caps: Sequence[float], capacity: float, direction: Direction, use: UseSink | None
    ) -> None:
        self.clock = clock
        self.capacity = capacity
        self.direction: Direction = direction
        self.use = use
        self.lanes = {cap: _Lane(self, cap) for cap in caps}  # from the slowest link up
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
        """Max-min fair rates: lanes with slow links get all they can use, the others share the rest equally."""
        if changed is self.only:
            count = changed.count
            if count:
                share = self.capacity / count
                changed.rate = share if share < changed.cap else changed.cap
                self._plan(changed)
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
                    self._plan(lane)
                elif lane is changed:
                    self._plan(lane)
        if self.use:
            self.report()

    def report(self) -> None:
        """Tell how full the links are."""
        if self.use:
            used = sum(lane.count * lane.rate for lane in self.lanes.values())
            self.use(self.direction, min(1.0, used / self.capacity))

    def _plan(self, lane: _Lane) -> None:
        """See to it that somebody looks when the next flow ends. Looking too early does no harm."""
        flows = lane.flows
        while not flows[0][2].flowing:
            heappop(flows)
        ends = lane.since + (flows[0][0] - lane.carried) / lane.rate
        if not lane.planned or ends < lane.planned - self.SOON:
            lane.planned = ends
            self.clock.at(ends, self._look, (lane, ends))

    def _look(self, planned: tuple[_Lane, float]) -> None:
        lane, time = planned
        if lane.planned != time:
            return  # an earlier look was planned since
        lane.planned = 0.0
        if not lane.count:
            return
        now = self.clock.now
        lane.carried = carried = lane.carried + lane.rate * (now - lane.since)
        lane.since = now
        reached = carried + NEAR + carried * 1e-12 + lane.rate * now * TICK
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
            self._plan(lane)
            return
        flow.flowing = False
        lane.count -= 1
        self.share(lane)
        flow.land()

    def _end_together(self, lane: _Lane, first: Flow, second: Flow, reached: float) -> None:
        """Several flows end at once: all are gone before anybody hears of it."""
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


class Mesh:
    """A server beside every worker. Each holds 1/N of the model; what a worker has beside it does not travel.

    A push leaves over the worker's own link and arrives, spread evenly, over all the others'; a pull the other way
    round. So each worker's link carries its own transfers and its share of everybody else's.
    """

    def __init__(self, clock: Clock, links: Sequence[float], use: UseSink | None = None) -> None:
        self._clock = clock
        self._links = links
        self._use = use
        self._flows: dict[Flow, tuple[int, Direction]] = {}
        self._rates: dict[Flow, float] = {}
        self._since = 0.0
        self._plan = 0
        self._travels = (len(links) - 1) / len(links)  # the part of a model that is not beside the worker

    def occupies(self, size: float, direction: Direction) -> float:
        return size * self._travels / (sum(self._links) / 2)  # half of every link is for the others' transfers

    def port(self, worker: int, direction: Direction) -> Port:
        return _MeshPort(self, worker, direction)

    def start(self, worker: int, direction: Direction, size: float, done: Callable[[Any], None], argument: Any) -> Flow:
        self._advance()
        flow = Flow(self, done, argument, size * self._travels)
        self._flows[flow] = (worker, direction)
        self._share()
        return flow

    def stop(self, flow: Flow) -> float:
        if not flow.flowing:
            return flow.forget()
        self._advance()
        self._end(flow)
        self._share()
        return flow.finish / self._travels if self._travels else 0.0

    def _end(self, flow: Flow) -> None:
        flow.flowing = False
        del self._flows[flow]
        self._rates.pop(flow, None)

    def _advance(self) -> None:
        passed = self._clock.now - self._since
        self._since = self._clock.now
        if passed > 0:
            for flow, rate in self._rates.items():
                flow.finish -= rate * passed

    def _share(self) -> None:
        """Let all rates grow alike; whoever meets a full link stops growing."""
        links = self._links
        others = max(len(links) - 1, 1)
        growing = dict(self._flows)
        rate = 0.0
        sends = list(links)  # what is left of each worker's link, outwards and inwards
        receives = list(links)
        while growing:
            pushes = {worker for worker, direction in growing.values() if direction == "in"}
            pulls = {worker for worker, direction in growing.values() if direction == "out"}
            send_load = [(m in pushes) + (len(pulls) - (m in pulls)) / others for m in range(len(links))]
            receive_load = [(m in pulls) + (len(pushes) - (m in pushes)) / others for m in range(len(links))]
            step = min(
                left / load
                for lefts, loads in ((sends, send_load), (receives, receive_load))
                for left, load in zip(lefts, loads, strict=True)
                if load > 0
            )
            rate += step
            sends = [left - step * load for left, load in zip(sends, send_load, strict=True)]
            receives = [left - step * load for left, load in zip(receives, receive_load, strict=True)]
            full_send = {m for m, left in enumerate(sends) if left <= 1e-9 * links[m]}
            full_receive = {m for m, left in enumerate(receives) if left <= 1e-9 * links[m]}
            for flow, (worker, direction) in list(growing.items()):
                own, far = (full_send, full_receive) if direction == "in" else (full_receive, full_send)
                if worker in own or far - {worker}:
                    self._rates[flow] = rate
                    del growing[flow]
        self._plan += 1
        if self._rates:
            soonest = min(max(0.0, flow.finish) / rate for flow, rate in self._rates.items())
            self._clock.at(self._clock.now + soonest, self._look, self._plan)
        if self._use:
            for direction in DIRECTIONS:
                total = sum(self._rates[flow] for flow, (_, way) in self._flows.items() if way == direction)
                self._use(direction, min(1.0, total / sum(links)))

    def _look(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        tick = self._clock.now * TICK
        ended = [flow for flow in self._flows if flow.finish <= NEAR + self._rates[flow] * tick]
        for flow in ended:
            self._end(flow)
        self._share()
        for flow in ended:
            flow.land()


class Rounds:
    """A server beside every worker, visited one after the other, each worker beginning with the one after its own.

    Workers that take turns, and whose slices come straight back, then keep clear of one another: at any moment each is
    with a server of its own, so a transfer runs as fast as the two links it has just then, whoever else is under way.
    What holds for all links over a whole round is seen to by a gate that lets one begin after the other, `occupies`
    apart: each link carries what its worker sends and as much for the others, and while a worker is with the server
    beside it, its place on the links stays empty.
    """

    def __init__(self, clock: Clock, links: Sequence[float], use: UseSink | None = None) -> None:
        self._clock = clock
        self._use = use
        self._total = sum(links)
        self._slowest = min(links)
        self._count = len(links)
        self._travels = (len(links) - 1) / len(links)
        self._rates = [_visiting(worker, links) for worker in range(len(links))]
        self._ends: dict[Flow, tuple[float, int, Direction]] = {}

    def occupies(self, size: float, direction: Direction) -> float:
        return 2 * size / (self._count * self._slowest) if self._count > 1 else 0.0

    def port(self, worker: int, direction: Direction) -> Port:
        return _MeshPort(self, worker, direction)

    def start(self, worker: int, direction: Direction, size: float, done: Callable[[Any], None], argument: Any) -> Flow:
        flow = Flow(self, done, argument, size)
        ends = self._clock.now + size * self._travels / self._rates[worker]
        self._ends[flow] = ends, worker, direction
        self._clock.at(ends, self._end, flow)
        self._report()
        return flow

    def stop(self, flow: Flow) -> float:
        if not flow.flowing:
            return flow.forget()
        flow.flowing = False
        ends, worker, _ = self._ends.pop(flow)
        self._report()
        return (ends - self._clock.now) * self._rates[worker] / self._travels if self._travels else 0.0

    def _end(self, flow: Flow) -> None:
        if flow.flowing:
            flow.flowing = False
            del self._ends[flow]
            self._report()
            flow.land()

    def _report(self) -> None:
        if self._use:
            for direction in DIRECTIONS:
                used = sum(self._rates[worker] for _, worker, way in self._ends.values() if way == direction)
                self._use(direction, min(1.0, used / self._total))


def _visiting(worker: int, links: Sequence[float]) -> float:
    """The rate of a worker that visits all the others, one after the other."""
    pairs = [min(links[worker], link) for other, link in enumerate(links) if other != worker]
    return len(pairs) / sum(1 / pair for pair in pairs) if pairs else links[worker]


class _MeshPort(NamedTuple):
    mesh: Mesh | Rounds
    worker: int
    direction: Direction

    def start(self, size: float, done: Callable[[Any], None], argument: Any) -> Flow:
        return self.mesh.start(self.worker, self.direction, size, done, argument)
