"""Which phase of a round each client is in, when: training, pushing, waiting, pulling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.observe.observer import Observer

Phase = Literal["train", "push", "wait", "pull"]


@dataclass(frozen=True)
class Span:
    """A client was in this phase from then till then."""

    client: int
    phase: Phase
    begin: float
    end: float


class Phases(Observer):
    """Each client's phases, one after the other."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._now: dict[int, tuple[Phase, float]] = {}

    def _enter(self, client: int, phase: Phase, time: float) -> None:
        before = self._now.get(client)
        if before and before[1] < time:
            self.spans.append(Span(client, before[0], before[1], time))
        self._now[client] = (phase, time)

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
        self._now.pop(worker, None)
