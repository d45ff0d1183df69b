"""The happenings of a job: joins, departures, exclusions and checkpoints, as short sentences."""

from __future__ import annotations

from typing import Any

from paceline.observe.observer import Observer

MAX_HAPPENINGS = 100
TOGETHER = 1.0  # seconds; the same happening to another worker within this time is told in one sentence
MAX_NAMED = 4  # workers that a sentence names

#: For each kind, its words for one worker and for several.
WORDS = {
    "joined": ("joined", "joined"),
    "returned": ("came back", "came back"),
    "left": ("left", "left"),
    "lost": ("was lost: it sent nothing for longer than its lease, or its connection broke", "were lost"),
    "clipped": ("sent an update that was far too large, and was scaled down", "sent updates that were scaled down"),
    "readmitted": ("was readmitted", "were readmitted"),
}


class Happening:
    """One line of the list."""

    def __init__(self, time: float, kind: str, worker: Any, text: str) -> None:
        """text: of a happening that WORDS does not hold: a sentence, or what is said of the worker."""
        self.time, self.kind, self.text = time, kind, text
        self.last, self.workers = time, [worker]
        self.count = 1

    def sentence(self, noun: str) -> str:
        """Return the happening in words. noun: "worker" or "client"."""
        if self.text:
            return self.text if self.workers == [None] else f"{noun.capitalize()} {self.workers[0]} {self.text}."
        one, several = WORDS[self.kind]
        named = [str(worker) for worker in self.workers]
        if self.count == 1:
            return f"{noun.capitalize()} {named[0]} {one}."
        if self.count > MAX_NAMED:
            return f"{self.count:,} {noun}s {several}."
        return f"{noun.capitalize()}s {', '.join(named[:-1])} and {named[-1]} {several}."


class Happenings(Observer):
    """An observer that keeps the newest happenings."""

    def __init__(self) -> None:
        self.newest: list[Happening] = []
        self.lost = 0
        self.lost_now: dict[Any, float] = {}  # worker → since when it is lost
        self.excluded: dict[Any, str] = {}  # worker → why
        self.checkpoints: list[tuple[float, int]] = []  # time and version
        self._known: set[Any] = set()

    def as_rows(self, noun: str) -> list[list[Any]]:
        """Return the happenings as the page receives them, the newest first. noun: "worker" or "client"."""
        return [[round(each.time, 3), each.kind, each.sentence(noun)] for each in reversed(self.newest)]

    def add(self, time: float, kind: str, worker: Any = None, text: str = "") -> None:
        """Add a happening. Several workers to which the same happens at once share one line."""
        last = self.newest[-1] if self.newest else None
        if last and not text and last.kind == kind and not last.text and time - last.last <= TOGETHER:
            last.last, last.count = time, last.count + 1
            if len(last.workers) < MAX_NAMED:
                last.workers.append(worker)
            return
        self.newest.append(Happening(time, kind, worker, text))
        del self.newest[:-MAX_HAPPENINGS]

    def joined(self, time: float, worker: Any, incarnation: int = 1) -> None:
        self.add(time, "returned" if worker in self._known else "joined", worker)
        self._known.add(worker)
        self.lost_now.pop(worker, None)

    def left(self, time: float, worker: Any, lost: bool = False) -> None:
        if lost:
            self.lost += 1
            self.lost_now[worker] = time
        if worker not in self.excluded:
            self.add(time, "lost" if lost else "left", worker)

    def clipped(self, time: float, worker: Any, iteration: int, factor: float, incarnation: int = 1) -> None:
        self.add(time, "clipped", worker)

    def saved(self, time: float, version: int, seconds: float | None = None) -> None:
        self.checkpoints.append((time, version))
        del self.checkpoints[:-MAX_HAPPENINGS]
        self.add(time, "checkpoint", text=f"A checkpoint of version {version:,} was written.")

    def exclude(self, time: float, excluded: dict[Any, str]) -> None:
        """Note which workers the policy leaves out now, and why."""
        for worker in [each for each in self.excluded if each not in excluded]:
            self.add(time, "readmitted", worker)
        for worker, reason in excluded.items():
            if worker not in self.excluded:
                self.add(time, "excluded", worker, f"was excluded: {reason}")
        self.excluded = excluded
