"""What happens to a job. Events of a worker name the connection over which it said so.

A driver numbers its connections and never uses a number twice. A worker's events have the names and fields of its
messages on the wire.
"""

from __future__ import annotations

from typing import TypeAlias

from paceline.policies import Update
from paceline.policies.record import record

# A worker's messages


@record
class WorkerJoined:
    """A worker asks to take part. worker: the number that it wants; None: any that is free."""

    connection: int
    worker: int | None = None


@record
class WorkerResumed:
    """A worker whose connection was lost is back. genuine: has it shown that it is the one it says it is?"""

    connection: int
    worker: int
    incarnation: int
    generation: str
    genuine: bool = True


@record
class SamplesRequested:
    """A worker asks for `count` samples of a dataset of `size`, for `epochs` epochs. It numbers its requests."""

    connection: int
    number: int
    count: int
    size: int
    epochs: int


@record
class GradientBegun:
    """A worker computes a gradient, and can begin to push it. Ready will follow."""

    connection: int
    iteration: int
    base_version: int
    batch_size: int


@record
class GradientComputed:
    """A worker has computed a gradient from the samples that it was given under the numbers `taken`."""

    connection: int
    iteration: int
    base_version: int
    batch_size: int
    compute_seconds: float
    loss: float | None = None
    taken: tuple[int, ...] = ()


@record
class MetricReported:
    """A worker has measured something outside of training: an accuracy, a validation loss."""

    connection: int
    kind: str
    value: float


@record
class WorkerFinished:
    """A worker has no more to train on. It waits for the others, and for the last model."""

    connection: int


@record
class WorkerAlive:
    """A worker is alive."""

    connection: int


@record
class WorkerLeft:
    """A worker leaves of its own accord."""

    connection: int


@record
class WorkerMisbehaved:
    """A worker sent something that it may not send. It takes no part any more."""

    connection: int


@record
class ConnectionLost:
    """A connection is gone. Its worker keeps its place until its lease runs out."""

    connection: int


# The shards


@record
class ShardAlive:
    """A shard is alive."""

    shard: int


@record
class ShardLoaded:
    """A shard has the weights of the checkpoint."""

    shard: int


@record
class ShardInitialized:
    """A shard has the weights that the model begins with, from this incarnation of a worker."""

    shard: int
    worker: int
    incarnation: int


@record
class UpdateArrived:
    """A shard has its part of an update."""

    shard: int
    worker: int
    incarnation: int
    iteration: int


@record
class UpdatesCompared:
    """All shards have compared updates that were applied together: the cosine of each with their sum."""

    updates: tuple[Update, ...]
    cosines: tuple[float, ...]


@record
class ShardSaved:
    """A shard has written its part of a checkpoint; or not, and `error` says why."""

    shard: int
    version: int
    error: str = ""


# The driver


@record
class ModelDescribed:
    """It is known what is trained. momentum: of the server's optimizer."""

    momentum: float


@record
class CheckpointStored:
    """A checkpoint is on the disk as a whole; or it cannot be, and `error` says why."""

    version: int
    error: str = ""


@record
class SaveRequested:
    """Take a checkpoint, if the model has moved since the last one."""


@record
class WorkersPardoned:
    """A person takes these workers back that the policy leaves out."""

    workers: tuple[int, ...]


@record
class TimePassed:
    """Time has passed. It was to be told at `due`; if that is long ago, the driver itself was held up."""

    due: float


@record
class TimerFired:
    """A WakeAt has come due."""


Event: TypeAlias = (
    WorkerJoined
    | WorkerResumed
    | SamplesRequested
    | GradientBegun
    | GradientComputed
    | MetricReported
    | WorkerFinished
    | WorkerAlive
    | WorkerLeft
    | WorkerMisbehaved
    | ConnectionLost
    | ShardAlive
    | ShardLoaded
    | ShardInitialized
    | UpdateArrived
    | UpdatesCompared
    | ShardSaved
    | ModelDescribed
    | CheckpointStored
    | SaveRequested
    | WorkersPardoned
    | TimePassed
    | TimerFired
)
