"""What drives policies. The conformance suite runs over every policy and every driver, and knows them only as this."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.observe.trace import Event
from paceline.policies import Policy


@dataclass(frozen=True)
class Fault:
    """Something that happens to a worker.

    kill: it is gone, until a `rejoin`. pause: it computes nothing for `seconds`. cut: its link carries nothing for
    `seconds`. A worker that is silent for longer than the lease is given up, and joins again when it can.
    """

    time: float
    worker: int
    kind: Literal["kill", "pause", "cut", "rejoin"]
    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """A small job to drive a policy through."""

    compute_seconds: tuple[float, ...]  # one a worker
    iterations: int = 20  # on average for each worker
    faults: tuple[Fault, ...] = ()
    streamed: bool = False
    seed: int = 0


class Driver(Protocol):
    """Runs a policy and reports what happened, in order."""

    def __call__(self, policy: Policy, job: Job) -> Iterable[Event]: ...
