"""A search for edge-disjoint rings in a torus: a partition of its cables into as many rings as it has dimensions.

Such a partition exists for every torus (Foregger 1978, for three dimensions). At first the cables of each dimension
have a colour, and form many short rings. In a square whose opposite cables have equal colours, the two colours can be
exchanged: each server keeps two cables of each colour. An exchange joins two rings of a colour if two of the square's
cables belong to them. The search makes exchanges that leave fewer rings, until each colour has one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

MAX_ROUNDS = 200


def undirected_rings(sizes: Sequence[int]) -> list[list[int]]:
    """Return one ring for each dimension, or [] if the search fails. All dimensions must have three servers or more.

    The same sizes give the same rings on every machine.
    """
    torus = _ColouredTorus(sizes)
    chance = random.Random(0)
    squares = [(at, a, b) for at in range(torus.servers) for a in range(len(sizes)) for b in range(a)]
    for number in range(MAX_ROUNDS):
        before = torus.rings
        for square in squares:
            torus.exchange(*square, most=-1)
            if torus.rings == len(sizes):
                return [torus.ring(colour) for colour in range(len(sizes))]
        if torus.rings == before:  # no exchange leaves fewer rings: make one that leaves as many
            chance.shuffle(squares)
            for square in squares[: 1 + number]:
                torus.exchange(*square, most=0)
    return []


class _ColouredTorus:
    """A torus with a colour for each cable. Cable (v, l) leads from server v forwards in dimension l."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.servers = math.prod(sizes)
        self._ahead: list[list[int]] = []
        self._behind: list[list[int]] = []
        for level, size in enumerate(sizes):
            weight = math.prod(sizes[:level])
            for table, way in ((self._ahead, 1), (self._behind, -1)):
                digits = (server // weight % size for server in range(self.servers))
                table.append([at + ((digit + way) % size - digit) * weight for at, digit in enumerate(digits)])
        self._colour = [[level] * self.servers for level in range(len(sizes))]
        self._ring_of = [self._label(colour) for colour in range(len(sizes))]

    @property
    def rings(self) -> int:
        return sum(max(labels) + 1 for labels in self._ring_of)

    def exchange(self, at: int, a: int, b: int, most: int) -> None:
        """Exchange the colours of a square, unless that changes the number of rings by more than `most`."""
        across_a, across_b = self._ahead[a][at], self._ahead[b][at]
        first, second = self._colour[a][at], self._colour[b][at]
        if first == second or self._colour[a][across_b] != first or self._colour[b][across_a] != second:
            return
        joins = (self._ring_of[first][at] != self._ring_of[first][across_b]) + (
            self._ring_of[second][at] != self._ring_of[second][across_a]
        )
        if most < 0 and not joins:
            return
        before, labels = self.rings, (self._ring_of[first], self._ring_of[second])
        self._set_square(at, a, b, second, first)
        self._ring_of[first], self._ring_of[second] = self._label(first), self._label(second)
        if self.rings - before > most:
            self._set_square(at, a, b, first, second)
            self._ring_of[first], self._ring_of[second] = labels

    def _set_square(self, at: int, a: int, b: int, of_a: int, of_b: int) -> None:
        self._colour[a][at] = self._colour[a][self._ahead[b][at]] = of_a
        self._colour[b][at] = self._colour[b][self._ahead[a][at]] = of_b

    def _label(self, colour: int) -> list[int]:
        """Return the number of the ring of this colour in which each server is."""
        labels, count = [-1] * self.servers, 0
        for start in range(self.servers):
            if labels[start] < 0:
                for server in self._follow(start, colour):
                    labels[server] = count
                count += 1
        return labels

    def ring(self, colour: int) -> list[int]:
        """Return the ring of this colour through server 0, in order."""
        return self._follow(0, colour)

    def _follow(self, start: int, colour: int) -> list[int]:
        found, before, at = [start], -1, start
        while True:
            onward = next(other for other in self._beside(at, colour) if other != before)
            if onward == start:
                return found
            before, at = at, onward
            found.append(at)

    def _beside(self, at: int, colour: int) -> list[int]:
        """Return the two servers to which cables of this colour lead."""
        found = []
        for level, colours in enumerate(self._colour):
            if colours[at] == colour:
                found.append(self._ahead[level][at])
            if colours[behind := self._behind[level][at]] == colour:
                found.append(behind)
        return found
