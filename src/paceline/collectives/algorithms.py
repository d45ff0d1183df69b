"""PSS, MS, RS and HiPS (sections 2.2 and 3.2), and rings over all NICs, as schedules.

Each of the first three is two halves: one that brings the sums of a group together, after which a server *owns* a part
of them, and one that brings them to everybody. HiPS does the first half level by level, of what is owned, and then the
second half backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeAlias

import numpy as np

from paceline.collectives.schedule import ANY, Numbers, Schedule, ScheduleProcess, Step, cut, step
from paceline.collectives.topology import Topology


class AlgorithmError(ValueError):
    """There is no such algorithm, or not for this network. The message says what to do."""


@dataclass(frozen=True)
class RankGroups:
    """Every server is in one group of n. A server's place, and who has which place in its group."""

    n: int
    place: Numbers  # [server]
    members: Numbers  # [server, place]
    level: Callable[[Numbers, Numbers], Numbers]  # of sender and receiver


Owned: TypeAlias = tuple[Numbers, Numbers]  # from where to where each server owns
Half: TypeAlias = list[Step]


def _sends(groups: RankGroups, sender: Numbers, to: Numbers, start: Numbers, stop: Numbers) -> list[Numbers]:
    receiver = groups.members[sender, to]
    return [sender, receiver, groups.level(sender, receiver), start, stop]


def ring(groups: RankGroups, owned: Owned, turn: int) -> tuple[Half, Owned, Half]:
    """RS, scatter and gather (algorithm 2): n − 1 steps each, to the next in the ring."""
    n, place = groups.n, groups.place
    everybody = np.arange(len(place))
    right = (place + turn) % n

    def portion(number: Numbers) -> Owned:
        return cut(*owned, n, number % n)

    def of(adds: bool, number: Numbers) -> Step:
        return step(adds, [_sends(groups, everybody, right, *portion(number))])

    scatter = [of(True, place - turn * at) for at in range(1, n)]
    gather = [of(False, place - turn * (at - 1)) for at in range(1, n)]
    return scatter, portion(place), gather


def mesh(groups: RankGroups, owned: Owned, turn: int) -> tuple[Half, Owned, Half]:
    """MS, diffuse and collect: a step each, to all others."""
    n, place = groups.n, groups.place
    everybody = np.arange(len(place))
    mine = cut(*owned, n, place)
    others = [(place + away) % n for away in range(1, n)]  # each begins with another
    diffuse = step(True, [_sends(groups, everybody, other, *cut(*owned, n, other)) for other in others])
    collect = step(False, [_sends(groups, everybody, other, *mine) for other in others])
    return [diffuse], mine, [collect]


def ps(groups: RankGroups, owned: Owned, turn: int) -> tuple[Half, Owned, Half]:
    """PSS, push and pull: all to the first of the group, and back."""
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
    """The name, if there is such a stage."""
    name = ALIASES.get(name, name)
    if name not in STAGES:
        raise AlgorithmError(f"There is no stage {name!r}; there are {', '.join(STAGES)}.{_near(name, STAGES)}")
    return name


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""


def stages_of(net: Topology, stages: Sequence[str]) -> tuple[str, ...]:
    """The algorithm of each stage; a single one is that of all."""
    named = tuple(map(stage_named, stages))
    if len(named) == 1:
        named *= net.levels
    if len(named) != net.levels:
        raise AlgorithmError(
            f"{net.name} has {net.levels} levels, so it takes {net.levels} stages, or one for all, not {len(named)}."
        )
    return named


def hips(net: Topology, elements: int, stages: Sequence[str] = ("ring",)) -> Schedule:
    """HiPS (algorithm 1). With as many processes as there are NICs: each begins at another level, so that in every
    stage each of them has a level's NICs for itself."""
    named = stages_of(net, stages)
    lanes = _lanes(net)
    groups = [by_level(net, level) for level in range(net.levels)]
    processes = []
    for number, turn in enumerate(lanes):
        bounds = elements * number // len(lanes), elements * (number + 1) // len(lanes)
        levels = [(number + stage) % net.levels for stage in range(net.levels)]
        processes.append(_hierarchical([groups[level] for level in levels], named, bounds, turn))
    return Schedule(net.servers, elements, tuple(processes))


def flat(net: Topology, elements: int, algorithm: str) -> Schedule:
    """PSS, MS or RS among all servers. The ring goes from peer to peer, over one NIC at a time. Where rings go both
    ways round, so does this: half of the elements each way (sections 4.1 and 4.2)."""
    name = stage_named(algorithm)
    groups = in_order(net, net.gray(0), peers=name == "ring")
    return _side_by_side(net, elements, name, [(groups, turn) for turn in net.turns])


def rings(net: Topology, elements: int) -> Schedule:
    """RS made as good as it can be: as many rings as there are levels, no two over the same link, where they are known:
    in two levels of equal size, and in three of equal odd size."""
    found = [(in_order(net, order, peers=True), turn) for turn in net.turns for order in disjoint_rings(net)]
    return _side_by_side(net, elements, "ring", found)


