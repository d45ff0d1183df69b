"""How two peers meet: each proves that it knows the job's token, and the token never crosses the wire.

The listener sends a fresh nonce; the caller answers with a nonce of its own and an HMAC over both; the listener
answers with another HMAC over both. Nonces are fresh, so a recorded greeting is of no use to anybody.
"""

from __future__ import annotations

import hmac
import secrets

from paceline.serve.wire.frames import Channel, WireError
from paceline.serve.wire.messages import Accepted, Challenge, Proof, Refused

NONCE = 32


def ticket(key: bytes, worker: int, incarnation: int) -> bytes:
    """By which a worker shows that it is the one it says it is. Only the coordinator and its shards know the key."""
    return hmac.digest(key, f"{worker} {incarnation}".encode(), "sha256")


def is_ticket(key: bytes, worker: int, incarnation: int, shown: bytes) -> bool:
    return hmac.compare_digest(shown, ticket(key, worker, incarnation))


def challenge(generation: str) -> Challenge:
    """The listener's first word."""
    return Challenge(secrets.token_bytes(NONCE), generation)


def proof(token: bytes, asked: Challenge) -> Proof:
    """The caller's answer."""
    nonce = secrets.token_bytes(NONCE)
    return Proof(nonce, _mac(token, b"caller", asked, nonce))


def judge(token: bytes, asked: Challenge, answer: object) -> Accepted | Refused:
    """The listener's verdict."""
    if not isinstance(answer, Proof) or len(answer.nonce) != NONCE:
        return Refused("The peer did not greet as paceline does.")
    if not hmac.compare_digest(answer.mac, _mac(token, b"caller", asked, answer.nonce)):
        return Refused("The job's token is wrong; give every worker and server the same one.")
    return Accepted(_mac(token, b"listener", asked, answer.nonce))


def verify(token: bytes, asked: Challenge, answer: Proof, verdict: object) -> None:
    """The caller's look at the verdict."""
    if isinstance(verdict, Refused):
        raise WireError(verdict.reason)
    if not isinstance(verdict, Accepted) or not hmac.compare_digest(
        verdict.mac, _mac(token, b"listener", asked, answer.nonce)
    ):
        raise WireError("The server does not know the job's token.")


def call(channel: Channel, token: bytes) -> str:
    """Greet as the caller; the server's generation."""
    asked = channel.receive()
    if isinstance(asked, Refused):
        raise WireError(asked.reason)
    if not isinstance(asked, Challenge):
        raise WireError("The server did not greet as paceline does.")
    answer = proof(token, asked)
    channel.send(answer)
    verify(token, asked, answer, channel.receive())
    return asked.generation


def listen(channel: Channel, token: bytes, generation: str) -> None:
    """Greet as the listener."""
    asked = challenge(generation)
    channel.send(asked)
    verdict = judge(token, asked, channel.receive())
    channel.send(verdict)
    if isinstance(verdict, Refused):
        raise WireError(verdict.reason)


def _mac(token: bytes, who: bytes, asked: Challenge, nonce: bytes) -> bytes:
    return hmac.digest(token, who + asked.nonce + nonce + asked.generation.encode(), "sha256")
