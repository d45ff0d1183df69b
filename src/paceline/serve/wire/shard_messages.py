"""The messages between a shard and the coordinator.

The coordinator sends its orders to all shards in the same order. That sequence is the order log of the job.
"""

from __future__ import annotations

from paceline.job.clipping import NOT_CLIPPED, Factors
from paceline.job.identity import Identity
from paceline.model.correction import Correction
from paceline.serve.wire.message_base import Message, Ranges

# Getting started

ANY_NUMBER = -1  # of a shard that takes any number that is free


class Register(Message, frozen=True):
    """A shard sends this to the coordinator right after the handshake, on its first connection and on each new one.

    The coordinator answers with Registered. It tells workers this port, and sends Setup as soon as it knows the model.
    """

    shard: int  # its number; ANY_NUMBER: the coordinator chooses one
    port: int  # where the shard listens for workers
    secret: bytes  # random bytes that the shard chose when it started; no other process can return in its place
    generation: str  # of the server that the shard belongs to
    received: int = 0  # messages of the coordinator that the shard has received over earlier connections
    replica: int = 0  # which process of the shard this is: 0 is the primary at first, 1 its backup
    certificate: bytes = b""  # the SHA-256 digest of the certificate that it shows workers; empty: it does not use TLS


class Registered(Message, frozen=True):
    """The coordinator sends this to a shard in answer to Register.

    Both sides then send again what the other has not received.
    """

    received: int  # messages of the shard that the coordinator has received
    shard: int = 0  # the number of the shard


class ShardHeartbeat(Message, frozen=True):
    """A shard sends this to the coordinator every second. The coordinator answers with its own.

    Each side then forgets the messages that the other has received. A shard that hears nothing for a few seconds opens
    a new connection.
    """

    received: int  # messages of the other side that were received, over all connections


class Setup(Message, frozen=True):
    """The coordinator sends this to a shard, with the model's Layout and OptimizerSpec as JSON in the body.

    The shard allocates its pieces, and loads the checkpoint if there is one.
    """

    pieces: Ranges
    checkpoint: str = ""  # the folder of a checkpoint to start from; empty: a worker provides the weights
    version: int = 0  # of the model in the checkpoint
    record: str = ""  # a file to record every update in; empty: none
    key: bytes = b""  # verifies workers' tickets
    streamed: bool = False  # are pieces applied as they arrive?
    max_transfers: int = 0  # how many transfers to begin with may run at once in each direction; 0: any number
    correct: Correction = "none"  # how to correct for staleness that is known in advance
    measure: bool = False  # must UpdateReceived contain the size of an update?
    keep_bases: bool = False  # do workers push models that are compared by their difference to what they pulled?
    digests: tuple[str, ...] = ()  # of each file of the checkpoint; an empty one is not known
    follows: bool = False  # is this process the shard's backup? It reports no updates until TakeOver
    backup: tuple[str, int, bytes] | None = None  # host ("": the coordinator's), port and certificate of the backup
    sparse: bool = False  # do updates have few elements each, so that a step is the mean of those that have one?


class CheckpointLoaded(Message, frozen=True):
    """A shard sends this to the coordinator when it has loaded the checkpoint of its Setup.

    The coordinator starts the job when all shards have sent it.
    """


class InitialWeightsFrom(Message, frozen=True):
    """The coordinator sends this to all shards to name the worker that provides the initial weights.

    A shard accepts InitialWeights from this incarnation alone.
    """

    worker: int
    incarnation: int


class ShardFailed(Message, frozen=True):
    """A shard sends this to the coordinator when it cannot carry out its Setup.

    The coordinator ends the job with this reason, because a new generation would fail in the same way. If the
    checkpoint is damaged, the server goes back to an older one instead.
    """

    reason: str  # one sentence
    damaged: bool = False  # is the shard's file in the checkpoint damaged?


class PeerRejected(Message, frozen=True):
    """A shard sends this to the coordinator when it has refused a peer. The coordinator logs and counts it."""

    reason: str  # one sentence


# Updates


class UpdateReceived(Message, frozen=True):
    """A shard sends this to the coordinator when its part of an update has arrived, or, streamed, has been applied.

    The coordinator hands the update to the policy when all shards have sent it.
    """

    update: Identity
    # The sums of the squares of its gradients and statistics, and its largest learning rate, if Setup asks for them.
    size: tuple[float, float, float] | None = None


