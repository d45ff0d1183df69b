"""Tokens and their roles. One secret allows everything, and the tokens that are derived from it allow less.

The job's own token is for its operator. A token of a role is that role's name and a digest of the token above it, so it
can be given to others: nobody can compute the token above it.

    the job's token ─┬─ shard ─── worker
                     └─ watch
"""

from __future__ import annotations

import hmac
import re
from typing import Literal, get_args

#: The empty role belongs to the operator of the job. Its token is the job's own.
Role = Literal["", "worker", "watch", "shard"]
ROLES: tuple[Role, ...] = get_args(Role)
#: The role from whose token each role's token is derived. A shard must be able to check the proofs of workers.
_ABOVE: dict[Role, Role] = {"worker": "shard", "shard": "", "watch": ""}
_OF_A_ROLE = re.compile(rb"(worker|watch|shard):[0-9a-f]{64}")


def role_of(token: bytes) -> Role:
    """Return the role of a token. It is empty for a job's own token."""
    found = _OF_A_ROLE.fullmatch(token)
    return next(role for role in ROLES if role == (found[1].decode() if found else ""))


def token_for(role: Role, token: bytes) -> bytes:
    """Return the token of a role that a token allows. Raise ValueError if it does not allow the role."""
    held = role_of(token)
    if role == held:
        return token
    if not role:
        raise ValueError(f"This token is only for the role {held}: give the job's own token.")
    try:
        above = token_for(_ABOVE[role], token)
    except ValueError:
        raise ValueError(
            f"This token is only for the role {held}: "
            f"give the job's own token, or one that `paceline token --role {role}` makes."
        ) from None
    return f"{role}:{hmac.digest(above, f'paceline {role}'.encode(), 'sha256').hex()}".encode()
