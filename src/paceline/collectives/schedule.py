"""A collective as data: which server sends which elements to which other, at which step.

A schedule has processes that run side by side, each on its own elements (HiPS, section 3.3: h processes, so that every
NIC is used). A process is a sequence of steps. All sends of a step carry what the sender had before the step. The
receiver adds the received elements to its own, or replaces its own with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int64]
ANY = -1  # level of a transfer between servers that need not be peers


@dataclass(frozen=True)
class Step:
    """Transfers at the same time. Entry i of each array describes transfer i: elements from start to stop."""

    adds: bool  # received elements are added to the receiver's; otherwise they replace them
    sender: Numbers
    receiver: Numbers
    level: Numbers  # level at which the two are peers; ANY if they need not be
    start: Numbers
    stop: Numbers

    def __len__(self) -> int:
        return len(self.sender)

    @property
    def elements(self) -> Numbers:
        return self.stop - self.start

    def without_empty(self) -> Step:
        """Return the step without transfers of no elements."""
        some = self.stop > self.start
        return self if some.all() else Step(self.adds, *(column[some] for column in self.columns))

    @property
    def columns(self) -> tuple[Numbers, ...]:
        return self.sender, self.receiver, self.level, self.start, self.stop

    def of(self, server: int) -> tuple[list[Transfer], list[Transfer]]:
        """Return the transfers that a server sends, and those that it receives."""
        sends, receives = np.flatnonzero(self.sender == server), np.flatnonzero(self.receiver == server)
        return self._at(sends, self.receiver), self._at(receives, self.sender)

    def _at(self, places: Numbers, others: Numbers) -> list[Transfer]:
        return [
            Transfer(int(others[at]), int(self.level[at]), int(self.start[at]), int(self.stop[at])) for at in places
        ]


@dataclass(frozen=True)
class Transfer:
    """A transfer as one of its two servers sees it."""

    other: int
    level: int
    start: int
    stop: int


@dataclass(frozen=True)
class ScheduleProcess:
    """Steps one after the other, on elements that no other process touches.

    direction: which way round its rings go, 1 or −1.
    """

    start: int
    stop: int
    steps: tuple[Step, ...]
    direction: int = 1


@dataclass(frozen=True)
class Schedule:
    """A complete all-reduce."""

    servers: int
    elements: int
    processes: tuple[ScheduleProcess, ...]

    @property
    def steps(self) -> int:
        """Number of steps of the longest process."""
        return max((len(process.steps) for process in self.processes), default=0)

    @property
    def transfers(self) -> int:
        return sum(len(step) for process in self.processes for step in process.steps)


def cut(start: Numbers, stop: Numbers, parts: int, part: Numbers | int) -> tuple[Numbers, Numbers]:
    """Return one of `parts` parts, as equal as possible, of the elements from start to stop."""
    size = stop - start
    return start + size * part // parts, start + size * (part + 1) // parts


def step(adds: bool, columns: Sequence[Sequence[Numbers]]) -> Step:
    """Return a step of several groups of transfers, each given as its columns."""
    return Step(adds, *(np.concatenate(column) for column in zip(*columns, strict=True))).without_empty()
