"""The handshake: each peer proves that it knows the job's token. The token never crosses the wire.

The listener sends a fresh nonce. The caller answers with a nonce of its own and an HMAC over both. The listener answers
with another HMAC over both. Because the nonces are fresh, a recorded handshake cannot be replayed.
"""

from __future__ import annotations

import hmac
import secrets

from paceline.serve.wire.frames import Channel, WireError
from paceline.serve.wire.messages import Accepted, Challenge, Proof, Refused

NONCE_BYTES = 32


def ticket(key: bytes, worker: int, incarnation: int) -> bytes:
    """Return the ticket of one incarnation of a worker. Only the coordinator and its shards know the key."""
    return hmac.digest(key, f"{worker} {incarnation}".encode(), "sha256")


def is_ticket(key: bytes, worker: int, incarnation: int, shown: bytes) -> bool:
    """Return whether `shown` is the ticket of this incarnation of a worker."""
    return hmac.compare_digest(shown, ticket(key, worker, incarnation))


def new_challenge(generation: str) -> Challenge:
    """Return a Challenge with a fresh nonce, for the listener to send first."""
    return Challenge(secrets.token_bytes(NONCE_BYTES), generation)


def proof(token: bytes, challenge: Challenge) -> Proof:
    """Return the caller's answer to a Challenge."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return Proof(nonce, _mac(token, b"caller", challenge, nonce))


def check_proof(token: bytes, challenge: Challenge, answer: object) -> Accepted | Refused:
    """Return the listener's verdict on what the caller answered."""
    if not isinstance(answer, Proof) or len(answer.nonce) != NONCE_BYTES:
        return Refused("The peer did not answer the challenge with a valid Proof.")
    if not hmac.compare_digest(answer.mac, _mac(token, b"caller", challenge, answer.nonce)):
        return Refused("The job's token is wrong; give every worker and server the same one.")
    return Accepted(_mac(token, b"listener", challenge, answer.nonce))


def verify(token: bytes, challenge: Challenge, answer: Proof, verdict: object) -> None:
    """Raise WireError unless the listener accepts the caller's proof and knows the token itself."""
    if isinstance(verdict, Refused):
        raise WireError(verdict.reason)
    if not isinstance(verdict, Accepted) or not hmac.compare_digest(
        verdict.mac, _mac(token, b"listener", challenge, answer.nonce)
    ):
        raise WireError("The server does not know the job's token.")


def call(channel: Channel, token: bytes) -> str:
    """Shake hands as the caller. Return the server's generation."""
    challenge = channel.receive()
    if isinstance(challenge, Refused):
        raise WireError(challenge.reason)
    if not isinstance(challenge, Challenge):
        raise WireError("The server did not begin with a Challenge.")
    answer = proof(token, challenge)
    channel.send(answer)
    verify(token, challenge, answer, channel.receive())
    return challenge.generation


def listen(channel: Channel, token: bytes, generation: str) -> None:
    """Shake hands as the listener. Raise WireError if the caller does not know the token."""
    challenge = new_challenge(generation)
    channel.send(challenge)
    verdict = check_proof(token, challenge, channel.receive())
    channel.send(verdict)
    if isinstance(verdict, Refused):
        raise WireError(verdict.reason)


def _mac(token: bytes, role: bytes, challenge: Challenge, nonce: bytes) -> bytes:
    return hmac.digest(token, role + challenge.nonce + nonce + challenge.generation.encode(), "sha256")
