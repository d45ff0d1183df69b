"""Deliberate mistakes in a JobState. Seeded runs must find each of them; otherwise the runs prove nothing."""

from __future__ import annotations

from dataclasses import replace

from paceline.job import JobState, events, instructions
from paceline.job.events import Event
from paceline.job.instructions import Instruction
from paceline.job.quiesce import Quiesce
from paceline.job.samples import Samples
from paceline.job.saving import Postponed


class LosesGrant(JobState):
    """A worker that reconnects does not get its Grant again."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        out = super().handle(event, now)
        if isinstance(event, events.WorkerResumed):
            return [each for each in out if not isinstance(each, instructions.SendGrant)]
        return out


class ExtendsNoLease(JobState):
    """A coordinator that was stopped believes that the workers were silent meanwhile."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        return super().handle(events.TimePassed(now) if isinstance(event, events.TimePassed) else event, now)


class Generous(Samples):
    def abandoned(self, worker: int) -> None:
        """Return also the samples of an update that has arrived and will still be applied."""
        for update, ranges in self._arrived.items():
            if getattr(update, "worker", None) == worker:
                self._returned.extend(ranges)
        super().abandoned(worker)


class GivesTwice(JobState):
    """The samples of a worker that leaves are reassigned even if its update counts."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        out = super().handle(event, now)
        if self.samples is not None:
            self.samples.__class__ = Generous
        return out


class Impatient(Quiesce[Postponed]):
    @property
    def is_quiet(self) -> bool:
        """Whether quiet is awaited, instead of whether it has been reached."""
        return self.is_awaited


class SavesHalf(JobState):
    """A checkpoint does not wait until the shards have finished the updates under way."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        self._quiesce.__class__ = Impatient
        return super().handle(event, now)


class TakesAnyGeneration(JobState):
    """A worker of an earlier generation is accepted as a member of this one."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        if isinstance(event, events.WorkerResumed):
            event = replace(event, generation=self.config.generation)
        return super().handle(event, now)


class KeepsOverwrittenSamples(JobState):
    """Samples count as done although a worker has replaced the weights that they had changed."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        out = super().handle(event, now)
        kept = {"samples": self.samples.as_json() if self.samples else None}
        return [
            instructions.BeginAgain(each.provider, {**each.snapshot, **kept})
            if isinstance(each, instructions.BeginAgain)
            else each
            for each in out
        ]


MISTAKES: dict[str, type[JobState]] = {
    "loses-grant": LosesGrant,
    "extends-no-lease": ExtendsNoLease,
    "gives-twice": GivesTwice,
    "saves-half": SavesHalf,
    "takes-any-generation": TakesAnyGeneration,
    "keeps-overwritten-samples": KeepsOverwrittenSamples,
}
