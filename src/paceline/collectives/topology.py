"""Server-centric networks (HiPS, section 3.1): servers with several NICs, who pass on what is not for them.

A server has an address ⟨a_{h−1} … a_0⟩, one digit for each level. Those who differ in digit l alone are its peers at
level l. Every link is directed, and has a rate of its own each way, as a full-duplex cable has.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cached_property
from itertools import product
from typing import NamedTuple

MAX_SERVERS = 1 << 20  # servers


class TopologyError(ValueError):
    """There is no such network. The message says what to do."""


class Cable(NamedTuple):
    """From a port of a node to a port of another. Nodes from `servers` on are switches."""

    node: int
    port: int
    other: int
    other_port: int


class Topology(ABC):
    """Servers, numbered from 0, and how they are joined."""

    name: str
    sizes: tuple[int, ...]  # n of each level, level 0 first
    ports: int  # NICs of a server
    rings_both_ways: bool = False  # can a server send to both its neighbours of a level at full rate?

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        for size in self.sizes:
            if size < 2:
                raise TopologyError(f"A group has at least 2 servers, not {size}.")
        if not self.sizes:
            raise TopologyError("A network has at least one level.")
        self.servers = math.prod(self.sizes)
        if self.servers > MAX_SERVERS:
            raise TopologyError(f"{self.servers:,} servers are too many; at most {MAX_SERVERS:,} are.")
        self._weights = [math.prod(self.sizes[:level]) for level in range(len(self.sizes))]

    @property
    def levels(self) -> int:
        """h."""
        return len(self.sizes)

    @property
    def turns(self) -> tuple[int, ...]:
        """The ways round a ring that are worth going at the same time."""
        return (1, -1) if self.rings_both_ways else (1,)

    def digit(self, server: int, level: int) -> int:
        """a_level."""
        return server // self._weights[level] % self.sizes[level]

    def address(self, server: int) -> tuple[int, ...]:
        """⟨a_{h−1} … a_0⟩."""
        return tuple(self.digit(server, level) for level in reversed(range(self.levels)))

    def server(self, address: Sequence[int]) -> int:
        """Who has that address."""
        return sum(digit * weight for digit, weight in zip(reversed(address), self._weights, strict=True))

    def peer(self, server: int, level: int, digit: int) -> int:
        """The peer with that digit at that level; the server itself has one of them."""
        return server + (digit - self.digit(server, level)) * self._weights[level]

    def peers(self, server: int, level: int) -> list[int]:
        """All with whom it shares a group at that level, itself included, in order."""
        return [self.peer(server, level, digit) for digit in range(self.sizes[level])]

    def port(self, level: int, turn: int = 1) -> int:
        """The NIC with which a server sends to its peers of a level; in a ring, to the next that way round."""
        return level

    @property
    @abstractmethod
    def cables(self) -> list[Cable]:
        """Every cable once."""

    @abstractmethod
    def hops(self, a: int, b: int, turn: int = 1) -> list[tuple[int, int]]:
        """A shortest route: the nodes from which it goes on, and the ports by which. turn: where both ways round are as
        short, that one."""

    @cached_property
    def links(self) -> dict[tuple[int, int], int]:
        """(node, port) → number of the directed link that leaves there."""
        ends = [end for cable in self.cables for end in ((cable.node, cable.port), (cable.other, cable.other_port))]
        return {end: number for number, end in enumerate(ends)}

    @cached_property
    def _ahead(self) -> dict[tuple[int, int], int]:
        """(node, port) → the node at the other end."""
        ahead = {}
        for node, port, other, other_port in self.cables:
            ahead[node, port] = other
            ahead[other, other_port] = node
        return ahead

    def beyond(self, node: int, port: int) -> int:
        """Who is at the other end of that port's cable."""
        return self._ahead[node, port]

    def route(self, a: int, b: int, turn: int = 1) -> list[int]:
        """The numbers of the links between two servers."""
        links = self.links
        return [links[hop] for hop in self.hops(a, b, turn)]

    def passed(self, a: int, b: int, turn: int = 1) -> int:
        """How often it is from one server to another on the way, by cable or over switches."""
        return sum(node < self.servers for node, _ in self.hops(a, b, turn))

    def gray(self, slowest: int) -> list[int]:
        """All servers in such an order that neighbours, also the last and the first, differ in one digit, by one.
        Digits change the more seldom the nearer their level is to the slowest, counted upwards."""
        order = [(slowest - 1 - place) % self.levels for place in range(self.levels)]  # level: quickest first
        found = []
        for counts in product(*(range(self.sizes[level]) for level in reversed(order))):
            digits = [0] * self.levels
            above = 0
            for level, count in zip(reversed(order), counts, strict=True):
                digits[level] = (count - above) % self.sizes[level]
                above = count
            found.append(self.server(digits[::-1]))
        return found


