"""Server-centric networks (HiPS, section 3.1): servers with several NICs that forward data for one another.

A server has an address ⟨a_{h−1} … a_0⟩, with one digit for each level. Servers that differ in digit l alone are peers
at level l. Every link is directed: each way of a cable has the full rate, as in a full-duplex cable.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from difflib import get_close_matches
from functools import cached_property
from itertools import product
from typing import NamedTuple, Self

MAX_SERVERS = 1 << 20


class TopologyError(ValueError):
    """The network does not exist. The message says what to do."""


class Cable(NamedTuple):
    """A cable from a port of a node to a port of another. Nodes from number `servers` on are switches."""

    node: int
    port: int
    other: int
    other_port: int


class Topology(ABC):
    """Servers, numbered from 0, and the cables between them."""

    name: str
    sizes: tuple[int, ...]  # n, the size of a group, at each level; level 0 first
    ports: int  # NICs of each server
    rates: tuple[float, ...] = ()  # bytes per second of the links of each level; empty if all have the same rate
    rings_both_ways: bool = False  # can a server send to both neighbours of a ring at full rate?

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        for size in self.sizes:
            if size < 2:
                raise TopologyError(f"A group must have at least 2 servers; got {size}.")
        if not self.sizes:
            raise TopologyError("A network must have at least one level; got none.")
        self.servers = math.prod(self.sizes)
        if self.servers > MAX_SERVERS:
            raise TopologyError(f"A network can have at most {MAX_SERVERS:,} servers; {self.servers:,} are too many.")
        self._weights = [math.prod(self.sizes[:level]) for level in range(len(self.sizes))]

    @property
    def levels(self) -> int:
        """h, the number of digits of an address."""
        return len(self.sizes)

    @property
    def directions(self) -> tuple[int, ...]:
        """The directions round a ring that are worth using at the same time."""
        return (1, -1) if self.rings_both_ways else (1,)

    def digit(self, server: int, level: int) -> int:
        """Return the digit a_level of a server's address."""
        return server // self._weights[level] % self.sizes[level]

    def address(self, server: int) -> tuple[int, ...]:
        """Return the address ⟨a_{h−1} … a_0⟩ of a server."""
        return tuple(self.digit(server, level) for level in reversed(range(self.levels)))

    def server(self, address: Sequence[int]) -> int:
        """Return the server with this address."""
        return sum(digit * weight for digit, weight in zip(reversed(address), self._weights, strict=True))

    def peer(self, server: int, level: int, digit: int) -> int:
        """Return the peer of a server with this digit at this level. It is the server itself for its own digit."""
        return server + (digit - self.digit(server, level)) * self._weights[level]

    def peers(self, server: int, level: int) -> list[int]:
        """Return the members of a server's group at this level in order, the server included."""
        return [self.peer(server, level, digit) for digit in range(self.sizes[level])]

    def port(self, level: int, direction: int = 1) -> int:
        """Return the NIC by which a server sends to its peers of a level; in a ring, to the next in this direction."""
        return level

    @property
    @abstractmethod
    def cables(self) -> list[Cable]:
        """All cables, each once."""

    @abstractmethod
    def hops(self, a: int, b: int, direction: int = 1) -> list[tuple[int, int]]:
        """Return a shortest route, as pairs of a node and the port by which the route leaves it.

        direction: which way to go round a ring where both are equally short.
        """

    @cached_property
    def links(self) -> dict[tuple[int, int], int]:
        """(node, port) → number of the directed link that leaves by that port."""
        ends = [end for cable in self.cables for end in ((cable.node, cable.port), (cable.other, cable.other_port))]
        return {end: number for number, end in enumerate(ends)}

    @cached_property
    def _ahead(self) -> dict[tuple[int, int], int]:
        """(node, port) → the node at the other end of the cable."""
        ahead = {}
        for node, port, other, other_port in self.cables:
            ahead[node, port] = other
            ahead[other, other_port] = node
        return ahead

    def beyond(self, node: int, port: int) -> int:
        """Return the node at the other end of a port's cable."""
        return self._ahead[node, port]

    def route(self, a: int, b: int, direction: int = 1) -> list[int]:
        """Return the numbers of the links on the route between two servers."""
        links = self.links
        return [links[hop] for hop in self.hops(a, b, direction)]

    def server_hops(self, a: int, b: int, direction: int = 1) -> int:
        """Return how many times the route goes from one server to the next, by cable or over switches."""
        return sum(node < self.servers for node, _ in self.hops(a, b, direction))

    def cable_level(self, cable: Cable) -> int:
        """Return the level to which a cable belongs."""
        return cable.port

    def with_rates(self, rates: Sequence[float]) -> Self:
        """Return this network with a rate of its own, in bytes per second, for the links of each level; level 0 first.

        A single rate is that of all levels.
        """
        each = tuple(rates) * (self.levels if len(rates) == 1 else 1)
        if len(each) != self.levels:
            raise TopologyError(
                f"{self.name} has {self.levels} levels: give {self.levels} rates, or one for all; got {len(rates)}."
            )
        if not all(0 < rate < math.inf for rate in each):
            raise TopologyError(f"The rates of a network must be above 0; got {', '.join(f'{r:g}' for r in each)}.")
        new = copy(self)
        new.rates, new.name = each, f"{self.name} of {'/'.join(f'{8e-9 * r:g}' for r in each)} Gbit/s"
        return new

    def level_rates(self, rate: float) -> tuple[float, ...]:
        """Return the rate of each level. It is `rate` if the network has no rates of its own."""
        return self.rates or (rate,) * self.levels

    def link_rates(self, rate: float) -> list[float]:
        """Return the rate of each directed link, by number. It is `rate` if the network has no rates of its own."""
        rates = self.level_rates(rate)
        return [rates[self.cable_level(cable)] for cable in self.cables for _ in range(2)]


