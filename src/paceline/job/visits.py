"""Visits: which worker exchanges which part of which shard when, where a shard runs beside each worker.

In a *visit*, a worker pushes a part of its gradient to another machine's shard, and the shard returns that part of the
model. So a visit fills the links of two machines in both directions. If everybody always has something to push, an
iteration is shortest when every link is always in use. So the visits that begin are as many as possible, and among
equally many the oldest pushes come first.

A machine takes part in two visits at a time, each at half the rate of its link. With one at a time, a machine would
always be left over if their number is odd, and a link would be idle between two visits.

Every part of a shard is visited in the order in which the pushes began. So updates are applied to all parts of the
model in the same order, and the staleness of every part is bounded alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

MIN_PARTS, MAX_PARTS = 4, 16  # of a shard; each is visited on its own
#: Visits of all workers in a round, about. Each costs CPU time on two machines and on the coordinator.
MAX_VISITS = 256
#: With more shards there are no visits: workers push to all shards at once.
MAX_SHARDS = 8
AT_ONCE = 2  # visits of one machine


def parts_of(shards: int) -> int:
    """Return the number of parts of each shard, or 0 if there are no visits.

    A part is returned when all of it has arrived, and a link is idle meanwhile. So more parts are faster, as long as
    there is CPU time for them.
    """
    if not 1 < shards <= MAX_SHARDS:
        return 0
    return min(max(MIN_PARTS, MAX_VISITS // shards**2), MAX_PARTS)


class Visit(NamedTuple):
    """A worker exchanges a part of the shard of a machine. The worker's own machine has the worker's number."""

    worker: int
    shard: int
    part: int


@dataclass(eq=False)
class _PushInVisits:
    worker: int
    ready: dict[int, list[int]] = field(default_factory=dict)  # shard → parts that may be visited
    left: int = 0  # parts that were not visited to the end


class Visits:
    """The visits of all workers. The caller says when a push begins, and when a visit ends."""

    def __init__(self, shards: int, parts: int, at_once: int = AT_ONCE) -> None:
        """parts: of each shard. Worker i runs beside shard i; workers with higher numbers have no shard."""
        self.parts, self._shards, self._at_once = parts, shards, at_once
        self._free = dict.fromkeys(range(shards), at_once)  # machine → visits that it can begin
        self._pushes: dict[int, _PushInVisits] = {}  # worker → its push, the oldest first
        # shard, part → the pushes that have not visited it, the oldest first
        self._queues: dict[tuple[int, int], deque[_PushInVisits]] = {
            (shard, part): deque() for shard in range(shards) for part in range(parts)
        }
        self._under_way: set[Visit] = set()

    def begin(self, worker: int) -> list[Visit]:
        """Begin a worker's push after all others. Return the visits that begin now."""
        self._free.setdefault(worker, self._at_once)
        push = self._pushes[worker] = _PushInVisits(worker, left=len(self._queues))
        for place, queue in self._queues.items():
            queue.append(push)
            if queue[0] is push:
                self._admit(place)
        return self._choose()

    def under_way(self, worker: int) -> list[Visit]:
        """Return the visits that a worker has under way."""
        return sorted(visit for visit in self._under_way if visit.worker == worker)

    def end(self, visit: Visit) -> list[Visit]:
        """Note the end of a visit. Return the visits that begin now. A visit that is not under way changes nothing."""
        if visit not in self._under_way:
            return []
        self._under_way.remove(visit)
        self._release(visit)
        self._pass(visit.shard, visit.part)
        return self._choose()

    def is_done(self, worker: int) -> bool:
        """Return whether a worker has no push under way."""
        return worker not in self._pushes

    def drop(self, worker: int) -> list[Visit]:
        """Forget the push of a worker, and the visits that it has under way. Return the visits that begin now."""
        push = self._pushes.pop(worker, None)
        if push is None:
            return []
        for visit in self.under_way(worker):
            self._under_way.remove(visit)
            self._release(visit)
        for place, queue in self._queues.items():
            if push in queue:
                was_first = queue[0] is push
                queue.remove(push)
                if was_first:
                    self._admit(place)
        return self._choose()

    def _release(self, visit: Visit) -> None:
        self._free[visit.worker] += 1
        self._free[visit.shard] += 1

    def _pass(self, shard: int, part: int) -> None:
        """Let the next push in line visit a part."""
        push = self._queues[shard, part].popleft()
        push.left -= 1
        if not push.left:
            del self._pushes[push.worker]
        self._admit((shard, part))

    def _admit(self, place: tuple[int, int]) -> None:
        """Let the first push in line visit a part. The part beside its own worker needs no visit."""
        queue = self._queues[place]
        if not queue:
            return
        shard, part = place
        if queue[0].worker == shard:
            self._pass(shard, part)
        else:
            queue[0].ready.setdefault(shard, []).append(part)

    def _choose(self) -> list[Visit]:
        """Begin as many visits as possible, of the oldest pushes first."""
        possible = list(self._possible())
        chosen = _first_fit(possible, self._free)
        while better := _one_more(chosen, possible, self._free):
            chosen = better
        for visit in chosen:
            self._free[visit.worker] -= 1
            self._free[visit.shard] -= 1
            push = self._pushes[visit.worker]
            push.ready[visit.shard].remove(visit.part)
            if not push.ready[visit.shard]:
                del push.ready[visit.shard]
        self._under_way.update(chosen)
        return chosen

    def _possible(self) -> Iterable[Visit]:
        """Return the visits that could begin now, those of the oldest push first.

        A push prefers machines without a visit, and then machines that do not push themselves.
        """
        free = self._free
        for worker, push in self._pushes.items():
            if free[worker]:
                shards = [
                    (-free[shard], shard in self._pushes, (shard - worker) % self._shards, shard)
                    for shard in push.ready
                    if free[shard]
                ]
                for *_, shard in sorted(shards):
                    for part in push.ready[shard][: min(free[worker], free[shard])]:
                        yield Visit(worker, shard, part)


def _first_fit(possible: Iterable[Visit], free: dict[int, int]) -> list[Visit]:
    left, chosen = free.copy(), []
    for visit in possible:
        if left[visit.worker] and left[visit.shard]:
            left[visit.worker] -= 1
            left[visit.shard] -= 1
            chosen.append(visit)
    return chosen


def _one_more(chosen: list[Visit], possible: list[Visit], free: dict[int, int]) -> list[Visit] | None:
    """Return one visit more than the chosen ones, with two in the place of one of them. None if that cannot be."""
    if len(possible) <= len(chosen):
        return None
    left = free.copy()
    for visit in chosen:
        left[visit.worker] -= 1
        left[visit.shard] -= 1
    others = [visit for visit in possible if visit not in chosen]
    for given_up in reversed(chosen):
        left[given_up.worker] += 1
        left[given_up.shard] += 1
        two = _first_fit(others, left)
        if len(two) < 2:  # the first that fits may be in the way of two others
            for first in others:
                if not {first.worker, first.shard} & {given_up.worker, given_up.shard}:
                    continue
                two = _first_fit([first, *(each for each in others if each is not first)], left)
                if len(two) >= 2:
                    break
        if len(two) >= 2:
            return [*(each for each in chosen if each is not given_up), *two]
        left[given_up.worker] -= 1
        left[given_up.shard] -= 1
    return None