class BCube(Topology):
    """BCube(n, k) of Guo et al. 2009: k + 1 levels; a NIC of each server at each level, a switch for each group."""

    def __init__(self, n: int, levels: int) -> None:
        super().__init__([n] * _levels(levels))
        self.name, self.ports = f"BCube({n}, {levels - 1})", levels

    def _switch(self, server: int, level: int) -> int:
        low, high = server % self._weights[level], server // (self._weights[level] * self.sizes[level])
        groups = self.servers // self.sizes[level]
        return self.servers + level * groups + high * self._weights[level] + low

    @property
    def cables(self) -> list[Cable]:
        levels = range(self.levels)
        return [
            Cable(server, level, self._switch(server, level), self.digit(server, level))
            for level in levels
            for server in range(self.servers)
        ]

    def hops(self, a: int, b: int, turn: int = 1) -> list[tuple[int, int]]:
        found = []
        for level in range(self.levels):
            if (digit := self.digit(b, level)) != self.digit(a, level):
                found += [(a, level), (self._switch(a, level), digit)]
                a = self.peer(a, level, digit)
        return found


class Torus(Topology):
    """Rings in each dimension, and no switches. A server has two ports for each: 2l onwards, 2l + 1 backwards."""

    rings_both_ways = True

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self.name, self.ports = "Torus " + "×".join(map(str, reversed(self.sizes))), 2 * len(self.sizes)

    def port(self, level: int, turn: int = 1) -> int:
        return 2 * level + (turn < 0)

    def _next(self, server: int, level: int, turn: int) -> int:
        return self.peer(server, level, (self.digit(server, level) + turn) % self.sizes[level])

    @property
    def cables(self) -> list[Cable]:
        return [
            Cable(server, 2 * level, self._next(server, level, 1), 2 * level + 1)
            for level in range(self.levels)
            for server in range(self.servers)
        ]

    def hops(self, a: int, b: int, turn: int = 1) -> list[tuple[int, int]]:
        found = []
        for level, size in enumerate(self.sizes):
            ahead = (self.digit(b, level) - self.digit(a, level)) % size
            way = turn if 2 * ahead == size else 1 if 2 * ahead < size else -1
            for _ in range(min(ahead, size - ahead)):
                found.append((a, 2 * level + (way < 0)))
                a = self._next(a, level, way)
        return found


