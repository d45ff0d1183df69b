"""Trace events: one small schema, whoever drives the policy.

Each event is one JSON object on a line of its own, `{"event": "granted", "time": 1.5, "worker": 3, …}`. Times are
seconds since the run began; versions number the Applies.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias


class Began(NamedTuple):
    """A run begins. A file may hold several."""

    time: float
    cluster: str
    policy: str
    apply: str
    seed: int


class Joined(NamedTuple):
    """A worker became a member."""

    time: float
    worker: int


class Granted(NamedTuple):
    """A worker was let go; `progress_gap` is how many iterations it is ahead of the slowest member."""

    time: float
    worker: int
    batch_size: int | None
    progress_gap: int


class Pulling(NamedTuple):
    """A worker's pull is on the link."""

    time: float
    worker: int


class Pulled(NamedTuple):
    """A worker has the model, and begins to compute."""

    time: float
    worker: int
    version: int


class Computed(NamedTuple):
    """A worker has its gradient, and asks to push it."""

    time: float
    worker: int


class Turned(NamedTuple):
    """A worker was told to push."""

    time: float
    worker: int


class Pushing(NamedTuple):
    """A worker's push is on the link."""

    time: float
    worker: int


class Arrived(NamedTuple):
    """A whole push is in."""

    time: float
    worker: int
    iteration: int
    batch_size: int


class Applied(NamedTuple):
    """The model changed. Of each update: its worker, its iteration and its staleness."""

    time: float
    version: int
    workers: tuple[int, ...]
    iterations: tuple[int, ...]
    staleness: tuple[int, ...]


class Kept(NamedTuple):
    """An update was put aside."""

    time: float
    worker: int
    iteration: int
    slot: int


class Discarded(NamedTuple):
    """An update was dropped."""

    time: float
    worker: int
    iteration: int


class Cancelled(NamedTuple):
    """A worker was told to abandon its iteration."""

    time: float
    worker: int


class Left(NamedTuple):
    """A worker is no longer a member."""

    time: float
    worker: int


class Used(NamedTuple):
    """From now on, this share of the servers' links is in use. `direction`: "in" (pushes) or "out" (pulls)."""

    time: float
    direction: str
    fraction: float


Event: TypeAlias = (
    Began
    | Joined
    | Granted
    | Pulling
    | Pulled
    | Computed
    | Turned
    | Pushing
    | Arrived
    | Applied
    | Kept
    | Discarded
    | Cancelled
    | Left
    | Used
)

#: Every kind of event, by the name it has in a trace.
KINDS: dict[str, Any] = {
    kind.__name__.lower(): kind
    for kind in (
        Began,
        Joined,
        Granted,
        Pulling,
        Pulled,
        Computed,
        Turned,
        Pushing,
        Arrived,
        Applied,
        Kept,
        Discarded,
        Cancelled,
        Left,
        Used,
    )
}


def as_line(event: Event) -> str:
    """The event as one line of JSON, the same for the same event on every machine."""
    return json.dumps({"event": type(event).__name__.lower()} | event._asdict(), separators=(",", ":"))


def from_line(line: str) -> Event:
    """The event that a line describes."""
    fields = json.loads(line)
    kind: Callable[..., Event] = KINDS[fields.pop("event")]
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
