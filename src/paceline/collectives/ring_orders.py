"""Orders of servers for rings: one ring through all servers, and several that share no link.

In the order of a ring, each server is one hop from the next: over one switch, or over one cable. So a ring all-reduce
never sends data through a third server, and each link that it uses carries the data of one server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

from paceline.collectives.ring_search import undirected_rings
from paceline.collectives.topology import DCell, FatTree, Topology, Torus

MAX_SEARCHED = 600  # servers

Ring = list[int]


def ring_order(net: Topology) -> Ring:
    """Return all servers in the order of a ring."""
    if isinstance(net, FatTree):
        return list(range(net.servers))  # each rack, and each pod, is entered and left once
    if isinstance(net, DCell):
        return list(_dcell_ring(net.sizes) or range(net.servers))
    ring: Ring = [0]
    for level, size in enumerate(net.sizes):
        weight = math.prod(net.sizes[:level])
        ring = _product_ring(ring, [digit * weight for digit in range(size)])
    return ring


def _product_ring(low: Ring, high: Ring) -> Ring:
    """Return a ring through all sums of a number from each of two rings. Neighbours differ in one of the two numbers.

    One of the rings is run through once for each number of the other. If it is run forwards, it ends one place before
    its start, and the next run begins there. If it is run backwards, it ends one place after. The number of backward
    runs is such that the last run ends where the first one began.
    """
    if len(low) == 1 or len(high) == 1:
        return [a + b for b in high for a in low]
    found = []
    for row, column in ((low, high), (high, low)):
        n, runs = len(row), len(column)
        found += [(back, row, column) for back in range(runs + 1) if (runs - 2 * back) % n == 0][:1]
    back, row, column = min(found, key=lambda each: each[0])
    ring, at = [], 0
    for number, other in enumerate(column):
        way = -1 if number < back else 1
        ring += [other + row[(at + way * place) % len(row)] for place in range(len(row))]
        at -= way
    return ring


# DCell


@cache
def _dcell_ring(sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return a ring through a DCell: through all cells of the level below, and through all servers in each of them."""
    if len(sizes) == 1:
        return tuple(range(sizes[0]))
    cells = sizes[-1]
    for order in _cell_orders(sizes, [0], _gate(0, cells - 1), cells - 1, _gate(cells - 1, 0)):
        return _through_cells(sizes, order, _gate(0, cells - 1), _gate(cells - 1, 0))
    return None


@cache
def _dcell_path(sizes: tuple[int, ...], start: int, end: int) -> tuple[int, ...] | None:
    """Return a path from one server of a DCell to another through all of its servers, or None if none is found."""
    if start == end:
        return None
    if len(sizes) == 1:
        return (start, *(server for server in range(sizes[0]) if server not in (start, end)), end)
    inside = math.prod(sizes[:-1])
    (first, start_in), (last, end_in) = divmod(start, inside), divmod(end, inside)
    if first != last:
        for order in _cell_orders(sizes, [first], start_in, last, end_in):
            return _through_cells(sizes, order, start_in, end_in)
        return None
    path = _dcell_path(sizes[:-1], start_in, end_in)
    for at in range(1, len(path) if path else 0):  # leave this path for the other cells between two of its servers
        assert path
        leave, come_back = (_cell_ahead(first, path[place]) for place in (at - 1, at))
        entry, exit_ = _gate(leave, first), _gate(come_back, first)
        if leave == come_back:
            continue
        for order in _cell_orders(sizes, [leave], entry, come_back, exit_, without=first):
            here = [first * inside + server for server in path]
            return (*here[:at], *_through_cells(sizes, order, entry, exit_), *here[at:])
    return None


def _gate(cell: int, other: int) -> int:
    """Return the server in a cell whose cable leads to another cell of the same level."""
    return other - 1 if other > cell else other


def _cell_ahead(cell: int, server: int) -> int:
    """Return the cell to which the cable of a server in this cell leads."""
    return server + 1 if server >= cell else server


def _cell_orders(
    sizes: tuple[int, ...], order: list[int], entry: int, last: int, end: int, without: int | None = None
) -> Iterator[list[int]]:
    """Yield orders of the cells that begin with `order` and end with `last`, in which each cell has a path.

    entry: the server by which the newest cell of the order is entered. end: the server by which the last one is left.
    """
    cell, cells = order[-1], sizes[-1] - (without is not None)
    if cell == last:
        if _dcell_path(sizes[:-1], entry, end):
            yield order
        return
    left = {other for other in range(sizes[-1]) if other not in order and other != without}
    ahead = [last] if len(order) == cells - 1 else _cells_ahead(sizes, cell, entry, left - {last})
    if sizes[0] == 2:  # few paths exist: first try the cell from which the fewest others can be reached
        ahead.sort(key=lambda other: len(_cells_ahead(sizes, other, _gate(other, cell), left - {other})))
    for other in ahead:
        if _dcell_path(sizes[:-1], entry, _gate(cell, other)):
            yield from _cell_orders(sizes, [*order, other], _gate(other, cell), last, end, without)


