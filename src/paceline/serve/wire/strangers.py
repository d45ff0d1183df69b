"""Which connections may be in their handshake. Anyone can open a connection, so their number and time are limited.

A *stranger* is a connection whose peer has not proved yet that it knows the job's token. A newcomer is never refused.
If there are too many strangers, the oldest one goes: an honest peer ends its handshake within a round trip or two, so
the oldest stranger is the least likely to be honest. It is chosen from the address with the most strangers, so that one
address cannot displace the peers of another.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
MAX_STRANGERS = 512  # from all addresses
MAX_OF_ADDRESS = 256  # many honest workers may share an address, behind NAT or on one machine
#: A stranger is not displaced within this time. It covers a round trip around the world and a busy machine.
GRACE_SECONDS = 0.5
#: For the first byte of a peer that speaks first, and for the Proof, which is one packet. It covers a round trip of
#: half a second (a satellite link) and two lost packets, each of which TCP repeats after a second.
ANSWER_SECONDS = 3.0
HANDSHAKE_SECONDS = 10.0  # for everything until the Proof, with the handshake of TLS


class Strangers(Generic[Key]):
    """The connections in their handshake, by address and age. It keeps no clock and closes nothing."""

    def __init__(self, total: int = MAX_STRANGERS, of_address: int = MAX_OF_ADDRESS) -> None:
        self._total, self._of_address = total, of_address
        self._since: dict[Key, float] = {}  # in the order of their arrival
        self._address: dict[Key, str] = {}
        self._at: dict[str, dict[Key, None]] = {}  # address → its strangers, the oldest first

    def __len__(self) -> int:
        return len(self._since)

    def enter(self, key: Key, address: str, now: float) -> list[Key]:
        """Add a newcomer. Return the strangers to close, which are no longer counted.

        Strangers within their grace stay, even if there are too many from one address. `pause` keeps the total bounded.
        """
        group = group_of(address)
        displaced = []
        while len(self._since) >= self._total and self._is_past_grace(oldest := self._oldest_at(self._largest()), now):
            self.leave(oldest)
            displaced.append(oldest)
        while self._has_quota(group) and self._is_past_grace(oldest := self._oldest_at(group), now):
            self.leave(oldest)
            displaced.append(oldest)
        self._since[key], self._address[key] = now, group
        self._at.setdefault(group, {})[key] = None
        return displaced

    def pause(self, now: float) -> float:
        """Return how long to wait before the next newcomer is accepted. It is 0, unless all places are in grace."""
        if len(self._since) < self._total or self._is_past_grace(oldest := self._oldest_at(self._largest()), now):
            return 0.0
        return self._since[oldest] + GRACE_SECONDS - now

    def leave(self, key: Key) -> None:
        """Remove a connection: it has ended, or its peer is no longer a stranger."""
        if self._since.pop(key, None) is not None:
            group = self._address.pop(key)
            del self._at[group][key]
            if not self._at[group]:
                del self._at[group]

    def displace(self) -> Key | None:
        """Remove and return the stranger to close if the system has no room for another connection."""
        if not self._since:
            return None
        oldest = self._oldest_at(self._largest())
        self.leave(oldest)
        return oldest

    def _has_quota(self, group: str) -> bool:
        return len(self._at.get(group, ())) >= self._of_address

    def _is_past_grace(self, key: Key, now: float) -> bool:
        return now >= self._since[key] + GRACE_SECONDS

    def _largest(self) -> str:
        """Return the address with the most strangers."""
        return max(self._at, key=lambda group: len(self._at[group]))

    def _oldest_at(self, group: str) -> Key:
        return next(iter(self._at[group]))


def group_of(address: str) -> str:
    """Return the addresses that count as one: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))  # a host may choose any address in it
