"""Who sends which elements to whom at which step: a collective, as data.

A schedule has processes that run side by side, each with elements of its own (HiPS, section 3.3: h of them, so that
every NIC works). A process is a sequence of steps. In a step all sends are of what the sender had before it; what is
received is then added to what the receiver has, or takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int64]
ANY = -1  # level of what is sent over whatever lies between


@dataclass(frozen=True)
class Step:
    """Transfers at the same time, one a place in all the arrays: elements from start to stop."""

    adds: bool  # to what the receiver has; otherwise it takes its place
    sender: Numbers
    receiver: Numbers
    level: Numbers  # at which they are peers; ANY if they need not be
    start: Numbers
    stop: Numbers

    def __len__(self) -> int:
        return len(self.sender)

    @property
    def elements(self) -> Numbers:
        return self.stop - self.start

    def without_empty(self) -> Step:
        some = self.stop > self.start
        return self if some.all() else Step(self.adds, *(column[some] for column in self.columns))

    @property
    def columns(self) -> tuple[Numbers, ...]:
        return self.sender, self.receiver, self.level, self.start, self.stop

    def of(self, server: int) -> tuple[list[Transfer], list[Transfer]]:
        """What a server sends and what it receives."""
        sends, receives = np.flatnonzero(self.sender == server), np.flatnonzero(self.receiver == server)
        return self._at(sends, self.receiver), self._at(receives, self.sender)

    def _at(self, places: Numbers, others: Numbers) -> list[Transfer]:
        return [
            Transfer(int(others[at]), int(self.level[at]), int(self.start[at]), int(self.stop[at])) for at in places
        ]


@dataclass(frozen=True)
class Transfer:
    """As one of the two servers sees it."""

    other: int
    level: int
    start: int
    stop: int


@dataclass(frozen=True)
class ScheduleProcess:
    """Steps one after the other, over elements that are its own. turn: which way round its rings go, 1 or −1."""

    start: int
    stop: int
    steps: tuple[Step, ...]
    turn: int = 1


@dataclass(frozen=True)
class Schedule:
    """A whole all-reduce."""

    servers: int
    elements: int
    processes: tuple[ScheduleProcess, ...]

    @property
    def steps(self) -> int:
        """Of the longest process."""
        return max((len(process.steps) for process in self.processes), default=0)

    @property
    def transfers(self) -> int:
        return sum(len(step) for process in self.processes for step in process.steps)


def cut(start: Numbers, stop: Numbers, parts: int, part: Numbers | int) -> tuple[Numbers, Numbers]:
    """That part of so many, as equal as they can be, of the elements from start to stop."""
    size = stop - start
    return start + size * part // parts, start + size * (part + 1) // parts


def step(adds: bool, columns: Sequence[Sequence[Numbers]]) -> Step:
    """Of several lots of transfers."""
    return Step(adds, *(np.concatenate(column) for column in zip(*columns, strict=True))).without_empty()