def _cells_ahead(sizes: tuple[int, ...], cell: int, entry: int, left: set[int]) -> list[int]:
    """Return the cells of `left` that can be reached from a cell after a path through it, nearest number first."""
    near = sorted(left, key=lambda other: (other - cell) % sizes[-1])
    return [other for other in near if _dcell_path(sizes[:-1], entry, _gate(cell, other))]


def _through_cells(sizes: tuple[int, ...], order: Sequence[int], start: int, end: int) -> tuple[int, ...]:
    """Return the path through these cells. `start` is a server of the first cell, and `end` one of the last."""
    found: Ring = []
    inside = math.prod(sizes[:-1])
    for place, cell in enumerate(order):
        entry = _gate(cell, order[place - 1]) if place else start
        leave = _gate(cell, order[place + 1]) if place + 1 < len(order) else end
        path = _dcell_path(sizes[:-1], entry, leave)
        assert path
        found += [cell * inside + server for server in path]
    return tuple(found)


# Several rings


def disjoint_rings(net: Topology) -> list[Ring]:
    """Return one ring through all servers for each level, no two of which share a link. Return [] if none are known."""
    if net.ports < net.levels or isinstance(net, DCell):
        return []
    return [list(ring) for ring in _rings(net.sizes, isinstance(net, Torus))]


def why_no_rings(net: Topology) -> str:
    """Return why a network has no edge-disjoint rings, as one sentence."""
    if isinstance(net, Torus) and net.levels == 2 and min(net.sizes) == 2:
        return f"{net.name} has no edge-disjoint rings: both would need every second cable of a ring of odd size."
    return (
        "Edge-disjoint rings are known for two or four levels of equal size, for three of equal odd size, and for a "
        f"torus of at most {MAX_SEARCHED} servers without dimensions of two, not for {net.name}."
    )


@cache
def _rings(sizes: tuple[int, ...], torus: bool) -> tuple[Ring, ...]:
    found = _one_way_rings(sizes)
    if not found and torus and min(sizes) > 2 and math.prod(sizes) <= MAX_SEARCHED:
        found = undirected_rings(sizes)
    return tuple(found)


def _one_way_rings(sizes: tuple[int, ...]) -> list[Ring]:
    """Return rings whose every hop adds one to one digit, or [] if none are known.

    No two of them leave a server by the same level. So they share no link in a BCube either, where a switch connects
    the servers, and in a torus whose dimensions have two servers.
    """
    if len(sizes) == 1:
        return [list(range(sizes[0]))]
    if len(sizes) == 3 and len(set(sizes)) == 1 and sizes[0] % 2:
        return [_knuth_ring(sizes[0], ring) for ring in range(3)]
    if len(sizes) % 2:
        return []
    half = len(sizes) // 2
    low, high = _one_way_rings(sizes[:half]), _one_way_rings(sizes[half:])
    weight = math.prod(sizes[:half])
    return [
        [a[i] + weight * b[j] for i, j in pairs]
        for a, b in zip(low, high, strict=bool(low and high))
        for pairs in _two_rings(len(a), len(b))
    ]


def _two_rings(m: int, n: int) -> list[list[tuple[int, int]]]:
    """Return two rings through all pairs (i, j) with i < m and j < n. One adds to i where the other adds to j.

    A ring adds to i where (i + j) mod d is less than s, d = gcd(m, n). It visits all pairs if s has no divisor in
    common with m, nor d − s with n (Trotter and Erdős, 1978). Return [] if no s serves both rings.
    """
    d = math.gcd(m, n)
    for s in range(1, d):
        if math.gcd(s, m) == math.gcd(d - s, n) == math.gcd(d - s, m) == math.gcd(s, n) == 1:
            break
    else:
        return []
    found = []
    for first in (True, False):
        i = j = 0
        ring = []
        for _ in range(m * n):
            ring.append((i, j))
            if ((i + j) % d < s) == first:
                i = (i + 1) % m
            else:
                j = (j + 1) % n
        found.append(ring)
    return found


def _knuth_ring(n: int, ring: int) -> Ring:
    """Return one of three rings in the directed 3-torus of odd size (D. E. Knuth, "Claude's Cycles", 2026)."""
    at, found = [0, 0, 0], []
    for _ in range(n**3):
        i, j, k = at
        found.append((i * n + j) * n + k)
        total = (i + j + k) % n
        if total == 0:
            rule = "012" if j == n - 1 else "210"
        elif total == n - 1:
            rule = "120" if i > 0 else "210"
        else:
            rule = "201" if i == n - 1 else "102"
        digit = int(rule[ring])
        at[digit] = (at[digit] + 1) % n
    return found
