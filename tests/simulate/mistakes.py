"""Deliberate mistakes in a JobState. Seeded runs must find each of them, or they show nothing."""

from __future__ import annotations

from dataclasses import replace

from paceline.job import JobState, events, instructions
from paceline.job.events import Event
from paceline.job.instructions import Instruction
from paceline.job.quiesce import Quiesce
from paceline.job.samples import Samples
from paceline.job.saving import PutOff


class LosesGrant(JobState):
    """A worker that comes back is not told again of its Grant."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        out = super().handle(event, now)
        if isinstance(event, events.WorkerResumed):
            return [each for each in out if not isinstance(each, instructions.SendGrant)]
        return out


class ExtendsNoLease(JobState):
    """A coordinator that was held up believes that the workers were silent meanwhile."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        return super().handle(events.TimePassed(now) if isinstance(event, events.TimePassed) else event, now)


class Generous(Samples):
    def abandoned(self, worker: int) -> None:
        """Also those come back whose update has arrived, and will still be applied."""
        for update, ranges in self._arrived.items():
            if getattr(update, "worker", None) == worker:
                self._returned.extend(ranges)
        super().abandoned(worker)


class GivesTwice(JobState):
    """The samples of a worker that leaves are given to others, even if its update counts."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        out = super().handle(event, now)
        if self.samples is not None:
            self.samples.__class__ = Generous
        return out


class Impatient(Quiesce[PutOff]):
    @property
    def is_quiet(self) -> bool:
        """As soon as it is awaited."""
        return self.is_awaited


class SavesHalf(JobState):
    """A checkpoint does not wait until the shards are done with the updates under way."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        self._quiesce.__class__ = Impatient
        return super().handle(event, now)


class TakesAnyGeneration(JobState):
    """A worker of an earlier generation goes on as if it were a member of this one."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        if isinstance(event, events.WorkerResumed):
            event = replace(event, generation=self.config.generation)
        return super().handle(event, now)


MISTAKES: dict[str, type[JobState]] = {
    "loses-grant": LosesGrant,
    "extends-no-lease": ExtendsNoLease,
    "gives-twice": GivesTwice,
    "saves-half": SavesHalf,
    "takes-any-generation": TakesAnyGeneration,
}