class UpdateHeld(Message, frozen=True):
    """A shard sends this to the coordinator when it has all pieces of an update that others keep it from applying.

    If those others are overdue, the policy cancels them, and not this one.
    """

    update: Identity


class AddToSum(Message, frozen=True):
    """The coordinator sends this to all shards. A shard adds the update to a running sum and frees its buffer."""

    update: Identity
    sum: int  # the number of the running sum
    weight: float  # of the update
    clip: Factors = NOT_CLIPPED


class ApplyUpdates(Message, frozen=True):
    """The coordinator sends this to all shards. A shard changes its weights by these updates.

    The result is this version of the model, which is also the number of the entry in the order log.
    """

    version: int
    updates: tuple[Identity, ...]
    weights: tuple[float, ...]  # of each update
    mix: float | None  # None: take an optimizer step; else weights ← (1−mix)·weights + mix·Σ weight·update
    turns: int = 1  # the number of ApplyUpdates that make up a round, if it is known
    compare: bool = False  # must the shard answer with UpdateProducts?
    sums: tuple[tuple[int, float], ...] = ()  # apply these running sums, times these factors, in place of the updates
    clips: tuple[Factors, ...] = ()  # of each update, if one of them was clipped


class UpdateProducts(Message, frozen=True):
    """A shard sends this to the coordinator after an ApplyUpdates with `compare`. It covers the shard's part.

    The coordinator adds up the products of all shards, and tells the policy the cosine of each update with their sum.
    """

    version: int
    with_whole: tuple[float, ...]  # the dot product of each update with the weighted sum of all
    with_itself: tuple[float, ...]  # the dot product of each update with itself
    whole: float  # the dot product of the weighted sum with itself


class StreamUpdates(Message, frozen=True):
    """The coordinator sends this to all shards where updates are streamed.

    A shard applies each piece as soon as all of these updates have sent it, and returns it to their workers.
    """

    number: int  # of the entry in the order log
    updates: tuple[Identity, ...]
    weights: tuple[float, ...]  # the factor of each update
    in_order: bool = True  # must a piece wait for all earlier StreamUpdates of the log?
    turns: int = 1  # the number of StreamUpdates that make up a round, if it is known
    expected: int | None = None  # return each piece predicted for this many StreamUpdates later; None: as it is
    report_held: bool = False  # must the shard send UpdateHeld for an update that waits for the others?


class DropUpdate(Message, frozen=True):
    """The coordinator sends this to one shard or to all. A shard discards the update.

    Where updates are streamed, it discards the pieces that are not applied yet.
    """

    update: Identity


class KeepUpdate(Message, frozen=True):
    """The coordinator sends this to all shards. A shard moves the update to a slot, in place of what was there."""

    update: Identity
    slot: int


class Fence(Message, frozen=True):
    """The coordinator sends this to all shards when an incarnation of a worker is over.

    A shard rejects every older incarnation of this worker from then on, and cuts its connections.
    """

    worker: int
    incarnation: int  # the oldest one that is accepted


# Replicas


class BackupUnreachable(Message, frozen=True):
    """A shard sends this to the coordinator when it cannot reach its backup, and waits for ContinueAlone."""

    reason: str


class ContinueAlone(Message, frozen=True):
    """The coordinator sends this to a shard that has lost its backup. The shard no longer passes updates on."""


class TakeOver(Message, frozen=True):
    """The coordinator sends this to the backup of a shard whose primary is lost.

    The backup becomes the primary. It reports the updates that it holds, because the coordinator may not know of them.
    """


# Checkpoints, and the end


class SavePart(Message, frozen=True):
    """The coordinator sends this to all shards. A shard writes a copy of its part and answers with PartSaved."""

    version: int
    folder: str


class PartSaved(Message, frozen=True):
    """A shard sends this to the coordinator when its part of a checkpoint is written, or cannot be written.

    The coordinator completes the checkpoint when all parts are written.
    """

    version: int
    error: str = ""  # why the part cannot be written
    size: int = 0  # of the file, in bytes
    digest: str = ""  # of the file
    is_spoiled: bool = False  # does the model hold numbers that are not finite?


class Stop(Message, frozen=True):
    """The coordinator sends this to all shards when the generation ends. A shard hangs up and exits."""

    is_over: bool = False  # is the job over? Otherwise a new generation may begin, which needs the shard again
