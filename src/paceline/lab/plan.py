"""The plan of a run in a lab, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.observe.summary import Report
from paceline.observe.trace import Event


@dataclass(frozen=True)
class LabPlan:
    """A run: its policy, its length, and how workers compute and push."""

    policy: str
    iterations: int = 20  # of each worker, on average
    streamed: bool = False
    overlap: bool = False  # push gradients while they are computed
    seed: int = 0
    exactly: bool = False  # each worker does exactly this number of iterations, and the last model is checked
    sampled: float = 0.0  # seconds between samples of the workers' byte counters; 0: none are taken
    script: tuple[str, ...] = ()  # a training script and its arguments, to run instead of synthetic workers

    @property
    def to_the_end(self) -> bool:
        """Whether the run ends when all workers have left, instead of after a number of updates."""
        return self.exactly or bool(self.script)


@dataclass(frozen=True)
class Cost:
    """The traffic and the CPU time of a run, after its warm-up."""

    gigabytes: float  # sent over the hosts' links
    cpu_seconds: float  # of all processes of the job

    @property
    def cpu_seconds_per_gigabyte(self) -> float:
        return self.cpu_seconds / self.gigabytes if self.gigabytes else 0.0


@dataclass(frozen=True)
class LabResult:
    """The measurements of a run."""

    report: Report
    cost: Cost
    seconds: float  # from the first event to the last
    apply: str = "whole"
    events: list[Event] = field(default_factory=list, repr=False)
    carried: dict[int, list[tuple[float, int, int]]] = field(default_factory=dict, repr=False)
    # For each worker, if `sampled` is set: the time, and the bytes that its host had received and sent by then
