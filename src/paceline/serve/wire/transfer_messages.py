"""The messages between a worker and a shard."""

from __future__ import annotations

from paceline.serve.wire.message_base import Message


class Hello(Message, frozen=True):
    """A worker sends this to a shard right after the handshake.

    The shard checks the ticket, and serves the connection for this incarnation.
    """

    worker: int
    incarnation: int
    ticket: bytes  # from the Welcome
    codec: str = ""  # in which the shard encodes the model for this connection (`model.differences`); empty: none


class InitialWeights(Message, frozen=True):
    """A worker that received ProvideWeights sends this to a shard, once for each piece of the shard.

    The shard copies the body, in float32, into the piece and answers with InitialWeightsReceived.
    """

    piece: int = 0  # of this shard's


class InitialState(Message, frozen=True):
    """A worker that received ProvideWeights sends this to a shard in place of InitialWeights, if it has loaded the
    state of the optimizer too.

    The body is this shard's part of a checkpoint, in the safetensors format: weights and optimizer state. The shard
    loads it and answers with InitialWeightsReceived.
    """


class InitialWeightsReceived(Message, frozen=True):
    """A shard sends this to the worker in answer to each InitialWeights, and to InitialState.

    It sends it to the coordinator when all its pieces have weights. The coordinator starts the job when all shards have
    sent it.
    """

    worker: int
    incarnation: int


#: Bytes left of a transfer when the next one is admitted, so that the link is never idle. A shorter push need not ask.
NEARLY_DONE = 1 << 18


class RequestPush(Message, frozen=True):
    """A worker sends this to a shard before it pushes, if its Welcome says `asks` and the push shares a link.

    The shard answers with AllowPush when it is the worker's turn on the link.
    """


class AllowPush(Message, frozen=True):
    """A shard sends this to a worker in answer to RequestPush. The worker pushes then."""


class Push(Message, frozen=True):
    """A worker sends this to a shard, with one piece of its gradient as the body.

    The shard holds the piece until the coordinator orders what to do with it. It answers with PushReceived, or with
    UpdatedPiece where updates are streamed.
    """

    iteration: int
    rates: tuple[float, ...]  # the learning rate of each parameter group
    dtype: str = "float32"  # of the body: float32, bfloat16, float16, or a codec (`model.codecs`)
    piece: int = 0  # of this shard's


class PushReceived(Message, frozen=True):
    """A shard sends this to a worker when a push has arrived, now or earlier. The worker stops repeating it."""

    iteration: int


class UpdatedPiece(Message, frozen=True):
    """A shard that streams sends this to a worker when the piece that it pushed has been applied or dropped.

    The worker copies the body, the piece's weights in float32, into its model. Or it decodes a difference (Hello).
    """

    iteration: int
    piece: int
    dtype: str = "float32"  # of the body, or the codec of a difference to what this connection has sent before


class Pull(Message, frozen=True):
    """A worker sends this to a shard to get its part of the model.

    The shard waits until it has this version or a newer one, and answers with one Weights for each piece.
    """

    version: int
    expected: int | None = None  # predict the weights for this many versions after `version`; None: send them as is
    exact: bool = False  # send the weights in float32, although the connection has a codec


class Weights(Message, frozen=True):
    """A shard sends this to a worker in answer to Pull.

    The worker copies the body, in float32, into its model. Or it decodes a difference (Hello).
    """

    version: int
    piece: int = 0  # of this shard's
    dtype: str = "float32"  # as in UpdatedPiece


class PullState(Message, frozen=True):
    """A worker sends this to a shard to get its part of the optimizer's state. The answer is OptimizerState."""


class OptimizerState(Message, frozen=True):
    """A shard sends this to a worker in answer to PullState.

    The body is this shard's part of a checkpoint without the weights, in the safetensors format.
    """

    version: int
