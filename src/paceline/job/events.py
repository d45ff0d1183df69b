"""Events: what happened to a job.

An event is a fact, so its name is in the past tense. Each level has its own name for the same step: a policy *decides*
(`Grant`), the job *instructs* (`SendGrant`), the wire *carries a message* (`GrantIteration`), and the trace *tells
what happened* (`Granted`). Instructions to a worker begin with Send, orders to the shards begin with Order
(`paceline.job.instructions`).

An event of a worker names the connection on which the worker's message arrived; its other fields are those of the
message. A driver numbers its connections and never uses a number twice.
"""

from __future__ import annotations

from typing import TypeAlias

from paceline.policies import Update
from paceline.policies.record import record

# Events of a worker


@record
class WorkerJoined:
    """A worker asked to join. worker: the number that it asked for, or None for any free number."""

    connection: int
    worker: int | None = None


@record
class WorkerResumed:
    """A worker that had lost its connection came back on a new one. genuine: True if it showed a valid ticket."""

    connection: int
    worker: int
    incarnation: int
    generation: str
    genuine: bool = True


@record
class WeightsOffered:
    """A worker's model was changed after it had been pulled. replace: True if the job must take the changed weights."""

    connection: int
    replace: bool = False


@record
class SamplesRequested:
    """A worker requested `count` samples from the first `epochs` epochs over a dataset of `size` samples.

    number: the worker's own number for this request. A repeated request has the same number.
    planned: the number of epochs that the worker's script will train in all, or None if it is unknown.
    ends: True if the main worker ends training early: no samples are handed out from now on.
    """

    connection: int
    number: int
    count: int
    size: int
    epochs: int
    planned: int | None = None
    ends: bool = False


@record
class GradientBegun:
    """A worker began to compute a gradient and can push its first pieces. GradientComputed follows.

    taken: the numbers of the sample requests that it is computed from.
    """

    connection: int
    iteration: int
    base_version: int
    batch_size: int
    taken: tuple[int, ...] = ()


@record
class VisitEnded:
    """A worker has pushed a part of its update to a shard, as it was told to."""

    connection: int
    iteration: int
    shard: int
    part: int


@record
class GradientComputed:
    """A worker finished a gradient. taken: the numbers of the sample requests that it was computed from."""

    connection: int
    iteration: int
    base_version: int
    batch_size: int
    compute_seconds: float
    loss: float | None = None
    taken: tuple[int, ...] = ()


@record
class MetricReported:
    """A worker reported a metric that is not part of training, such as an accuracy or a validation loss."""

    connection: int
    kind: str
    value: float


@record
class WorkerFinished:
    """A worker ran out of samples. It waits for the other workers and for the last version of the model."""

    connection: int


@record
class WorkerAlive:
    """A worker sent a heartbeat."""

    connection: int


@record
class WorkerLeft:
    """A worker announced that it leaves the job. returns: its machine is taken away, and it may come back."""

    connection: int
    returns: bool = False


@record
class WorkerMisbehaved:
    """A worker sent a message that is not allowed. It is removed from the job."""

    connection: int


@record
class ConnectionLost:
    """A connection was lost. Its worker stays a member until its lease runs out."""

    connection: int


# Events of a shard


@record
class ShardAlive:
    """A shard sent a heartbeat."""

    shard: int


@record
class ShardLoaded:
    """A shard loaded its weights from the checkpoint."""

    shard: int


@record
class ShardInitialized:
    """A shard received its initial weights from this incarnation of a worker."""

    shard: int
    worker: int
    incarnation: int


@record
class UpdateArrived:
    """A shard received its whole part of an update.

    size: the sums of the squares of its gradients and of its statistics, and its largest learning rate, or None if the
        shard was not asked.
    """

    shard: int
    worker: int
    incarnation: int
    iteration: int
    size: tuple[float, float, float] | None = None


@record
class UpdateHeldBack:
    """A shard holds its whole part of a streamed update, and waits for others that are applied together with it."""

    shard: int
    worker: int
    incarnation: int
    iteration: int


@record
class UpdatesCompared:
    """All shards compared the updates of one Apply. cosines: the cosine of each update with their weighted sum."""

    updates: tuple[Update, ...]
    cosines: tuple[float, ...]


@record
class ShardSaved:
    """A shard wrote its part of a checkpoint. If it failed, `error` says why.

    is_spoiled: it failed because the model holds numbers that are not finite, and another attempt would fail too.
    """

    shard: int
    version: int
    error: str = ""
    is_spoiled: bool = False


# Events of the driver


@record
class ModelDescribed:
    """The model became known, from the first worker or a checkpoint.

    momentum: of the server's optimizer. pieces: the least pieces of a shard, or None if updates are not streamed.
    elements: of the whole model; 0 if unknown. optimizer: with its settings, for people.
    """

    momentum: float
    pieces: int | None = None
    elements: int = 0
    optimizer: str = ""


@record
class CheckpointStored:
    """The driver stored a whole checkpoint on disk. If it failed, `error` says why."""

    version: int
    error: str = ""


@record
class SaveRequested:
    """The operator requested a checkpoint. It is taken if the model has changed since the last one."""


@record
class WorkersPardoned:
    """The operator readmitted workers that the policy had excluded."""

    workers: tuple[int, ...]


@record
class TimePassed:
    """Time passed. The driver meant to report this at `due`; a late report means that the driver was blocked."""

    due: float


@record
class TimerFired:
    """The timer of the last SetTimer fired."""


Event: TypeAlias = (
    WorkerJoined
    | WorkerResumed
    | WeightsOffered
    | SamplesRequested
    | GradientBegun
    | GradientComputed
    | VisitEnded
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
    | UpdateHeldBack
    | UpdatesCompared
    | ShardSaved
    | ModelDescribed
    | CheckpointStored
    | SaveRequested
    | WorkersPardoned
    | TimePassed
    | TimerFired
)
