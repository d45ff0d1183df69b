"""What a test asks for: a small job of real processes, and what goes wrong in it.

The model counts. It has two tensors of one element a sample; the update of some samples adds one to their elements of
both, and the server's SGD has a rate of 1. So when all is over, every element must hold the number of epochs: a sample
that was lost, or trained on twice, or a shard that missed an update, shows in the weights. All numbers are exact.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Fault(msgspec.Struct, frozen=True):
    """One thing that goes wrong, once: in the first process of its kind that comes to the point."""

    who: str  # worker, shard or coordinator
    point: str  # send, receive, call (of a function), or relay (on the worker's way through the proxy)
    what: str  # the message's name, or the function's
    when: str = "before"  # before, half (way through it), after
    nth: int = 1
    how: str = "SIGKILL"  # SIGKILL, SIGSTOP; for a channel: cut; for the proxy: cut, reset, mute
    saved: bool = False  # counted only when there is a checkpoint to go back to; workers wait for one to begin

    def __str__(self) -> str:
        return f"{self.who}-{self.how}-{self.when}-{self.point}-{self.what}"


class Scenario(msgspec.Struct, frozen=True):
    """A job, and its faults."""

    policy: str
    faults: tuple[Fault, ...] = ()
    shards: int = 1
    workers: int = 3
    samples: int = 24
    batch: int = 2
    epochs: int = 2
    padding: int = 0  # elements more in each tensor
    streamed: bool = False  # are updates applied piece by piece? Then there should be padding enough for some pieces
    lease: float = 30.0
    every: int = 4  # a checkpoint every so many updates
    restart: str = "at once"  # a killed worker is started again: at once, or when it was given up ("late")
    trickle: int = 0  # the first worker reads its first pull so slowly that others apply so many updates meanwhile
    limit: float = 60.0  # seconds for all of it


class Outcome(msgspec.Struct):
    """What came of it."""

    problems: list[str]  # in sentences; none if every promise was kept
    fired: list[bool]  # which faults came about
    events: list[dict[str, Any]]  # the trace of the whole job
    generations: int
    seconds: float
    report: str  # where each process stood, and what it said, if there are problems
