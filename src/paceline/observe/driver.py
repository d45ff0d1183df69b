"""The interface of a driver of policies. The conformance suite runs every policy on every driver through it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.observe.trace import Event
from paceline.policies import Policy


@dataclass(frozen=True)
class Fault:
    """A fault of a worker.

    kill: the worker is gone until a `rejoin`. pause: it computes nothing for `seconds`. cut: its link carries nothing
    for `seconds`. A worker that is silent for longer than the lease is given up, and joins again as soon as it can.
    """

    time: float
    worker: int
    kind: Literal["kill", "pause", "cut", "rejoin"]
    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """A small job that tests a policy."""

    compute_seconds: tuple[float, ...]  # one entry for each worker
    iterations: int = 20  # mean number of iterations of a worker
    faults: tuple[Fault, ...] = ()
    streamed: bool = False
    seed: int = 0


class Driver(Protocol):
    """A function that runs a policy and returns the trace events in order."""

    def __call__(self, policy: Policy, job: Job) -> Iterable[Event]: ...
