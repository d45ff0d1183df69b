"""Updates that have arrived, and of which it is not decided yet whether they count."""

from __future__ import annotations

from typing import Generic, TypeVar

Noted = TypeVar("Noted")


class Unsettled(Generic[Noted]):
    """What was noted of each update between its arrival and its being applied, kept or discarded.

    It holds no more updates than the server itself must hold. Two incarnations of one worker may each have an update
    of the same number; the one that came first is settled first.
    """

    def __init__(self) -> None:
        self._notes: dict[tuple[int, int], Noted] = {}
        self._twins: list[tuple[tuple[int, int], Noted]] = []  # of one name with those: another incarnation's

    def __len__(self) -> int:
        return len(self._notes) + len(self._twins)

    def add(self, worker: int, iteration: int, note: Noted) -> None:
        name = (worker, iteration)
        if name in self._notes:
            self._twins.append((name, note))
        else:
            self._notes[name] = note

    def settle(self, worker: int, iteration: int) -> Noted | None:
        """What was noted of an update that waits no longer; None if it was settled before."""
        name = (worker, iteration)
        note = self._notes.pop(name, None)
        for twin in self._twins:
            if twin[0] == name:
                self._twins.remove(twin)
                self._notes[name] = twin[1]
                break
        return note

    def settle_all(self) -> list[Noted]:
        """Of every update that is left."""
        left = [*self._notes.values(), *(note for _, note in self._twins)]
        self._notes.clear()
        self._twins.clear()
        return left
