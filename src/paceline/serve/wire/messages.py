"""The messages of the wire protocol. Each is a small typed struct; tensor bytes travel beside it as its body.

    worker → coordinator    Join, Resume, RequestSamples, GradientStarted, GradientReady, ReportMetric, FinishTraining,
                            Heartbeat, Leave
    coordinator → worker    Welcome, Resumed, ProvideWeights, GrantIteration, SampleRange, PushNow, CancelIteration,
                            Excluded, TrainingFinished, Heartbeat, Leave, Expelled
    worker → shard          Hello, InitialWeights (+ weights), RequestPush, Push (+ gradient), Pull
    shard → worker          InitialWeightsReceived, AllowPush, PushReceived, UpdatedPiece (+ weights),
                            Weights (+ weights), Expelled
    shard → coordinator     Register, CheckpointLoaded, InitialWeightsReceived, UpdateReceived, UpdateProducts,
                            PartSaved, ShardFailed, PeerRejected, Heartbeat
    coordinator → shard     Setup, InitialWeightsFrom, AddToSum, ApplyUpdates, StreamUpdates, DropUpdate, KeepUpdate,
                            Fence, SavePart, Stop
    observer → coordinator  Subscribe, InspectExclusions
    coordinator → observer  TraceLine, Exclusions

Worker, incarnation and iteration identify an update. A shard applies an update once, even if the worker sends it twice.
The coordinator gives a worker a new incarnation number each time it joins, and refuses messages of older incarnations.
A worker that loses its connection sends Resume on a new one. Both sides then repeat what was not answered.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from paceline.job.identity import Identity as Identity
from paceline.model.correction import Correction

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # elements of the model: start, stop


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Any message."""


# Greeting, the same on every connection


class Challenge(Message, frozen=True):
    """The listener's first word: prove that you know the job's token by answering for this nonce."""

    nonce: bytes
    generation: str


class Proof(Message, frozen=True):
    """The answer, with a nonce of the caller's own."""

    nonce: bytes
    mac: bytes


class Accepted(Message, frozen=True):
    """The listener knows the token too."""

    mac: bytes


class Refused(Message, frozen=True):
    """Why the conversation ends here, in one sentence. To come again would not help."""

    reason: str


class Expelled(Message, frozen=True):
    """This incarnation of a worker is over, in one sentence why. It may join again, and pull again."""

    reason: str


class Heartbeat(Message, frozen=True):
    """I am alive."""


# Worker and coordinator


class Join(Message, frozen=True):
    """A worker wants to take part. The body is its Layout and OptimizerSpec as JSON (none without shards)."""

    worker: int | None = None


class Resume(Message, frozen=True):
    """A worker whose connection was lost is back. generation: of the server that it joined."""

    worker: int
    incarnation: int
    ticket: bytes
    generation: str = ""


class Welcome(Message, frozen=True):
    """It takes part."""

    worker: int
    incarnation: int
    shards: tuple[tuple[str, int, Ranges], ...]  # host ("": as mine), port, and the pieces of the model that each holds
    lease: float  # seconds of silence that are borne
    gated: bool  # does it wait for Turned before it pushes?
    ticket: bytes  # to show when it calls as this incarnation
    mixes: bool = False  # does it make its own steps, and push weights instead of gradients?
    asks: bool = False  # does it ask a shard before it pushes, so that one pushes after the other?
    streamed: bool = False  # is each piece that it pushes applied and returned by itself?


class Resumed(Message, frozen=True):
    """It still takes part."""


class ProvideWeights(Message, frozen=True):
    """Give the shards the weights that the model begins with."""


class GradientStarted(Message, frozen=True):
    """A gradient is being computed, and its first pieces can be pushed: Ready will follow."""

    iteration: int
    base_version: int
    batch_size: int


class GradientReady(Message, frozen=True):
    """A gradient is computed, of the samples that were given under these numbers."""

    iteration: int
    base_version: int
    batch_size: int
    compute_seconds: float
    loss: float | None
    taken: tuple[int, ...] = ()


class PushNow(Message, frozen=True):
    """Push now."""

    iteration: int


class GrantIteration(Message, frozen=True):
    """Pull this version or a newer one, and run this iteration with so many samples (None: your own)."""

    iteration: int
    version: int
    batch_size: int | None
    pull: bool = True  # else what was returned is of this version
    expected: int | None = None  # versions that will follow this one before the update is applied, if that is known


class CancelIteration(Message, frozen=True):
    """Abandon this iteration; its update will not count."""

    iteration: int


class ReportMetric(Message, frozen=True):
    """Something was measured outside of training: an accuracy, a validation loss."""

    kind: str
    value: float


class RequestSamples(Message, frozen=True):
    """Samples to train on: so many, of a dataset of this size, of so many epochs. A worker numbers what it asks for."""

    number: int
    count: int
    size: int
    epochs: int


class SampleRange(Message, frozen=True):
    """Positions of an epoch's order to train on; none when there are no more."""

    number: int
    epoch: int = 0
    start: int = 0
    stop: int = 0


class FinishTraining(Message, frozen=True):
    """I have no more to train on: leave me out of the order, and tell me when the others are done too."""


class Excluded(Message, frozen=True):
    """Until further notice there will be no Grant, and this is why."""

    reason: str


class TrainingFinished(Message, frozen=True):
    """All is done; this is the last version of the model."""

    version: int


class Leave(Message, frozen=True):
    """I am done. Said back, it is the answer: so be it."""


