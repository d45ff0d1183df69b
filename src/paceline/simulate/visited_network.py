"""A network with a server beside each worker, for workers that take turns and whose slices return at once.

A push consists of visits (`paceline.job.visits`). In a visit, a part of the gradient and the updated part of the model
cross the links of two machines in opposite directions. Visits at the same machine share its link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.job.visits import Visit, Visits, parts_of
from paceline.simulate.clock import Clock
from paceline.simulate.colocated_network import ColocatedPort
from paceline.simulate.network import CLOCK_PRECISION, DIRECTIONS, NEAR_BYTES, Direction, Flow, Port, UseSink


@dataclass
class _VisitedPush:
    """A push under way, and the return of its slices."""

    flow: Flow
    began: float
    size: float
    parts: int = 0  # that were visited
    ended: float | None = None
    returning: Flow | None = None
    lag: float = 0.0  # seconds by which the return is behind the push


class VisitedNetwork:
    """Links that carry visits. The return of a push ends as much later than the push as it began later."""

    def __init__(self, clock: Clock, links: Sequence[float], use: UseSink | None = None) -> None:
        self._clock, self._links, self._use = clock, links, use
        self._parts = parts_of(len(links))
        self._visits = Visits(len(links), self._parts)
        self._away = (len(links) - 1) * self._parts  # parts of a push that travel
        self._pushes: dict[int, _VisitedPush] = {}  # worker → its newest push
        self._left: dict[Visit, float] = {}  # visit under way → the bytes that are left
        self._rates: dict[Visit, float] = {}
        self._since = 0.0  # the time for which the bytes left are right
        self._plan = 0  # number of the newest planned look
        self._pulls: dict[Flow, tuple[float, int]] = {}  # pull of a whole model → when it ends, and its worker

    def occupies(self, size: float, direction: Direction) -> float:
        return 0.0  # visits take turns by themselves

    def port(self, worker: int, direction: Direction) -> Port:
        return ColocatedPort(self, worker, direction)

    def start(self, worker: int, direction: Direction, size: float, done: Callable[[Any], None], argument: Any) -> Flow:
        flow = Flow(self, done, argument, size)
        push = self._pushes.get(worker)
        if direction == "in":
            self._pushes[worker] = _VisitedPush(flow, self._clock.now, size)
            self._advance()
            self._begin(self._visits.begin(worker))
        elif push and push.returning is None:
            push.returning, push.lag = flow, self._clock.now - push.began
            if push.ended is not None:
                self._clock.at(push.ended + push.lag, self._land, flow)
        else:  # a worker that starts has nothing to get back, and pulls the whole model
            ends = self._clock.now + size * self._away / (len(self._links) * self._parts) / self._links[worker]
            self._pulls[flow] = ends, worker
            self._clock.at(ends, self._land, flow)
        return flow

    def stop(self, flow: Flow) -> float:
        if not flow.flowing:
            return flow.forget()
        flow.flowing = False
        if flow in self._pulls:
            ends, worker = self._pulls.pop(flow)
            return (ends - self._clock.now) * self._links[worker]
        worker = next(worker for worker, push in self._pushes.items() if flow in (push.flow, push.returning))
        push = self._pushes[worker]
        left = push.size * (1 - push.parts / self._away) if self._away else 0.0
        if flow is push.flow:
            self._advance()
            for visit in [each for each in self._left if each.worker == worker]:
                del self._left[visit]
            self._begin(self._visits.drop(worker))
        if not (push.flow.flowing or (push.returning and push.returning.flowing)):
            del self._pushes[worker]
        return left

    def _begin(self, visits: list[Visit]) -> None:
        """Begin visits, end the pushes that have no visit left, and share the links anew."""
        for visit in visits:
            self._left[visit] = self._pushes[visit.worker].size / (len(self._links) * self._parts)
        for worker, push in list(self._pushes.items()):
            if push.flow.flowing and self._visits.is_done(worker):
                push.ended = self._clock.now
                if push.returning and push.returning.flowing:
                    self._clock.at(push.ended + push.lag, self._land, push.returning)
                self._clock.at(self._clock.now, self._land, push.flow)
        self._share()

    def _advance(self) -> None:
        """Bring the bytes left of all visits up to the present."""
        passed = self._clock.now - self._since
        self._since = self._clock.now
        if passed > 0:
            for visit, rate in self._rates.items():
                if visit in self._left:
                    self._left[visit] -= rate * passed

    def _share(self) -> None:
        """Compute all rates anew, and plan a look for when the next visit ends."""
        self._rates = fair_rates(list(self._left), self._links)
        self._plan += 1
        if self._rates:
            soonest = min(max(0.0, self._left[visit]) / rate for visit, rate in self._rates.items())
            self._clock.at(self._clock.now + soonest, self._look, self._plan)
        if self._use:
            used = min(1.0, sum(self._rates.values()) / sum(self._links))
            for direction in DIRECTIONS:
                self._use(direction, used)

    def _look(self, plan: int) -> None:
        """End the visits that are due, unless the rates have changed since this look was planned."""
        if plan != self._plan:
            return
        self._advance()
        precision = self._clock.now * CLOCK_PRECISION
        ended = [visit for visit, left in self._left.items() if left <= NEAR_BYTES + self._rates[visit] * precision]
        begun: list[Visit] = []
        for visit in ended:
            del self._left[visit]
            self._pushes[visit.worker].parts += 1
            begun += self._visits.end(visit)
        self._begin(begun)

    def _land(self, flow: Flow) -> None:
        if flow.flowing:
            flow.flowing = False
            self._pulls.pop(flow, None)
            flow.land()


def fair_rates(visits: Sequence[Visit], links: Sequence[float]) -> dict[Visit, float]:
    """Return max-min fair rates of visits that share the links of their machines."""
    rates: dict[Visit, float] = {}
    room, growing, rate = list(links), set(visits), 0.0
    while growing:
        count = [0] * len(links)
        for visit in growing:
            count[visit.worker] += 1
            count[visit.shard] += 1
        step = min(room[m] / count[m] for m in range(len(links)) if count[m])
        rate += step
        room = [left - step * used for left, used in zip(room, count, strict=True)]
        full = {m for m, left in enumerate(room) if count[m] and left <= 1e-9 * links[m]}
        stopped = [visit for visit in growing if visit.worker in full or visit.shard in full]
        rates.update(dict.fromkeys(stopped, rate))
        growing.difference_update(stopped)
    return rates
