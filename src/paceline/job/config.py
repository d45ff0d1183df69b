"""The terms of a job: how many workers and shards it has, how long silence is borne, and when checkpoints are taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SaveEvery:
    """How often a checkpoint is taken: every so many versions of the model, or every so many seconds."""

    updates: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class JobConfig:
    """What a job is run under.

    shards: an update counts when all of them have it. 0: the job only paces, and an update counts when it is ready.
    workers: the job begins when so many have joined; more may join later.
    lease: seconds of silence after which a worker is given up.
    streams: is each piece of an update applied as it comes?
    generation: the name of this generation of the server. A restored server has another.
    awaited: the workers of the generation before that had not left; None if they are not known.
    incarnations: the last incarnation of each worker in earlier generations.
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