# Worker and shard


class Hello(Message, frozen=True):
    """Which worker this connection is for."""

    worker: int
    incarnation: int
    ticket: bytes


class InitialWeights(Message, frozen=True):
    """The weights the model begins with, a piece of this shard's. The body is float32."""

    piece: int = 0


class RequestPush(Message, frozen=True):
    """May I push?"""


class AllowPush(Message, frozen=True):
    """You may."""


class Push(Message, frozen=True):
    """An update; the body is this shard's part of the gradient."""

    iteration: int
    rates: tuple[float, ...]  # the learning rate of each parameter group
    dtype: str = "float32"  # of the body: float32, bfloat16 or float16
    piece: int = 0  # of this shard's


class Pull(Message, frozen=True):
    """Send the weights when they are of this version or newer.

    expected: as they will be so many versions after this one, as far as the shard can tell. None: as they are.
    """

    version: int
    expected: int | None = None


class PushReceived(Message, frozen=True):
    """It is here (or was already)."""

    iteration: int


class UpdatedPiece(Message, frozen=True):
    """Streamed: the piece that was pushed has been applied; the body is that piece of the model, in float32."""

    iteration: int
    piece: int


class Weights(Message, frozen=True):
    """A piece of this shard's part of the model; the body is float32."""

    version: int
    piece: int = 0


# Shard and coordinator


class Register(Message, frozen=True):
    """A shard is up, and listens here."""

    shard: int
    port: int


class Setup(Message, frozen=True):
    """Which part of which model it holds. The body is the Layout and OptimizerSpec as JSON."""

    pieces: Ranges
    checkpoint: str = ""  # a folder to begin from; else the weights come from a worker
    version: int = 0  # of the model in it
    record: str = ""  # a file to write every update to
    key: bytes = b""  # by which workers' tickets are known
    streamed: bool = False  # are pieces applied as they come?
    at_a_time: int = 0  # transfers that there may be at a time in each direction, to begin with; 0: any number
    correct: Correction = "none"  # how staleness that is known in advance is taken into account


class CheckpointLoaded(Message, frozen=True):
    """The model of the checkpoint is here."""


class InitialWeightsFrom(Message, frozen=True):
    """The weights the model begins with come from this worker, and are taken from nobody else."""

    worker: int
    incarnation: int


class InitialWeightsReceived(Message, frozen=True):
    """The weights the model begins with are here, from this worker. The worker is told too."""

    worker: int
    incarnation: int


class UpdateReceived(Message, frozen=True):
    """This shard's part of an update is in, whole."""

    update: Identity


class UpdateProducts(Message, frozen=True):
    """Of this shard's part of what was applied as this version: each update's product with the whole and with itself,
    and that of the whole with itself."""

    version: int
    with_whole: tuple[float, ...]
    with_itself: tuple[float, ...]
    whole: float


class ShardFailed(Message, frozen=True):
    """This shard cannot go on, in one sentence why."""

    reason: str


class PeerRejected(Message, frozen=True):
    """A peer was turned away by this shard, in one sentence why. For the count."""

    reason: str


class AddToSum(Message, frozen=True):
    """Add an update to a running sum, times this weight, and hold it no longer."""

    update: Identity
    sum: int
    weight: float


class ApplyUpdates(Message, frozen=True):
    """Number `version` of the order log: change the model by these updates."""

    version: int
    updates: tuple[Identity, ...]
    weights: tuple[float, ...]
    mix: float | None
    turns: int = 1  # that make up a round, as far as that is known
    compare: bool = False  # is it to be said how much these updates point the same way?
    sums: tuple[tuple[int, float], ...] = ()  # where they were added up: the sums, and what each counts times


class StreamUpdates(Message, frozen=True):
    """Streamed: each piece of these updates is applied as soon as all of them have sent it.

    in_order: and after all that the log has for that piece before this. Then it is returned to them.
    expected: as it will be so many Streams later, as far as the shard can tell. None: as it is.
    """

    number: int
    updates: tuple[Identity, ...]
    weights: tuple[float, ...]
    in_order: bool = True
    turns: int = 1  # that make up a round, as far as that is known
    expected: int | None = None


class DropUpdate(Message, frozen=True):
    """An update is discarded; streamed, what is not applied of it yet."""

    update: Identity


class KeepUpdate(Message, frozen=True):
    """Put an update aside under a slot."""

    update: Identity
    slot: int


class Fence(Message, frozen=True):
    """Of this worker, nothing older than this incarnation is accepted any more."""

    worker: int
    incarnation: int


class SavePart(Message, frozen=True):
    """Write what you hold now into this folder."""

    version: int
    folder: str


class PartSaved(Message, frozen=True):
    """It is written, or not, in one sentence why."""

    version: int
    error: str = ""


class Stop(Message, frozen=True):
    """The job is over."""


# Whoever watches


class Subscribe(Message, frozen=True):
    """Tell me everything that happens from now on."""


class TraceLine(Message, frozen=True):
    """One trace event, as a line of JSON."""

    line: str


class InspectExclusions(Message, frozen=True):
    """Whom does the policy leave out? Take these back first; everyone: all of them."""

    pardon: tuple[int, ...] = ()
    everyone: bool = False


class Exclusions(Message, frozen=True):
    """Who is blacklisted, and for which cosines; and who has just been taken back. filters: does the policy at all?"""

    filters: bool
    blacklist: tuple[tuple[int, tuple[float, ...]], ...]
    pardoned: tuple[int, ...]
