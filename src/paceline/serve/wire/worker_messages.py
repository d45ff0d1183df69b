"""The messages between a worker and the coordinator."""

from __future__ import annotations

from paceline.serve.wire.message_base import Message, Ranges

# Joining and coming back


class Join(Message, frozen=True):
    """A worker sends this to the coordinator to take part in the job. The coordinator answers with Welcome or Refused.

    The body is the worker's Layout and OptimizerSpec as JSON. It is empty if the job has no shards.
    """

    worker: int | None = None  # the number that the worker wants; None: any free one


class Resume(Message, frozen=True):
    """A worker sends this to the coordinator on a new connection after it lost the old one.

    The coordinator answers with Resumed, or with Expelled if the incarnation is over or belongs to another generation.
    """

    worker: int
    incarnation: int
    ticket: bytes
    generation: str = ""  # of the server that the worker joined


class Welcome(Message, frozen=True):
    """The coordinator sends this to a worker that it admits. The worker waits for its first GrantIteration."""

    worker: int
    incarnation: int
    shards: tuple[tuple[str, int, Ranges], ...]  # host ("": the coordinator's), port, and the shard's pieces
    lease: float  # seconds of silence after which the coordinator gives the worker up
    gated: bool  # must the worker wait for PushNow before it pushes?
    ticket: bytes  # proves to coordinator and shards that the sender is this incarnation
    mixes: bool = False  # does the worker take its own optimizer steps, and push weights instead of gradients?
    asks: bool = False  # must the worker send RequestPush before it pushes, so that workers push one after another?
    streamed: bool = False  # is each piece that the worker pushes applied and returned by itself?
    workers: int = 1  # that the job starts with; more may join later
    missing: int = 0  # workers that must still join before the job begins
    certificates: tuple[bytes, ...] = ()  # the SHA-256 digest of each shard's certificate; empty without TLS
    update_codec: str = ""  # the codec of the worker's pushes (`model.codecs`); empty: none


class Resumed(Message, frozen=True):
    """The coordinator sends this to a worker whose Resume it accepts.

    Both sides then repeat the messages that were not answered.
    """


class ProvideWeights(Message, frozen=True):
    """The coordinator sends this to one worker of a new job.

    That worker sends its weights to all shards as InitialWeights.
    """


class OfferWeights(Message, frozen=True):
    """A worker sends this to the coordinator when its model was changed after it had been pulled.

    The weights of the main worker count: worker 0, or the first one if there is no worker 0. If the main worker sends
    this before it has trained, or asks to replace the model, a new generation begins, and it provides the weights. If
    it trains instead, the coordinator answers the other workers with KeepWeights.
    """

    replace: bool = False  # must the job take these weights, although it has trained already?


class KeepWeights(Message, frozen=True):
    """The coordinator sends this to a worker whose OfferWeights it does not follow. The worker pulls this version."""

    version: int


class ShardMoved(Message, frozen=True):
    """The coordinator sends this to all workers when the backup of a shard has taken over, and again after Resumed.

    The worker uses the new address from now on, and repeats what the shard has not answered.
    """

    shard: int
    host: str  # "": the coordinator's
    port: int
    certificate: bytes = b""  # the digest of the certificate that it shows there; empty: it does not use TLS


# One iteration


class GrantIteration(Message, frozen=True):
    """The coordinator sends this to a worker that may run its next iteration.

    The worker pulls the model, computes a gradient and answers with GradientReady.
    """

    iteration: int
    version: int  # of the model to pull; a newer one will do
    batch_size: int | None  # None: the worker's own
    pull: bool = True  # False: the worker has this version already, from the pieces that it was returned
    expected: int | None = None  # versions between this one and the update's own, if the policy knows the number
    weight: float | None = None  # of the worker's last update, if there are no shards; 0 if it was discarded


class RequestSamples(Message, frozen=True):
    """A worker sends this to the coordinator to get samples. The coordinator answers with a SampleRange."""

    number: int  # of this request; the worker counts its requests
    count: int  # samples that the worker asks for
    size: int  # samples in the dataset
    epochs: int  # the samples must be of one of these first epochs
    planned: int | None = None  # epochs that the script will train in all; None: unknown
    ends: bool = False  # must the job hand out no samples from now on? It counts if the main worker sends it


class SampleRange(Message, frozen=True):
    """The coordinator sends this to a worker in answer to RequestSamples.

    The worker trains on these positions of the epoch's order. An empty range means that there are no more samples.
    """

    number: int  # of the request
    epoch: int = 0
    start: int = 0
    stop: int = 0


class GradientStarted(Message, frozen=True):
    """A worker sends this to the coordinator when it can push the first pieces of a gradient that it still computes.

    The coordinator tells the policy that the worker is ready. GradientReady follows when the gradient is complete.
    """

    iteration: int
    base_version: int  # of the model that the gradient is computed from
    batch_size: int
    taken: tuple[int, ...] = ()  # the requests whose samples the gradient is computed from


class GradientReady(Message, frozen=True):
    """A worker sends this to the coordinator when it has computed a gradient.

    The coordinator hands the update to the policy as soon as all shards have received it.
    """

    iteration: int
    base_version: int
    batch_size: int
    compute_seconds: float
    loss: float | None
    taken: tuple[int, ...] = ()  # the requests whose samples the gradient was computed from


class PushNow(Message, frozen=True):
    """The coordinator sends this to a worker whose turn it is. A gated worker pushes its gradient then.

    parts: 0, or into how many parts the pieces of each shard are divided. The worker then pushes the part beside it at
    once, and every other part when a VisitShard names it.
    """

    iteration: int
    parts: int = 0


class VisitShard(Message, frozen=True):
    """The coordinator sends this to a worker that has its turn: it pushes a part of its gradient to a shard now."""

    iteration: int
    shard: int
    part: int


class EndVisit(Message, frozen=True):
    """A worker sends this to the coordinator when it has pushed what a VisitShard named."""

    iteration: int
    shard: int
    part: int


class CancelIteration(Message, frozen=True):
    """The coordinator sends this to a worker whose update will not count.

    The worker does not push it, sends GradientReady so that its samples can be reassigned, and waits for the next
    GrantIteration.
    """

    iteration: int


class Excluded(Message, frozen=True):
    """The coordinator sends this to a worker that the policy leaves out.

    The worker logs the reason and waits. It gets no GrantIteration until the exclusion ends.
    """

    reason: str


class ReportMetric(Message, frozen=True):
    """A worker sends this to the coordinator when it has measured an accuracy or a validation loss.

    The coordinator passes the value to the policy and to the trace.
    """

    kind: str
    value: float


# The end of the training


class FinishTraining(Message, frozen=True):
    """A worker that has no more samples sends this to the coordinator.

    The coordinator takes the worker out of the policy's order, and sends TrainingFinished when all workers are done.
    """


class TrainingFinished(Message, frozen=True):
    """The coordinator sends this to the workers that sent FinishTraining, when all workers are done.

    The worker pulls this version of the model, which is the last one.
    """

    version: int


class Leave(Message, frozen=True):
    """A worker sends this to the coordinator when it leaves the job. The coordinator answers with Leave and hangs up.

    A worker that gets no answer joins once more and leaves again, because the job would wait for it.
    """

    returns: bool = False  # whether its machine is taken away: the job waits for some time for it to join again
