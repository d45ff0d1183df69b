"""Trace events: one small schema for every driver of a policy.

Each event is a JSON object on its own line, `{"event": "granted", "time": 1.5, "worker": 3, …}`. Times are seconds
since the run began; versions number the Applies. Worker, incarnation and iteration identify an update. Fields that
were added later have defaults, so that old traces can be read. In a trace without incarnations, all of them are 1.
JSON cannot hold a loss that is not finite: it is written as "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

#: What identifies an update: its worker, its worker's incarnation, and its iteration.
Identity: TypeAlias = tuple[int, int, int]


class Began(NamedTuple):
    """A run began. A file can hold several runs."""

    time: float
    cluster: str
    policy: str
    apply: str
    seed: int


class Awaited(NamedTuple):
    """A job that has not begun waits for workers."""

    time: float
    joined: int  # workers that have joined so far
    missing: int  # workers that must still join


class Described(NamedTuple):
    """The model that the job trains became known."""

    time: float
    elements: int  # of the model: its parameters and statistics, of four bytes each
    optimizer: str  # with its settings, such as "SGD(lr=0.1, momentum=0.9)"


class Joined(NamedTuple):
    """A worker became a member. When a worker returns, it is a new incarnation."""

    time: float
    worker: int
    incarnation: int = 1


class Granted(NamedTuple):
    """A worker may run its next iteration."""

    time: float
    worker: int
    batch_size: int | None
    progress_gap: int  # the number of iterations by which the worker is ahead of the slowest member


class Pulling(NamedTuple):
    """The transfer of a worker's pull started."""

    time: float
    worker: int


class Pulled(NamedTuple):
    """A worker has pulled the model, and starts to compute."""

    time: float
    worker: int
    version: int


class Computed(NamedTuple):
    """A worker has computed its gradient, and is ready to push it.

    seconds: the time spent computing, as the worker reports it. It is set where the driver cannot observe the end of
    the pull; Pulled is then reported too late.
    """

    time: float
    worker: int
    seconds: float | None = None


class Turned(NamedTuple):
    """A worker's turn to push began."""

    time: float
    worker: int


class Pushing(NamedTuple):
    """The transfer of a worker's push started."""

    time: float
    worker: int


class Arrived(NamedTuple):
    """A push has arrived completely."""

    time: float
    worker: int
    iteration: int
    batch_size: int
    loss: float | None = None  # as the worker reports it
    incarnation: int = 1


class Applied(NamedTuple):
    """Updates were applied to the model. The four tuples have an entry for each update."""

    time: float
    version: int
    workers: tuple[int, ...]
    iterations: tuple[int, ...]
    staleness: tuple[int, ...]
    incarnations: tuple[int, ...] = ()  # empty in an old trace, where all incarnations are 1


class Kept(NamedTuple):
    """An update was kept for later."""

    time: float
    worker: int
    iteration: int
    slot: int
    incarnation: int = 1


class Discarded(NamedTuple):
    """An update was discarded."""

    time: float
    worker: int
    iteration: int
    incarnation: int = 1


class Clipped(NamedTuple):
    """An update was much larger than usual, and is scaled down by this factor."""

    time: float
    worker: int
    iteration: int
    factor: float
    incarnation: int = 1


class Cancelled(NamedTuple):
    """A worker's iteration was cancelled."""

    time: float
    worker: int


class Left(NamedTuple):
    """A worker is no longer a member."""

    time: float
    worker: int
    lost: bool = False  # whether it left without a message: its lease expired, or it violated the protocol


class Used(NamedTuple):
    """The use of the servers' links changed."""

    time: float
    direction: str  # "in" (pushes) or "out" (pulls)
    fraction: float  # the share of the links' rate that is in use from now on


class Progressed(NamedTuple):
    """The progress of the whole job, in samples."""

    time: float
    epoch: int  # counts from 0
    done: int  # samples whose updates changed the model
    total: int  # 0 if the job does not know how many epochs there will be


class Saved(NamedTuple):
    """A checkpoint of this version was written."""

    time: float
    version: int
    seconds: float | None = None  # that it took to write it


class Measured(NamedTuple):
    """A worker reported a metric, such as an accuracy or a validation loss."""

    time: float
    worker: int
    kind: str
    value: float


Event: TypeAlias = (
    Began
    | Awaited
    | Described
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
    | Clipped
    | Cancelled
    | Left
    | Used
    | Progressed
    | Saved
    | Measured
)

#: Every kind of event, by the name it has in a trace.
KINDS: dict[str, Any] = {
    kind.__name__.lower(): kind
    for kind in (
        Began,
        Awaited,
        Described,
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
        Clipped,
        Cancelled,
        Left,
        Used,
        Progressed,
        Saved,
        Measured,
    )
}
#: The name of every kind of event.
NAMES: dict[type, str] = {kind: name for name, kind in KINDS.items()}


def identities(
    workers: tuple[int, ...], iterations: tuple[int, ...], incarnations: tuple[int, ...]
) -> Iterable[Identity]:
    """Return the identities of the updates in an Applied event."""
    return zip(workers, incarnations or (1,) * len(workers), iterations, strict=True)


def in_json(value: Any) -> Any:
    """Convert a value for JSON. A float that is not finite becomes a string that `float` can parse."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def as_line(event: Event) -> str:
    """Return the event as one line of JSON. Equal events give equal lines on every machine."""
    fields = {"event": type(event).__name__.lower()} | event._asdict()
    try:
        return json.dumps(fields, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps({name: in_json(value) for name, value in fields.items()}, separators=(",", ":"))


def from_line(line: str) -> Event:
    """Return the event that a line of JSON describes."""
    fields = json.loads(line)
    for name in ("loss", "value"):
        if isinstance(fields.get(name), str):
            fields[name] = float(fields[name])
    kind: Callable[..., Event] = KINDS[fields.pop("event")]
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
