"""Networks with a server beside each worker (`--colocate`). Each server holds 1/N of the model.

A worker's transfer uses its own link and the links of all the others. The slice beside the worker does not travel.
Where a few workers take turns and updates are streamed, `visited_network` is used instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from paceline.simulate.clock import Clock
from paceline.simulate.network import CLOCK_PRECISION, DIRECTIONS, NEAR_BYTES, Direction, Flow, Port, UseSink


class Mesh:
    """All workers exchange slices with all servers at the same time.

    A push leaves over the worker's own link and arrives, spread evenly, over all the others. A pull goes the other way
    round. So each link carries the transfers of its own worker and a share of the transfers of all the others.
    """

    def __init__(self, clock: Clock, links: Sequence[float], use: UseSink | None = None) -> None:
        self._clock = clock
        self._links = links
        self._use = use
        self._flows: dict[Flow, tuple[int, Direction]] = {}
        self._rates: dict[Flow, float] = {}
        self._since = 0.0  # the time for which the flows' bytes left are right
        self._plan = 0  # number of the newest planned look
        self._travels = (len(links) - 1) / len(links)  # the fraction of a model that is not beside the worker

    def occupies(self, size: float, direction: Direction) -> float:
        return size * self._travels / (sum(self._links) / 2)  # half of every link is for the transfers of the others

    def port(self, worker: int, direction: Direction) -> Port:
        return ColocatedPort(self, worker, direction)

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
        self._remove(flow)
        self._share()
        return flow.finish / self._travels if self._travels else 0.0

    def _remove(self, flow: Flow) -> None:
        flow.flowing = False
        del self._flows[flow]
        self._rates.pop(flow, None)

    def _advance(self) -> None:
        """Bring the bytes left of all flows up to the present."""
        passed = self._clock.now - self._since
        self._since = self._clock.now
        if passed > 0:
            for flow, rate in self._rates.items():
                flow.finish -= rate * passed

    def _share(self) -> None:
        """Compute all rates anew, and plan a look for when the next flow ends."""
        self._fill_links()
        self._plan += 1
        if self._rates:
            soonest = min(max(0.0, flow.finish) / rate for flow, rate in self._rates.items())
            self._clock.at(self._clock.now + soonest, self._look, self._plan)
        if self._use:
            for direction in DIRECTIONS:
                total = sum(self._rates[flow] for flow, (_, way) in self._flows.items() if way == direction)
                self._use(direction, min(1.0, total / sum(self._links)))

    def _fill_links(self) -> None:
        """Set max-min fair rates: let all rates grow alike, and stop those of flows that reach a full link.

        Every flow uses every link: its worker's at its whole rate, the others at 1/(N−1) of it. So the load of a link
        follows from how many workers push and pull. `fair_sharing.max_min` would need an entry for each flow and link.
        """
        links = self._links
        others = max(len(links) - 1, 1)
        growing = dict(self._flows)
        rate = 0.0
        sends = list(links)  # the capacity that is left on each worker's link, outwards and inwards
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

    def _look(self, plan: int) -> None:
        """End the flows that are due, unless the rates have changed since this look was planned."""
        if plan != self._plan:
            return
        self._advance()
        precision = self._clock.now * CLOCK_PRECISION
        ended = [flow for flow in self._flows if flow.finish <= NEAR_BYTES + self._rates[flow] * precision]
        for flow in ended:
            self._remove(flow)
        self._share()
        for flow in ended:
            flow.land()


class Rounds:
    """Workers push to the servers one after the other, each beginning with the server after its own.

    This is for workers that take turns and whose slices return at once. They stay clear of one another: at any moment
    each worker is at a different server. So a transfer runs as fast as the two links that it is using, whatever other
    transfers are under way. A gate keeps the load of all links over a round within their capacity: it lets transfers
    begin `occupies` seconds apart. Each link carries what its worker sends, and as much for the others. While a worker
    is at the server beside it, its place on the links stays empty.
    """

    def __init__(self, clock: Clock, links: Sequence[float], use: UseSink | None = None) -> None:
        self._clock = clock
        self._use = use
        self._total = sum(links)
        self._slowest = min(links)
        self._count = len(links)
        self._travels = (len(links) - 1) / len(links)  # the fraction of a model that is not beside the worker
        self._rates = [_mean_visit_rate(worker, links) for worker in range(len(links))]
        self._ends: dict[Flow, tuple[float, int, Direction]] = {}

    def occupies(self, size: float, direction: Direction) -> float:
        return 2 * size / (self._count * self._slowest) if self._count > 1 else 0.0

    def port(self, worker: int, direction: Direction) -> Port:
        return ColocatedPort(self, worker, direction)

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


def _mean_visit_rate(worker: int, links: Sequence[float]) -> float:
    """Return the mean rate of a worker that exchanges equal slices with all the others, one after the other."""
    pairs = [min(links[worker], link) for other, link in enumerate(links) if other != worker]
    return len(pairs) / sum(1 / pair for pair in pairs) if pairs else links[worker]


class ColocatedNetwork(Protocol):
    """A network in which each worker begins its transfers at its own machine."""

    def start(
        self, worker: int, direction: Direction, size: float, done: Callable[[Any], None], argument: Any
    ) -> Flow: ...


class ColocatedPort(NamedTuple):
    network: ColocatedNetwork
    worker: int
    direction: Direction

    def start(self, size: float, done: Callable[[Any], None], argument: Any) -> Flow:
        return self.network.start(self.worker, self.direction, size, done, argument)
