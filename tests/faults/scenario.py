"""What a test runs: a small job of real processes, and the faults in it.

The model counts samples. It has two tensors with one element for each sample. An update adds one to the elements of its
samples in both tensors, and the server's SGD has a rate of 1. So at the end every element must equal the number of
epochs. A sample that was lost or trained on twice, or a shard that missed an update, shows in the weights. All numbers
are exact.
"""

from __future__ import annotations

from typing import Any

import msgspec

#: Messages that occur only if workers load weights and optimizer state.
LOADING = ("OfferWeights", "KeepWeights", "InitialState", "PullState", "OptimizerState")


class Fault(msgspec.Struct, frozen=True):
    """One fault. It happens once, in the first process of its kind that reaches the point."""

    party: str  # worker, shard, backup (of a shard) or coordinator
    point: str  # send, receive, call (of a function), or relay (by a proxy in the process)
    what: str  # the name of the message or of the function
    when: str = "before"  # before, half (half-way), after
    nth: int = 1  # occurrence of the message or the call at which the fault happens
    how: str = "SIGKILL"  # SIGKILL, SIGSTOP; for a channel: cut; for the proxy: cut, reset, mute
    saved: bool = False  # count only once there is a checkpoint; workers wait for the first one
    after: int | None = None  # count only once the fault of this number has happened: strike during its recovery

    def __str__(self) -> str:
        return f"{self.party}-{self.how}-{self.when}-{self.point}-{self.what}"


class Scenario(msgspec.Struct, frozen=True):
    """A job and its faults."""

    policy: str
    faults: tuple[Fault, ...] = ()
    shards: int = 1
    workers: int = 3
    samples: int = 24
    batch: int = 2  # samples of an update
    epochs: int = 2
    padding: int = 0  # further elements of each tensor; streamed updates need some for several pieces
    streamed: bool = False  # are updates applied piece by piece?
    replicas: int = 0  # backups of each shard
    lease: float = 30.0
    every: int = 4  # updates between two checkpoints
    restart: str = "at once"  # when a killed worker is restarted: at once, or after it was given up ("late")
    trickle: int = 0  # updates that are applied while the first worker slowly reads its first pull
    limit: float = 60.0  # seconds that the job may take

    @property
    def visits(self) -> bool:
        """Whether workers push in visits, as if a shard ran beside each of them."""
        return self.streamed and self.policy == "r2sp" and self.shards > 1

    @property
    def loads(self) -> bool:
        """Whether every worker loads other weights after its first pull, and later asks for the optimizer's state."""
        return any(fault.what in LOADING for fault in self.faults)


class Outcome(msgspec.Struct):
    """The result of a scenario."""

    problems: list[str]  # one sentence for each broken promise
    fired: list[bool]  # for each fault, whether it happened
    events: list[dict[str, Any]]  # the trace of the whole job
    generations: int
    seconds: float
    report: str  # the logs and stack traces of all processes, if there are problems
