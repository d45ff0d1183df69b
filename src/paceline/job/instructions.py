"""Instructions: what a job tells its driver to do. The driver carries them out in the order given.

Instructions to a worker begin with Send, and `to` is the connection to send on. Orders to the shards begin with Order.
Every shard receives all orders in the same order, which is the order log of the job. The remaining instructions are
for the driver itself.

Each level has its own name for the same step: a policy *decides* (`Grant`), the job *instructs* (`SendGrant`), the wire
*carries a message* (`GrantIteration`), and the trace *tells what happened* (`Granted`). Events are facts in the past
tense (`paceline.job.events`). An instruction to a worker has the fields of its message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from paceline import policies
from paceline.job.clipping import NOT_CLIPPED, Factors
from paceline.job.identity import Identity
from paceline.policies.record import record

# Instructions to a worker


@record
class SendWelcome:
    """Tell a worker that it has joined, under this number and as this incarnation."""

    to: int
    worker: int
    incarnation: int


@record
class SendResumed:
    """Tell a worker that it is still a member. The messages that it may have missed follow."""

    to: int


@record
class SendRefused:
    """Tell a worker that it is refused and must not try again. The driver then closes the connection."""

    to: int
    reason: str


@record
class SendExpelled:
    """Tell a worker that its incarnation is over and that it may join again. The driver then closes the connection."""

    to: int
    reason: str


@record
class CloseConnection:
    """Close a connection that its worker has replaced by a new one."""

    to: int


@record
class SendWeightsRequest:
    """Ask a worker to send the initial weights of the model to the shards."""

    to: int


@record
class SendWeightsKept:
    """Tell a worker that the job keeps its own weights. The worker pulls this version or a newer one."""

    to: int
    version: int


@record
class SendGrant:
    """Tell a worker to pull this version or a newer one and to run this iteration.

    batch_size: None means the worker's own batch size.
    pull: False if this version was already returned to the worker, piece by piece.
    expected: the staleness that the resulting update will have, if it is known.
    weight: with which the worker's last update was applied, if the job has no shards that apply it.
    """

    to: int
    iteration: int
    version: int
    batch_size: int | None
    pull: bool
    expected: int | None
    weight: float | None = None


@record
class SendPushNow:
    """Tell a worker to push the update of this iteration now. parts: of each shard, if SendVisit says when to push."""

    to: int
    iteration: int
    parts: int = 0


@record
class SendVisit:
    """Tell a worker to push a part of its update to a shard now."""

    to: int
    iteration: int
    shard: int
    part: int


@record
class SendCancel:
    """Tell a worker to abandon this iteration."""

    to: int
    iteration: int


@record
class SendSamples:
    """Send a worker the positions in an epoch's order to train on. An empty range means that no samples are left."""

    to: int
    number: int
    epoch: int = 0
    start: int = 0
    stop: int = 0


@record
class SendExcluded:
    """Tell a worker that the policy excludes it, and why. It gets no Grant until further notice."""

    to: int
    reason: str


@record
class SendFinished:
    """Tell a worker that the training is over, and the last version of the model."""

    to: int
    version: int


@record
class SendHeartbeat:
    """Answer a worker's heartbeat."""

    to: int


@record
class SendLeave:
    """Confirm to a worker that it has left. The driver then closes the connection."""

    to: int


# Orders to the shards


@record
class OrderInitialWeights:
    """Accept the initial weights of the model from this incarnation of a worker and from no other."""

    worker: int
    incarnation: int


@record
class OrderApply:
    """Change the model as the policy decided. This makes version `version`, its number in the order log.

    turns: the number of Applies that make up a round, if it is known; otherwise 1.
    compare: True if the shards must compare the updates and report the result.
    clips: the factors of each update's gradient and learning rates, if one of the updates was clipped.
    """

    version: int
    decision: policies.Apply
    turns: int = 1
    compare: bool = False
    clips: tuple[Factors, ...] = ()


@record
class OrderStream:
    """Apply each piece of these updates as soon as all of them have sent it, and return the piece to their workers."""

    number: int
    updates: tuple[Identity, ...]
    weights: tuple[float, ...]
    in_order: bool
    turns: int
    expected: int | None
    report_held: bool = False


@record
class OrderAdd:
    """Add an update, times this weight, to a running sum. clip: the factors of its gradient and learning rates."""

    update: Identity
    sum: int
    weight: float
    clip: Factors = NOT_CLIPPED


@record
class OrderDrop:
    """Drop what has arrived of an update. shard: the only shard that must do so, or None for all shards."""

    update: Identity
    shard: int | None = None


@record
class OrderDiscard:
    """Discard an update that has arrived, as the policy decided."""

    decision: policies.Discard


@record
class OrderKeep:
    """Put an update aside for later Applies, as the policy decided."""

    decision: policies.Keep


@record
class OrderFence:
    """Accept nothing more from incarnations of this worker that are older than this one."""

    worker: int
    incarnation: int


@record
class OrderSave:
    """Write a checkpoint of this version. snapshot: the state of the job at this point of the order log."""

    version: int
    snapshot: Mapping[str, Any]


# Instructions to the driver itself


@record
class StoreCheckpoint:
    """Complete the checkpoint of this version: all shards have written their parts."""

    version: int


@record
class ForgetCheckpoint:
    """Remove the parts of a checkpoint that failed."""

    version: int


@record
class SetTimer:
    """Report TimerFired at this time. A new timer replaces the old one."""

    time: float


@record
class LogLine:
    """Write a line to the log. warns: True if the line is a warning."""

    text: str
    warns: bool = False


@record
class FailGeneration:
    """End this generation of the server: it cannot continue."""

    reason: str


@record
class GiveUpShard:
    """Give this shard up, because it has been silent for too long. Its backup takes over, or this generation ends."""

    shard: int
    reason: str


@record
class BeginAgain:
    """End this generation, and begin another one in which this worker provides the weights.

    snapshot: the state of the job that the new generation starts from.
    """

    provider: int
    snapshot: Mapping[str, Any]


@record
class JobDone:
    """End the job: every worker has left."""


Instruction: TypeAlias = (
    SendWelcome
    | SendResumed
    | SendRefused
    | SendExpelled
    | CloseConnection
    | SendWeightsRequest
    | SendWeightsKept
    | SendGrant
    | SendPushNow
    | SendVisit
    | SendCancel
    | SendSamples
    | SendExcluded
    | SendFinished
    | SendHeartbeat
    | SendLeave
    | OrderInitialWeights
    | OrderApply
    | OrderStream
    | OrderAdd
    | OrderDrop
    | OrderDiscard
    | OrderKeep
    | OrderFence
    | OrderSave
    | StoreCheckpoint
    | ForgetCheckpoint
    | SetTimer
    | LogLine
    | FailGeneration
    | GiveUpShard
    | BeginAgain
    | JobDone
)
