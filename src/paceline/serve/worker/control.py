"""How a worker opens its control connection to the coordinator: it joins the job, or resumes an incarnation."""

from __future__ import annotations

from typing import TypeVar

from paceline.serve.wire.frames import Channel, WireError
from paceline.serve.wire.messages import Join, Resume, Resumed, Welcome
from paceline.serve.worker.transfers import raise_if_over

T = TypeVar("T")
DEAD_LINK_SECONDS = 30.0  # until a dead connection is noticed, before the lease is known
RESUME_SECONDS = 10.0  # to wait for the answer to Resume


def join(channel: Channel, worker: int | None, description: bytes) -> Welcome:
    """Join the job over a new connection. Return the coordinator's Welcome, which may take long."""
    channel.set_keepalive(DEAD_LINK_SECONDS)  # silence is allowed here, but a dead link must be noticed
    channel.send(Join(worker), memoryview(description))
    return _receive(Welcome, channel)


def resume(channel: Channel, welcome: Welcome, generation: str) -> None:
    """Continue the incarnation of a Welcome over a new connection. generation: of the server that sent the Welcome."""
    channel.send(Resume(welcome.worker, welcome.incarnation, welcome.ticket, generation))
    with channel.within(RESUME_SECONDS):
        _receive(Resumed, channel)


def _receive(kind: type[T], channel: Channel) -> T:
    """Receive a message of this kind. Raise an error if the server sends anything else."""
    message = channel.receive()
    raise_if_over(message)
    if not isinstance(message, kind):
        raise WireError(f"The server answered with {type(message).__name__} instead of {kind.__name__}.")
    return message
