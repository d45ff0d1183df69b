"""How long the processes of HiPS take beside one another, and how much of the elements each of them gets.

The processes begin at different levels. A process sends most at the level where it begins, so the shares decide how
busy each level is. Where all levels have the same size and rate, equal shares keep all links busy all the time, as in
the paper. Where they differ, this module looks for the shares with the least time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import permutations

from paceline.collectives.topology import DCell, Topology, Torus

UNITS = 120  # shares are multiples of one part in 120 for each level
MOVES = (60, 20, 5, 1)  # units that the search moves from one process to another
BETTER = 1 - 1e-9  # a choice is better if it takes less than this fraction of the time


@dataclass(frozen=True)
class HalfStage:
    """Half a stage of a process: its transfers at one level, before it continues at the next level."""

    level: int
    seconds: float  # that the busiest link needs if no other process uses it
    flows: int  # transfers that share this link with those of other processes
    delay: float = 0.0  # seconds of latency, in which nothing is sent


def phases(
    net: Topology, stages: Sequence[str], first: int, size: float, rate: float, latency: float = 0.0
) -> list[HalfStage]:
    """Return the phases of the process that begins at level `first` and adds up `size` bytes."""
    rates = net.level_rates(rate)
    work, found = size / len(net.directions), []  # work: the bytes that a server takes into a stage
    for stage, name in enumerate(stages):
        level = (first + stage) % net.levels
        n = net.sizes[level]
        load, flows = _load(net, name, n)
        found.append(HalfStage(level, load * work / rates[level], flows, _steps(net, name, n) * latency))
        work /= 1 if name == "ps" else n
    return found + found[::-1]


def _load(net: Topology, name: str, n: int) -> tuple[float, int]:
    """Return how much of a server's bytes crosses the busiest link in half a stage, and in how many transfers at once.

    In a torus both count the processes of both directions.
    """
    if name == "ring":
        return (n - 1) / n, 1
    if name == "ps":
        return float(n - 1), n - 1
    if isinstance(net, Torus):  # servers that are not neighbours are reached through others
        return n * n // 4 / n, n * n // 4
    return (n - 1) / n, n - 1


def _steps(net: Topology, name: str, n: int) -> int:
    """Return how many messages a server waits for, one after the other, in half a stage."""
    if name == "ring":
        return n - 1
    return n // 2 if isinstance(net, Torus) else 1  # the distance to the farthest server


def duration(processes: Sequence[Sequence[HalfStage]]) -> float:
    """Return the seconds until all processes have ended. Transfers share the links of a level equally.

    The arithmetic is plain, so all machines get the same result.
    """
    now = 0.0
    at = [0] * len(processes)
    left = [each[0].seconds if each else 0.0 for each in processes]
    delay = [each[0].delay if each else 0.0 for each in processes]
    while going := [number for number, each in enumerate(processes) if at[number] < len(each)]:
        flows: dict[int, int] = {}
        for number in going:
            if not delay[number]:
                phase = processes[number][at[number]]
                flows[phase.level] = flows.get(phase.level, 0) + phase.flows
        speed = {}
        for number in going:
            phase = processes[number][at[number]]
            speed[number] = 0.0 if delay[number] else phase.flows / flows[phase.level]
        ends = {number: delay[number] or left[number] / speed[number] for number in going}
        step = min(ends.values())
        now += step
        for number in going:
            over = ends[number] <= step * (1 + 1e-12)
            if delay[number]:
                delay[number] = 0.0 if over else delay[number] - step
            elif not over:
                left[number] -= step * speed[number]
            else:
                at[number] += 1
                if at[number] < len(processes[number]):
                    phase = processes[number][at[number]]
                    left[number], delay[number] = phase.seconds, phase.delay
    return now


def hips_seconds(net: Topology, stages: Sequence[str], size: float, rate: float, latency: float = 0.0) -> float:
    """Return the seconds that HiPS takes, with the shares of `shares`."""
    parts = [(level, float(share)) for level, share in enumerate(shares(net, stages)) if share]
    return duration([phases(net, stages, level, share * size, rate, latency) for level, share in parts])


def shares(net: Topology, stages: Sequence[str]) -> tuple[Fraction, ...]:
    """Return the share of the elements of each process; process p begins at level p.

    All ranks compute these, and get the same shares.
    """
    if not net.rates and (isinstance(net, DCell) or len(set(net.sizes)) == 1):  # in a DCell, peers share cables
        return (Fraction(1, net.levels),) * net.levels
    return _best_shares(_Shape(net), tuple(stages))


class _Shape:
    """A network as a key of a cache: networks of the same kind, sizes and rates are equal."""

    def __init__(self, net: Topology) -> None:
        self.net, self._key = net, (type(net), net.sizes, net.rates)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shape) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@cache
def _best_shares(shape: _Shape, stages: tuple[str, ...]) -> tuple[Fraction, ...]:
    """Return the best shares that are found by moving parts from one process to another."""
    net = shape.net
    whole = [phases(net, stages, level, 1.0, 1.0) for level in range(net.levels)]
    total = UNITS * net.levels

    def seconds(units: Sequence[int]) -> float:
        parts = [(each, count / total) for each, count in zip(whole, units, strict=True) if count]
        scaled = [[HalfStage(one.level, one.seconds * part, one.flows) for one in each] for each, part in parts]
        return duration(scaled)

    starts = [[UNITS] * net.levels]
    starts += [[total * (level == only) for level in range(net.levels)] for only in range(net.levels)]
    best, least = starts[0], seconds(starts[0])
    for start in starts:
        units, found = _descend(start, seconds)
        if found < least * BETTER:
            best, least = units, found
    return tuple(Fraction(count, total) for count in best)


def _descend(units: list[int], seconds: Callable[[Sequence[int]], float]) -> tuple[list[int], float]:
    """Move units from one process to another as long as that takes less time. Return the units and the time."""
    least = seconds(units)
    for move in MOVES:
        better = True
        while better:
            better = False
            for giver, taker in permutations(range(len(units)), 2):
                if units[giver] >= move:
                    moved = [count + move * ((at == taker) - (at == giver)) for at, count in enumerate(units)]
                    if (found := seconds(moved)) < least * BETTER:
                        units, least, better = moved, found, True
    return units, least
