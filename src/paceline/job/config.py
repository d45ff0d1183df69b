"""The configuration of a job: workers, shards, the lease, and how often to take a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.job.leases import EXPECTED_BACK


@dataclass(frozen=True)
class SaveEvery:
    """How often to take a checkpoint: every `updates` versions of the model, every `seconds` seconds, or both."""

    updates: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class JobConfig:
    """The configuration of a job.

    shards: the number of shards. An update counts when every shard has received its part. With 0 shards the job only
        paces the workers, and an update counts as soon as its gradient is computed.
    workers: the number of workers that must join before the job begins. More workers may join later.
    lease: seconds without a heartbeat before a worker is given up.
    absence: seconds for which the job waits for a worker that was lost, or whose machine was taken away.
    streams: True if the shards apply each piece of an update as it arrives.
    generation: the name of this generation of the server. A restored server has a new one.
    awaited: the workers of the previous generation that had not left, or None if they are unknown.
    incarnations: the last incarnation of each worker in earlier generations.
    provider: the worker that provides the weights of a restored job, or None if its checkpoint does.
    visits: the number of parts of a shard that a worker visits one by one, when the job tells it (`job.visits`). 0 if
        workers choose the order of their pushes themselves.
    sends_rest: True if workers push once more when they finish, after all samples are trained on. Then nobody gets the
        last model before all have finished.
    max_norm: an update is scaled down to this many times the usual norm, or None if updates are not limited.
    """

    shards: int = 1
    workers: int = 1
    lease: float = 30.0
    save: SaveEvery | None = None
    policy: str = ""
    streams: bool = False
    generation: str = ""
    awaited: frozenset[int] | None = None
    incarnations: Mapping[int, int] = field(default_factory=dict)
    provider: int | None = None
    visits: int = 0
    max_norm: float | None = None
    absence: float = EXPECTED_BACK
    sends_rest: bool = False
