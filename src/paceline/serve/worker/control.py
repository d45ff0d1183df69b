"""How a worker opens its control connection to the coordinator: it joins the job, or resumes an incarnation."""

from __future__ import annotations

from typing import TypeVar

from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import Channel, MessageDecoder, WireError
from paceline.serve.wire.messages import (
    Accepted,
    CancelIteration,
    Challenge,
    Excluded,
    Expelled,
    GrantIteration,
    Heartbeat,
    Join,
    KeepWeights,
    Leave,
    ProvideWeights,
    PushNow,
    Refused,
    Resume,
    Resumed,
    SampleRange,
    ShardMoved,
    TrainingFinished,
    VisitShard,
    Welcome,
)
from paceline.serve.worker.endings import IncarnationOver, raise_if_over

T = TypeVar("T")
_ON_JOINING = Challenge | Accepted | Refused | Expelled | Welcome | Resumed | ShardMoved | ProvideWeights | KeepWeights
_IN_TRAINING = (
    PushNow
    | VisitShard
    | GrantIteration
    | SampleRange
    | CancelIteration
    | Excluded
    | TrainingFinished
    | Heartbeat
    | Leave
)
FROM_COORDINATOR = MessageDecoder(_ON_JOINING | _IN_TRAINING)
DEAD_LINK_SECONDS = 30.0  # until a dead connection is noticed, before the lease is known
RESUME_SECONDS = 10.0  # to wait for the answer to Resume


def join(
    endpoint: Endpoint, worker: int | None, description: bytes, generation: str | None
) -> tuple[Channel, str, Welcome]:
    """Join the job over a new connection. Return the connection, the server's generation, and its Welcome.

    The Welcome may take long. Raise IncarnationOver if the server is not of the given generation.
    """
    channel, found = endpoint.open(FROM_COORDINATOR)
    try:
        if generation not in (None, found):
            raise IncarnationOver("The server is of another generation.")
        channel.set_keepalive(DEAD_LINK_SECONDS)  # silence is allowed here, but a dead link must be noticed
        channel.send(Join(worker), memoryview(description))
        return channel, found, _receive(Welcome, channel)
    except BaseException:
        channel.close()
        raise


def resume(endpoint: Endpoint, welcome: Welcome, generation: str) -> Channel:
    """Continue the incarnation of a Welcome over a new connection. generation: of the server that sent the Welcome."""
    channel, _ = endpoint.open(FROM_COORDINATOR)
    try:
        channel.send(Resume(welcome.worker, welcome.incarnation, welcome.ticket, generation))
        with channel.within(RESUME_SECONDS):
            _receive(Resumed, channel)
    except BaseException:
        channel.close()
        raise
    return channel


def _receive(kind: type[T], channel: Channel) -> T:
    """Receive a message of this kind. Raise an error if the server sends anything else."""
    message = channel.receive()
    raise_if_over(message)
    if not isinstance(message, kind):
        raise WireError(f"The server answered with {type(message).__name__} instead of {kind.__name__}.")
    return message