class DCell(Topology):
    """DCell(n, k) of Guo et al. 2008: n servers on a switch; and at each further level as many of what there was as it
    has servers, and one more, each joined to each other by one cable between two servers."""

    def __init__(self, n: int, levels: int) -> None:
        sizes = [n]
        for _ in range(_levels(levels) - 1):
            sizes.append(math.prod(sizes) + 1)
            if math.prod(sizes) > MAX_SERVERS:
                raise TopologyError(
                    f"DCell({n}, {levels - 1}) has more than {MAX_SERVERS:,} servers; take fewer levels."
                )
        super().__init__(sizes)
        self.name, self.ports = f"DCell({n}, {levels - 1})", levels

    def _across(self, server: int, level: int) -> int:
        """Who is at the other end of a server's cable of that level, of 1 or more."""
        inside = self._weights[level]  # servers of a cell of the level below
        base, cell, uid = server - server % (inside * self.sizes[level]), self.digit(server, level), server % inside
        other, its = (uid + 1, cell) if uid >= cell else (uid, cell - 1)
        return base + other * inside + its

    @property
    def cables(self) -> list[Cable]:
        found = [
            Cable(server, 0, self.servers + server // self.sizes[0], server % self.sizes[0]) for server in self._all
        ]
        for level in range(1, self.levels):
            across = ((server, self._across(server, level)) for server in self._all)
            found += [Cable(a, level, b, level) for a, b in across if a < b]
        return found

    @property
    def _all(self) -> range:
        return range(self.servers)

    def hops(self, a: int, b: int, turn: int = 1) -> list[tuple[int, int]]:
        found, ways = [], self._towards(b)
        while a != b:
            found.append((a, ways[a]))
            a = self.beyond(a, ways[a])
        return found

    def _towards(self, target: int) -> dict[int, int]:
        """By which port each node sends what is for that server: breadth-first, since its paper's own routes are not
        always the shortest."""
        if target not in self._ways:
            ways, left = {target: -1}, deque([target])
            while left:
                for other, port in self._beside[left.popleft()]:
                    if other not in ways:
                        ways[other] = port
                        left.append(other)
            self._ways[target] = ways
        return self._ways[target]

    @cached_property
    def _ways(self) -> dict[int, dict[int, int]]:
        return {}

    @cached_property
    def _beside(self) -> dict[int, list[tuple[int, int]]]:
        """Of each node: who is joined to it, and by which of their ports."""
        beside: dict[int, list[tuple[int, int]]] = {}
        for node, port, other, other_port in self.cables:
            beside.setdefault(node, []).append((other, other_port))
            beside.setdefault(other, []).append((node, port))
        return beside


class FatTree(Topology):
    """The fat tree of Al-Fares et al. 2008, for comparison: switches with k ports, k³/4 servers with one NIC each."""

    def __init__(self, k: int) -> None:
        if k < 4 or k % 2:
            raise TopologyError(f"A fat tree's switches have an even number of ports, 4 or more, not {k}.")
        self._half = k // 2
        super().__init__([self._half, self._half, k])
        self.name, self.ports = f"fat tree of {k}-port switches", 1

    def port(self, level: int, turn: int = 1) -> int:
        return 0

    @property
    def _edges(self) -> int:
        return 2 * self._half * self._half

    @property
    def cables(self) -> list[Cable]:
        half, first = self._half, self.servers
        found = [Cable(server, 0, first + server // half, server % half) for server in range(self.servers)]
        for pod, edge, up in product(range(2 * half), range(half), range(half)):
            below, above = first + pod * half + edge, first + self._edges + pod * half + up
            found.append(Cable(below, half + up, above, edge))
        for pod, up, core in product(range(2 * half), range(half), range(half)):
            above, top = first + self._edges + pod * half + up, first + 2 * self._edges + up * half + core
            found.append(Cable(above, half + core, top, pod))
        return found

    def hops(self, a: int, b: int, turn: int = 1) -> list[tuple[int, int]]:
        """Up as far as needed, by what the receiver's address says, so that receivers do not get into each other's
        way; and down."""
        half, first = self._half, self.servers
        if a == b:
            return []
        found = [(a, 0)]
        if a // half != b // half:
            up, core = self.digit(b, 0), self.digit(b, 1)
            found.append((first + a // half, half + up))
            pods = self.digit(a, 2), self.digit(b, 2)
            if pods[0] != pods[1]:
                found.append((first + self._edges + pods[0] * half + up, half + core))
                found.append((first + 2 * self._edges + up * half + core, pods[1]))
            found.append((first + self._edges + pods[1] * half + up, self.digit(b, 1)))
        return [*found, (first + b // half, b % half)]


def _levels(levels: int) -> int:
    if levels < 1:
        raise TopologyError(f"A network has at least one level, not {levels}.")
    return levels


#: By name: of n and the number of levels.
KINDS: dict[str, Callable[[int, int], Topology]] = {
    "bcube": BCube,
    "dcell": DCell,
    "torus": lambda n, levels: Torus([n] * _levels(levels)),
    "fattree": lambda n, levels: FatTree(n),
}


def topology(kind: str, n: int = 0, levels: int = 2, sizes: Sequence[int] = ()) -> Topology:
    """A network by its name. sizes: of a torus with dimensions of different lengths, the first level's last."""
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise TopologyError(f"There is no topology {kind!r}; there are {', '.join(KINDS)}.{meant}")
    if sizes:
        if kind != "torus":
            raise TopologyError(f"Only a torus has sizes; give n and levels of a {kind}.")
        return Torus(list(reversed(sizes)))
    if n < 2:
        raise TopologyError(f"n is the number of servers in a group, at least 2, not {n}.")
    return KINDS[kind](n, levels)
