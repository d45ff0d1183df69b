"""Observers of a run. An observer has a method for each kind of trace event, which is called with the event's fields.

No event object is created for an observer that does not need one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from paceline.observe.trace import KINDS, NAMES, Event


class Observer:
    """An observer that ignores all events. Subclasses override the methods of the events that they need."""

    def began(self, time: float, cluster: str, policy: str, apply: str, seed: int) -> None: ...

    def awaited(self, time: float, joined: int, missing: int) -> None: ...

    def described(self, time: float, elements: int, optimizer: str) -> None: ...

    def joined(self, time: float, worker: int, incarnation: int = 1) -> None: ...

    def granted(self, time: float, worker: int, batch_size: int | None, progress_gap: int) -> None: ...

    def pulling(self, time: float, worker: int) -> None: ...

    def pulled(self, time: float, worker: int, version: int) -> None: ...

    def computed(self, time: float, worker: int, seconds: float | None = None) -> None: ...

    def turned(self, time: float, worker: int) -> None: ...

    def pushing(self, time: float, worker: int) -> None: ...

    def arrived(
        self,
        time: float,
        worker: int,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None: ...

    def applied(
        self,
        time: float,
        version: int,
        workers: tuple[int, ...],
        iterations: tuple[int, ...],
        staleness: tuple[int, ...],
        incarnations: tuple[int, ...] = (),
    ) -> None: ...

    def kept(self, time: float, worker: int, iteration: int, slot: int, incarnation: int = 1) -> None: ...

    def discarded(self, time: float, worker: int, iteration: int, incarnation: int = 1) -> None: ...

    def clipped(self, time: float, worker: int, iteration: int, factor: float, incarnation: int = 1) -> None: ...

    def cancelled(self, time: float, worker: int) -> None: ...

    def left(self, time: float, worker: int, lost: bool = False) -> None: ...

    def used(self, time: float, direction: str, fraction: float) -> None: ...

    def progressed(self, time: float, epoch: int, done: int, total: int) -> None: ...

    def saved(self, time: float, version: int, seconds: float | None = None) -> None: ...

    def measured(self, time: float, worker: int, kind: str, value: float) -> None: ...


class Recorder(Observer):
    """An observer that creates a trace event for each call and passes it to a function."""

    def __init__(self, write: Callable[[Event], None]) -> None:
        def record(kind: Callable[..., Event], *fields: Any) -> None:
            write(kind(*fields))

        for name, kind in KINDS.items():
            setattr(self, name, partial(record, kind))


class Tee(Observer):
    """An observer that passes each call to two others."""

    def __init__(self, first: Observer, second: Observer) -> None:
        def both(one: Callable[..., None], other: Callable[..., None], *fields: Any) -> None:
            one(*fields)
            other(*fields)

        for name in KINDS:
            hearing = [getattr(each, name) for each in (first, second) if _hears(each, name)]
            if hearing:  # most observers ignore most kinds of events
                setattr(self, name, partial(both, *hearing) if len(hearing) == 2 else hearing[0])


def _hears(observer: Observer, name: str) -> bool:
    """Return whether an observer has a method of its own for this kind of event."""
    return getattr(getattr(observer, name), "__func__", None) is not getattr(Observer, name)


def replay(events: Iterable[Event], observer: Observer, later: float = 0.0) -> None:
    """Call the observer for each event of a trace. later: seconds to add to all times."""
    for event in events:
        getattr(observer, NAMES[type(event)])(event[0] + later, *event[1:])
