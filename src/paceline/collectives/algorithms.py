"""PSS, MS, RS and HiPS (sections 2.2 and 3.2), and rings over all NICs, as schedules.

PSS, MS and RS have two halves. The first half adds up the values of a group, after which each server *owns* a part of
the sums. The second half sends the sums to the whole group. HiPS runs the first halves level by level, each on the part
that a server owns, and then the second halves in reverse order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from paceline.collectives.ring_orders import disjoint_rings, ring_order, why_no_rings
from paceline.collectives.schedule import ANY, Numbers, Schedule, ScheduleProcess, Step, cut, step
from paceline.collectives.shares import shares
from paceline.collectives.topology import Topology


class AlgorithmError(ValueError):
    """The algorithm does not exist, or not for this network. The message says what to do."""


@dataclass(frozen=True)
class RankGroups:
    """A partition of the servers into groups of n. Each server has a place in its group."""

    n: int
    place: Numbers  # [server]
    members: Numbers  # [server, place] → the member of the server's group that has this place
    level: Callable[[Numbers, Numbers], Numbers]  # (sender, receiver) → level of the transfer


Owned: TypeAlias = tuple[Numbers, Numbers]  # the first and the end of the elements that each server owns
Half: TypeAlias = list[Step]


def _sends(groups: RankGroups, sender: Numbers, to: Numbers, start: Numbers, stop: Numbers) -> list[Numbers]:
    receiver = groups.members[sender, to]
    return [sender, receiver, groups.level(sender, receiver), start, stop]


def ring(groups: RankGroups, owned: Owned, direction: int) -> tuple[Half, Owned, Half]:
    """Return RS, scatter and gather (algorithm 2): n − 1 steps each, always to the next server in the ring."""
    n, place = groups.n, groups.place
    servers = np.arange(len(place))
    right = (place + direction) % n

    def portion(number: Numbers) -> Owned:
        return cut(*owned, n, number % n)

    def to_the_right(adds: bool, number: Numbers) -> Step:
        return step(adds, [_sends(groups, servers, right, *portion(number))])

    scatter = [to_the_right(True, place - direction * at) for at in range(1, n)]
    gather = [to_the_right(False, place - direction * (at - 1)) for at in range(1, n)]
    return scatter, portion(place), gather


def mesh(groups: RankGroups, owned: Owned, direction: int) -> tuple[Half, Owned, Half]:
    """Return MS, diffuse and collect: one step each, to all other servers."""
    n, place = groups.n, groups.place
    servers = np.arange(len(place))
    mine = cut(*owned, n, place)
    others = [(place + away) % n for away in range(1, n)]  # each server begins with a different one
    diffuse = step(True, [_sends(groups, servers, other, *cut(*owned, n, other)) for other in others])
    collect = step(False, [_sends(groups, servers, other, *mine) for other in others])
    return [diffuse], mine, [collect]


def ps(groups: RankGroups, owned: Owned, direction: int) -> tuple[Half, Owned, Half]:
    """Return PSS, push and pull: all send to the first server of the group, which sends the sums back."""
    start, stop = owned
    workers = np.flatnonzero(groups.place > 0)
    head = np.zeros_like(workers)
    push = step(True, [_sends(groups, workers, head, start[workers], stop[workers])])
    pull = step(
        False,
        [
            _sends(
                groups, heads := np.flatnonzero(groups.place == 0), np.full_like(heads, at), start[heads], stop[heads]
            )
            for at in range(1, groups.n)
        ],
    )
    return [push], (start, np.where(groups.place == 0, stop, start)), [pull]


STAGES: dict[str, Callable[[RankGroups, Owned, int], tuple[Half, Owned, Half]]] = {"ring": ring, "mesh": mesh, "ps": ps}
ALIASES = {"rs": "ring", "ms": "mesh", "pss": "ps"}


def stage_named(name: str) -> str:
    """Return the full name of a stage. Raise AlgorithmError if there is no such stage."""
    name = ALIASES.get(name, name)
    if name not in STAGES:
        raise AlgorithmError(f"There is no stage {name!r}; there are {', '.join(STAGES)}.{_suggestion(name, STAGES)}")
    return name


def _suggestion(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def stages_of(net: Topology, stages: Sequence[str]) -> tuple[str, ...]:
    """Return the algorithm of each stage. A single name stands for all stages."""
    named = tuple(map(stage_named, stages))
    if len(named) == 1:
        named *= net.levels
    if len(named) != net.levels:
        raise AlgorithmError(
            f"{net.name} has {net.levels} levels: name {net.levels} stages, or one for all levels; got {len(named)}."
        )
    return named


def hips(net: Topology, elements: int, stages: Sequence[str] = ("ring",)) -> Schedule:
    """Return the schedule of HiPS (algorithm 1).

    It has one process for each NIC. Each process begins at a different level, so in every stage it has the NICs of one
    level to itself. The processes have equal shares of the elements if the levels have equal sizes and rates; otherwise
    the module `shares` chooses them.
    """
    named = stages_of(net, stages)
    groups = [by_level(net, level) for level in range(net.levels)]
    processes = []
    for number, direction, bounds in _process_bounds(net, elements, named):
        levels = [(number + stage) % net.levels for stage in range(net.levels)]
        processes.append(_hierarchical([groups[level] for level in levels], named, bounds, direction))
    return Schedule(net.servers, elements, tuple(processes))


def flat(net: Topology, elements: int, algorithm: str) -> Schedule:
    """Return the schedule of PSS, MS or RS among all servers.

    The ring goes from each server to one that is a hop away, over one NIC at a time. On networks whose rings run both
    ways at full rate, half of the elements go each way (sections 4.1 and 4.2).
    """
    name = stage_named(algorithm)
    groups = in_order(net, ring_order(net) if name == "ring" else range(net.servers), peers=name == "ring")
    return _side_by_side(net, elements, name, [(groups, direction) for direction in net.directions])


def rings(net: Topology, elements: int) -> Schedule:
    """Return the schedule of RS over as many rings as there are levels, no two of which share a link.

    Raise AlgorithmError if no such rings are known.
    """
    orders = disjoint_rings(net)
    if not orders:
        raise AlgorithmError(why_no_rings(net))
    found = [(in_order(net, order, peers=True), direction) for direction in net.directions for order in orders]
    return _side_by_side(net, elements, "ring", found)


def _side_by_side(net: Topology, elements: int, name: str, found: Sequence[tuple[RankGroups, int]]) -> Schedule:
    count = len(found)
    processes = [
        _hierarchical([groups], (name,), (elements * number // count, elements * (number + 1) // count), direction)
        for number, (groups, direction) in enumerate(found)
    ]
    return Schedule(net.servers, elements, tuple(processes))


def _hierarchical(
    groups: Sequence[RankGroups], stages: Sequence[str], bounds: tuple[int, int], direction: int
) -> ScheduleProcess:
    ones = np.ones(len(groups[0].place), dtype=np.int64)
    owned: Owned = (ones * bounds[0], ones * bounds[1])
    down: Half = []
    up: Half = []
    for each, name in zip(groups, stages, strict=True):
        first, owned, second = STAGES[name](each, owned, direction)
        down += first
        up = second + up
    return ScheduleProcess(*bounds, tuple(each for each in down + up if len(each)), direction)


def _process_bounds(net: Topology, elements: int, stages: Sequence[str]) -> list[tuple[int, int, tuple[int, int]]]:
    """Return the first level, the direction and the bounds of each process of HiPS.

    There is one process for each NIC, if a server has a NIC for each level.
    """
    if net.ports < net.levels:  # a server reaches all levels over one NIC
        return [(0, 1, (0, elements))]
    parts = [
        (level, direction, share / len(net.directions))
        for direction in net.directions
        for level, share in enumerate(shares(net, stages))
    ]
    ends = [int(elements * end) for end in accumulate((part for _, _, part in parts), initial=Fraction(0))]
    return [(level, way, (ends[at], ends[at + 1])) for at, (level, way, _) in enumerate(parts)]


def by_level(net: Topology, level: int) -> RankGroups:
    """Return the groups of servers that differ in the digit of this level alone."""
    place = np.array([net.digit(server, level) for server in range(net.servers)])
    members = np.array([net.peers(server, level) for server in range(net.servers)])
    return RankGroups(net.sizes[level], place, members, lambda sender, receiver: np.full_like(sender, level))


def in_order(net: Topology, order: Sequence[int], peers: bool = False) -> RankGroups:
    """Return all servers as one group, in this order.

    peers: neighbours in the order are peers at some level, so transfers between them have that level.
    """
    place = np.empty(net.servers, dtype=np.int64)
    place[list(order)] = np.arange(net.servers)
    members = np.broadcast_to(np.array(order), (net.servers, net.servers))
    digits = np.array([[net.digit(server, level) for level in range(net.levels)] for server in range(net.servers)])

    def level(sender: Numbers, receiver: Numbers) -> Numbers:
        differ = digits[sender] != digits[receiver]
        return np.where((differ.sum(axis=1) == 1) & peers, np.argmax(differ, axis=1), ANY)

    return RankGroups(net.servers, place, members, level)


ALGORITHMS = ("hips", "ring", "rings", "mesh", "ps")


def algorithm_named(name: str, net: Topology) -> str:
    """Return the full name of an algorithm. Raise AlgorithmError if this network does not have it."""
    name = ALIASES.get(name, name)
    if name not in ALGORITHMS:
        raise AlgorithmError(
            f"There is no algorithm {name!r}; there are {', '.join(ALGORITHMS)}.{_suggestion(name, ALGORITHMS)}"
        )
    if name == "rings" and not disjoint_rings(net):
        raise AlgorithmError(why_no_rings(net))
    return name


def make(name: str, net: Topology, elements: int, stages: Sequence[str] = ("ring",)) -> Schedule:
    """Return the schedule of an algorithm by its name."""
    name = algorithm_named(name, net)
    if name == "hips":
        return hips(net, elements, stages)
    return rings(net, elements) if name == "rings" else flat(net, elements, name)
