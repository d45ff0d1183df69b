"""Trace events: one small schema, whoever drives the policy.

Each event is one JSON object on a line of its own, `{"event": "granted", "time": 1.5, "worker": 3, …}`. Times are
seconds since the run began; versions number the Applies. Worker, incarnation and iteration identify an update. Fields
that came later have defaults, so old traces can be read. An old trace names no incarnations; there all of them are 1.
JSON has no number for a loss that is not finite: it is written as "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

#: What identifies an update: its worker, its worker's incarnation, and its iteration.
Identity: TypeAlias = tuple[int, int, int]


class Began(NamedTuple):
    """A run begins. A file may hold several."""

    time: float
    cluster: str
    policy: str
    apply: str
    seed: int


class Joined(NamedTuple):
    """A worker became a member. One that comes back is a new incarnation."""

    time: float
    worker: int
    incarnation: int = 1


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
    """A worker has its gradient, and asks to push it.

    `seconds`: how long it says it has computed, where nobody saw it begin. There, Pulled is told late.
    """

    time: float
    worker: int
    seconds: float | None = None


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
    loss: float | None = None  # as the worker told it
    incarnation: int = 1


class Applied(NamedTuple):
    """The model changed. Of each update: its worker, its iteration, its staleness and its worker's incarnation."""

    time: float
    version: int
    workers: tuple[int, ...]
    iterations: tuple[int, ...]
    staleness: tuple[int, ...]
    incarnations: tuple[int, ...] = ()  # empty in an old trace: then all are 1


class Kept(NamedTuple):
    """An update was put aside."""

    time: float
    worker: int
    iteration: int
    slot: int
    incarnation: int = 1


class Discarded(NamedTuple):
    """An update was dropped."""

    time: float
    worker: int
    iteration: int
    incarnation: int = 1


class Cancelled(NamedTuple):
    """A worker was told to abandon its iteration."""

    time: float
    worker: int


class Left(NamedTuple):
    """A worker is no longer a member. `lost`: it did not say goodbye, but fell silent or broke the rules."""

    time: float
    worker: int
    lost: bool = False


class Used(NamedTuple):
    """From now on, this share of the servers' links is in use. `direction`: "in" (pushes) or "out" (pulls)."""

    time: float
    direction: str
    fraction: float


class Progressed(NamedTuple):
    """So many samples of the whole job have changed the model, of so many in all; `epoch` counts from 0."""

    time: float
    epoch: int
    done: int
    total: int


class Measured(NamedTuple):
    """A worker has measured something: an accuracy, a validation loss."""

    time: float
    worker: int
    kind: str
    value: float


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
    | Progressed
    | Measured
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
        Progressed,
        Measured,
    )
}


def identities(
    workers: tuple[int, ...], iterations: tuple[int, ...], incarnations: tuple[int, ...]
) -> Iterable[Identity]:
    """The identities of the updates that an Applied names."""
    return zip(workers, incarnations or (1,) * len(workers), iterations, strict=True)


def in_json(value: Any) -> Any:
    """The value as JSON can hold it: a float that is not finite becomes a word, which `float` reads again."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def as_line(event: Event) -> str:
    """The event as one line of JSON, the same for the same event on every machine."""
    fields = {"event": type(event).__name__.lower()} | event._asdict()
    try:
        return json.dumps(fields, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps({name: in_json(value) for name, value in fields.items()}, separators=(",", ":"))


def from_line(line: str) -> Event:
    """The event that a line describes."""
    fields = json.loads(line)
    for name in ("loss", "value"):
        if isinstance(fields.get(name), str):
            fields[name] = float(fields[name])
    kind: Callable[..., Event] = KINDS[fields.pop("event")]
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
