"""The base class of all messages, and the messages that every conversation uses."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from paceline.serve.wire.tokens import Role

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # elements of the model: start, stop


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class of all messages. On the wire a message is an array: the name of its class, then its fields."""


# The handshake


class Challenge(Message, frozen=True):
    """The listener sends this first on every connection. The caller answers with a Proof for this nonce."""

    nonce: bytes  # 32 random bytes, never used twice
    generation: str  # the generation of the server


class Proof(Message, frozen=True):
    """The caller sends this to the listener to prove that it knows a token of the job.

    The listener checks the MAC and answers with Accepted or Refused.
    """

    nonce: bytes  # 32 random bytes of the caller's own
    mac: bytes
    role: Role = ""  # of the caller's token; empty: it is the job's own token


class Accepted(Message, frozen=True):
    """The listener sends this to the caller if its Proof is right. The caller checks that the listener's MAC is too."""

    mac: bytes


# The end of a conversation, and heartbeats


class Refused(Message, frozen=True):
    """The coordinator or a shard sends this to a peer before it hangs up, at any time.

    The peer reports the reason and gives up: trying again would not help.
    """

    reason: str  # one sentence


class Expelled(Message, frozen=True):
    """The coordinator or a shard sends this to a worker whose incarnation is over, and hangs up.

    The worker may join again. It then pulls the model anew.
    """

    reason: str  # one sentence


class Heartbeat(Message, frozen=True):
    """A worker or a shard sends this to the coordinator, which notes that the sender is alive.

    The coordinator answers a worker with a Heartbeat. A worker that hears nothing for a lease opens a new connection.
    """