def _side_by_side(net: Topology, elements: int, name: str, found: Sequence[tuple[RankGroups, int]]) -> Schedule:
    count = len(found)
    processes = [
        _hierarchical([groups], (name,), (elements * number // count, elements * (number + 1) // count), turn)
        for number, (groups, turn) in enumerate(found)
    ]
    return Schedule(net.servers, elements, tuple(processes))


def _hierarchical(
    groups: Sequence[RankGroups], stages: Sequence[str], bounds: tuple[int, int], turn: int
) -> ScheduleProcess:
    everybody = np.ones(len(groups[0].place), dtype=np.int64)
    owned: Owned = (everybody * bounds[0], everybody * bounds[1])
    down: Half = []
    up: Half = []
    for each, name in zip(groups, stages, strict=True):
        first, owned, second = STAGES[name](each, owned, turn)
        down += first
        up = second + up
    return ScheduleProcess(*bounds, tuple(each for each in down + up if len(each)), turn)


def _lanes(net: Topology) -> list[int]:
    """The turn of each process: one for each NIC, as far as they differ in what they can do."""
    if net.ports < net.levels:  # a server has one NIC, and all levels are behind it
        return [1]
    return [turn for turn in net.turns for _ in range(net.levels)]


def by_level(net: Topology, level: int) -> RankGroups:
    """Those who differ in that digit alone."""
    place = np.array([net.digit(server, level) for server in range(net.servers)])
    members = np.array([net.peers(server, level) for server in range(net.servers)])
    return RankGroups(net.sizes[level], place, members, lambda sender, receiver: np.full_like(sender, level))


def in_order(net: Topology, order: Sequence[int], peers: bool = False) -> RankGroups:
    """All in one group. peers: those who are next to each other are peers at some level."""
    place = np.empty(net.servers, dtype=np.int64)
    place[list(order)] = np.arange(net.servers)
    members = np.broadcast_to(np.array(order), (net.servers, net.servers))
    digits = np.array([[net.digit(server, level) for level in range(net.levels)] for server in range(net.servers)])

    def level(sender: Numbers, receiver: Numbers) -> Numbers:
        differ = digits[sender] != digits[receiver]
        return np.where((differ.sum(axis=1) == 1) & peers, np.argmax(differ, axis=1), ANY)

    return RankGroups(net.servers, place, members, level)


def _check_rings(net: Topology) -> None:
    alike = len(set(net.sizes)) == 1 and net.ports >= net.levels
    if not alike or not (net.levels <= 2 or (net.levels == 3 and net.sizes[0] % 2 == 1)):
        raise AlgorithmError(
            "Edge-disjoint rings are known for two levels of equal size and for three of equal odd size, not for "
            f"{net.name}."
        )


def disjoint_rings(net: Topology) -> list[list[int]]:
    """Rings through all servers, one for each level: no two leave a server by the same level, nor come to it so."""
    _check_rings(net)
    if net.levels <= 2:
        return [net.gray(level) for level in range(net.levels)]
    return [_followed(net, ring) for ring in range(3)]


def _bump(i: int, j: int, k: int, n: int) -> str:
    """Which digit each of three rings changes next, at ⟨i j k⟩: a decomposition of the directed 3-torus of odd size
    into Hamiltonian cycles (D. E. Knuth, "Claude's Cycles", 2026)."""
    total = (i + j + k) % n
    if total == 0:
        return "012" if j == n - 1 else "210"
    if total == n - 1:
        return "120" if i > 0 else "210"
    return "201" if i == n - 1 else "102"


def _followed(net: Topology, ring: int) -> list[int]:
    """One of these rings, from server to server."""
    at, found = 0, []
    for _ in range(net.servers):
        found.append(at)
        i, j, k = net.address(at)
        level = net.levels - 1 - int(_bump(i, j, k, net.sizes[0])[ring])
        at = net.peer(at, level, (net.digit(at, level) + 1) % net.sizes[level])
    return found


ALGORITHMS = ("hips", "ring", "rings", "mesh", "ps")


def algorithm_named(name: str, net: Topology) -> str:
    """The algorithm's own name, if there is such a one on that network."""
    name = ALIASES.get(name, name)
    if name not in ALGORITHMS:
        raise AlgorithmError(
            f"There is no algorithm {name!r}; there are {', '.join(ALGORITHMS)}.{_near(name, ALGORITHMS)}"
        )
    if name == "rings":
        _check_rings(net)
    return name


def make(name: str, net: Topology, elements: int, stages: Sequence[str] = ("ring",)) -> Schedule:
    """A schedule by the name of its algorithm."""
    name = algorithm_named(name, net)
    if name == "hips":
        return hips(net, elements, stages)
    return rings(net, elements) if name == "rings" else flat(net, elements, name)
