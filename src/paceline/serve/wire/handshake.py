"""The handshake: each peer proves that it knows a token of the job. The token never crosses the wire.

The listener sends a fresh nonce. The caller answers with its role, a nonce of its own and an HMAC over both. The
listener answers with another HMAC over both. Because the nonces are fresh, a recorded handshake cannot be replayed.

Over TLS the HMACs also cover the digest of the listener's certificate, as each side sees it (`certificate`). So a third
party that presents a certificate of its own cannot pass the messages of a handshake on.
"""

from __future__ import annotations

import hmac
import secrets

from paceline.serve.wire.frames import Channel, WireError
from paceline.serve.wire.messages import Accepted, Challenge, Proof, Refused
from paceline.serve.wire.tokens import Role, role_of, token_for

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


def proof(token: bytes, challenge: Challenge, certificate: bytes = b"") -> Proof:
    """Return the caller's answer to a Challenge, in the role of its token."""
    nonce, role = secrets.token_bytes(NONCE_BYTES), role_of(token)
    return Proof(nonce, _mac(token, "caller", role, challenge, nonce, certificate), role)


def check_proof(token: bytes, challenge: Challenge, answer: object, certificate: bytes = b"") -> Accepted | Refused:
    """Return the listener's verdict on what the caller answered.

    token: one from which the token of the caller's role can be derived, or that token itself.
    """
    if not isinstance(answer, Proof) or len(answer.nonce) != NONCE_BYTES:
        return Refused("The peer did not answer the challenge with a valid Proof.")
    try:
        key = token_for(answer.role, token)
    except ValueError:
        return Refused(f"A peer with the {_named(answer.role)} may not connect here.")
    if not hmac.compare_digest(answer.mac, _mac(key, "caller", answer.role, challenge, answer.nonce, certificate)):
        on_the_way = ", or the connection was intercepted" if certificate else ""
        return Refused(f"The job's token is wrong{on_the_way}; give every worker and server the same one.")
    return Accepted(_mac(key, "listener", answer.role, challenge, answer.nonce, certificate))


def verify(token: bytes, challenge: Challenge, answer: Proof, verdict: object, certificate: bytes = b"") -> None:
    """Raise WireError unless the listener accepts the caller's proof and knows the token itself."""
    if isinstance(verdict, Refused):
        raise WireError(verdict.reason)
    if not isinstance(verdict, Accepted) or not hmac.compare_digest(
        verdict.mac, _mac(token, "listener", answer.role, challenge, answer.nonce, certificate)
    ):
        raise WireError("The server does not know the job's token.")


def call(channel: Channel, token: bytes, certificate: bytes = b"") -> str:
    """Shake hands as the caller. Return the server's generation."""
    challenge = channel.receive()
    if isinstance(challenge, Refused):
        raise WireError(challenge.reason)
    if not isinstance(challenge, Challenge):
        raise WireError("The server did not begin with a Challenge.")
    answer = proof(token, challenge, certificate)
    channel.send(answer)
    verify(token, challenge, answer, channel.receive(), certificate)
    return challenge.generation


def _mac(token: bytes, side: str, role: Role, challenge: Challenge, nonce: bytes, certificate: bytes) -> bytes:
    """Return the HMAC of one side. Each part follows its length, so no two lists of parts are the same bytes."""
    parts = (side.encode(), role.encode(), challenge.nonce, nonce, challenge.generation.encode(), certificate)
    return hmac.digest(token, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


def _named(role: Role) -> str:
    return f"role {role}" if role else "job's own token"
