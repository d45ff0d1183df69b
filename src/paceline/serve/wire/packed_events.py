"""Trace events in MessagePack, as subscribers receive them. Lines of JSON would take several times as long."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from paceline.observe.trace import KINDS, Event

NAMES: dict[type, str] = {kind: name for name, kind in KINDS.items()}
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode


def pack(event: Event) -> bytes:
    """Return an array of the event's name and its fields."""
    return _encode((NAMES[type(event)], *event))


def unpack(packed: bytes) -> Event:
    """Return the event that `pack` has packed."""
    name, *fields = _decode(packed)
    kind: Callable[..., Event] = KINDS[name]
    return kind(*[tuple(field) if isinstance(field, list) else field for field in fields])
