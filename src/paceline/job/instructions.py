"""What a job tells its driver to do, in order.

Those for a worker name the connection to send them over (`to`), and have the names and fields of the messages on the
wire. Those for the shards go to all of them in the same order, which is the order log of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from paceline import policies
from paceline.job.identity import Identity
from paceline.policies.record import record

# To a worker


@record
class SendWelcome:
    """The worker takes part, under this number and as this incarnation."""

    to: int
    worker: int
    incarnation: int


@record
class SendResumed:
    """The worker still takes part. What it may have missed follows."""

    to: int


@record
class SendRefused:
    """The worker is refused for good. The driver hangs up."""

    to: int
    reason: str


@record
class SendExpelled:
    """This incarnation of a worker is over. It may join again. The driver hangs up."""

    to: int
    reason: str


@record
class HangUp:
    """Close a connection that its worker has replaced by another."""

    to: int


@record
class SendWeightsRequest:
    """Give the shards the weights that the model begins with."""

    to: int


@record
class SendGrant:
    """Pull this version or a newer one, and run this iteration.

    batch_size: None means the worker's own. pull: False if the worker was returned this very version.
    expected: the staleness that the resulting update will have, where it is known.
    """

    to: int
    iteration: int
    version: int
    batch_size: int | None
    pull: bool
    expected: int | None


@record
class SendPushNow:
    """Push now."""

    to: int
    iteration: int


@record
class SendCancel:
    """Abandon this iteration."""

    to: int
    iteration: int


@record
class SendSamples:
    """Positions of an epoch's order to train on; an empty range when there are no more."""

    to: int
    number: int
    epoch: int = 0
    start: int = 0
    stop: int = 0


@record
class SendExcluded:
    """Until further notice there will be no Grant, and this is why."""

    to: int
    reason: str


@record
class SendFinished:
    """The training is over; this is the last version of the model."""

    to: int
    version: int


@record
class SendHeartbeat:
    """The answer to a worker's Beat."""

    to: int


@record
class SendLeave:
    """The answer to a worker's Leave. The driver hangs up."""

    to: int


# To the shards


@record
class OrderInitialWeights:
    """The weights that the model begins with come from this incarnation of a worker, and from nobody else."""

    worker: int
    incarnation: int


@record
class OrderApply:
    """Number `version` of the order log: change the model as the policy decided.

    turns: how many Applies make up a round, where that is known. compare: are the updates to be compared?
    """

    version: int
    decision: policies.Apply
    turns: int = 1
    compare: bool = False


@record
class OrderStream:
    """Apply each piece of these updates as soon as all of them have sent it, and return it to them."""

    number: int
    updates: tuple[Identity, ...]
    weights: tuple[float, ...]
    in_order: bool
    turns: int
    expected: int | None


@record
class OrderAdd:
    """Add an update to a running sum, times this weight."""

    update: Identity
    sum: int
    weight: float


@record
class OrderDrop:
    """Discard an update. shard: at this one alone; None: at all of them."""

    update: Identity
    shard: int | None = None


@record
class OrderDiscard:
    """Discard an update that had arrived, as the policy decided."""

    decision: policies.Discard


@record
class OrderKeep:
    """Put an update aside, as the policy decided."""

    decision: policies.Keep


@record
class OrderFence:
    """Accept nothing of this worker any more that is older than this incarnation."""

    worker: int
    incarnation: int


@record
class OrderSave:
    """Write a checkpoint of this version. snapshot: what the job knows at this point of the order log."""

    version: int
    snapshot: Mapping[str, Any]


# To the driver itself


@record
class StoreCheckpoint:
    """All shards have written their parts of this version: make the checkpoint whole."""

    version: int


@record
class ForgetCheckpoint:
    """Remove the parts of a checkpoint that will not be whole."""

    version: int


@record
class SetTimer:
    """Tell Woke at this time. A new WakeAt replaces the old one."""

    time: float


@record
class LogLine:
    """Something worth a line in the log. warns: is it worth a warning?"""

    text: str
    warns: bool = False


@record
class FailGeneration:
    """This generation of the server cannot go on."""

    reason: str


@record
class JobDone:
    """The job is over: every worker has left of its own accord."""


Instruction: TypeAlias = (
    SendWelcome
    | SendResumed
    | SendRefused
    | SendExpelled
    | HangUp
    | SendWeightsRequest
    | SendGrant
    | SendPushNow
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
    | JobDone
)
