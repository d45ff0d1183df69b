"""Records when each client of a simulated run trains, pushes, waits and pulls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.observe.observer import Observer

Phase = Literal["train", "push", "wait", "pull"]


@dataclass(frozen=True)
class Span:
    """The time from `begin` to `end` that a client spent in one phase."""

    client: int
    phase: Phase
    begin: float
    end: float


class Phases(Observer):
    """An observer that records the phases of every client in order."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._current: dict[int, tuple[Phase, float]] = {}  # by client: its phase, and when that began

    def _enter(self, client: int, phase: Phase, time: float) -> None:
        if current := self._current.get(client):
            old_phase, begin = current
            if begin < time:
                self.spans.append(Span(client, old_phase, begin, time))
        self._current[client] = (phase, time)

    def pulling(self, time: float, worker: int) -> None:
        self._enter(worker, "pull", time)

    def pulled(self, time: float, worker: int, version: int) -> None:
        self._enter(worker, "train", time)

    def pushing(self, time: float, worker: int) -> None:
        self._enter(worker, "push", time)

    def arrived(
        self,
        time: float,
        worker: int,
        iteration: int,
        batch_size: int,
        loss: float | None = None,
        incarnation: int = 1,
    ) -> None:
        self._enter(worker, "wait", time)

    def cancelled(self, time: float, worker: int) -> None:
        self._enter(worker, "wait", time)

    def left(self, time: float, worker: int, lost: bool = False) -> None:
        self._current.pop(worker, None)
