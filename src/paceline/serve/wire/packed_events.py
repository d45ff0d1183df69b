"""Trace events in MessagePack, as subscribers receive them. Lines of JSON would take several times as long."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.observe.trace import KINDS, NAMES, Event

_encode = msgspec.msgpack.Encoder().encode
_decoders: dict[str, Any] = {name: msgspec.msgpack.Decoder(kind) for name, kind in KINDS.items()}


def pack(event: Event) -> tuple[str, bytes]:
    """Return the name of the event, and its fields as an array."""
    return NAMES[type(event)], _encode(event)


def unpack(packed: tuple[str, bytes]) -> Event:
    """Return the event that `pack` has packed."""
    name, fields = packed
    event: Event = _decoders[name].decode(fields)
    return event