class BCube(Topology):
    """BCube(n, k) of Guo et al. 2009: k + 1 levels. Each server has a NIC at each level, each group has a switch."""

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

    def hops(self, a: int, b: int, direction: int = 1) -> list[tuple[int, int]]:
        found = []
        for level in range(self.levels):
            if (digit := self.digit(b, level)) != self.digit(a, level):
                found += [(a, level), (self._switch(a, level), digit)]
                a = self.peer(a, level, digit)
        return found


class Torus(Topology):
    """Rings in each dimension, without switches. A server has two ports for level l: 2l forwards, 2l + 1 backwards."""

    rings_both_ways = True

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self.name, self.ports = "Torus " + "×".join(map(str, reversed(self.sizes))), 2 * len(self.sizes)

    def port(self, level: int, direction: int = 1) -> int:
        return 2 * level + (direction < 0)

    def cable_level(self, cable: Cable) -> int:
        return cable.port // 2

    def _next(self, server: int, level: int, direction: int) -> int:
        return self.peer(server, level, (self.digit(server, level) + direction) % self.sizes[level])

    @property
    def cables(self) -> list[Cable]:
        return [
            Cable(server, 2 * level, self._next(server, level, 1), 2 * level + 1)
            for level in range(self.levels)
            for server in range(self.servers)
        ]

    def hops(self, a: int, b: int, direction: int = 1) -> list[tuple[int, int]]:
        found = []
        for level, size in enumerate(self.sizes):
            ahead = (self.digit(b, level) - self.digit(a, level)) % size
            way = direction if 2 * ahead == size else 1 if 2 * ahead < size else -1
            for _ in range(min(ahead, size - ahead)):
                found.append((a, 2 * level + (way < 0)))
                a = self._next(a, level, way)
        return found


class DCell(Topology):
    """DCell(n, k) of Guo et al. 2008: n servers on a switch form a cell of level 0.

    A cell of the next level has one more cell of the level below than that has servers. Each two of these are joined by
    one cable between two servers.
    """

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
        """Return the server at the other end of a server's cable of this level, which is 1 or more."""
        inside = self._weights[level]  # servers in a cell of the level below
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

    def hops(self, a: int, b: int, direction: int = 1) -> list[tuple[int, int]]:
        found, ways = [], self._towards(b)
        while a != b:
            found.append((a, ways[a]))
            a = self.beyond(a, ways[a])
        return found

    def _towards(self, target: int) -> dict[int, int]:
        """Return the port by which each node sends data towards a server.

        The search is breadth-first, since the routes of the DCell paper are not always the shortest.
        """
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
        """Node → the nodes that are joined to it, with the ports of theirs that lead to it."""
        beside: dict[int, list[tuple[int, int]]] = {}
        for node, port, other, other_port in self.cables:
            beside.setdefault(node, []).append((other, other_port))
            beside.setdefault(other, []).append((node, port))
        return beside


class FatTree(Topology):
    """The fat tree of Al-Fares et al. 2008, for comparison: k-port switches, and k³/4 servers with one NIC each."""

    def __init__(self, k: int) -> None:
        if k < 4 or k % 2:
            raise TopologyError(f"The switches of a fat tree must have an even number of ports, at least 4; got {k}.")
        self._half = k // 2
        super().__init__([self._half, self._half, k])
        self.name, self.ports = f"fat tree of {k}-port switches", 1

    def port(self, level: int, direction: int = 1) -> int:
        return 0

    def cable_level(self, cable: Cable) -> int:
        return (cable.node >= self.servers) + (cable.node >= self.servers + self._edges)

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

    def hops(self, a: int, b: int, direction: int = 1) -> list[tuple[int, int]]:
        """Return the route up as far as needed, and down again.

        The receiver's address decides the way up, so that transfers to different receivers do not share links there.
        """
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
        raise TopologyError(f"A network must have at least one level; got {levels}.")
    return levels


#: Kinds of networks by name, made from n and the number of levels.
KINDS: dict[str, Callable[[int, int], Topology]] = {
    "bcube": BCube,
    "dcell": DCell,
    "torus": lambda n, levels: Torus([n] * _levels(levels)),
    "fattree": lambda n, levels: FatTree(n),
}


def topology(
    kind: str, n: int = 0, levels: int = 2, sizes: Sequence[int] = (), rates: Sequence[float] = ()
) -> Topology:
    """Return a network by the name of its kind.

    sizes: the dimensions of a torus, if their lengths differ. The size of level 0 comes last.
    rates: the bytes per second of the links of each level, if they differ. That of level 0 comes first.
    """
    net = _topology(kind, n, levels, sizes)
    return net.with_rates(rates) if rates else net


def _topology(kind: str, n: int, levels: int, sizes: Sequence[int]) -> Topology:
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise TopologyError(f"There is no topology {kind!r}; there are {', '.join(KINDS)}.{meant}")
    if sizes:
        if kind != "torus":
            raise TopologyError(f"Only a torus has sizes; give n and levels for a {kind}.")
        return Torus(list(reversed(sizes)))
    if n < 2:
        raise TopologyError(f"n is the number of servers in a group and must be at least 2; got {n}.")
    return KINDS[kind](n, levels)
