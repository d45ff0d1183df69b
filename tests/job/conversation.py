"""A conversation with a JobState. The test moves the clock and sends the events of workers and shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from paceline.job import JobConfig, JobState, SaveEvery, events, instructions
from paceline.job.events import Event
from paceline.job.instructions import Instruction
from paceline.observe.observer import Recorder
from paceline.policies import Policy, make
from paceline.policies.asp import ASP
from paceline.policies.contract import Cancel, Decisions, Grant, WorkerId

Kind = TypeVar("Kind")
GENERATION = "this generation"


class Conversation:
    """A job and its workers. `connections` holds the current connection of each worker."""

    def __init__(
        self,
        policy: str | Policy = "asp",
        workers: int = 1,
        restored: Mapping[str, Any] | None = None,
        save: int | None = None,
        streams: bool = False,
        **more: Any,
    ) -> None:
        self.now = 0.0
        self.trace: list[Any] = []
        self.log: list[tuple[Event, float]] = []
        made = make(policy) if isinstance(policy, str) else policy
        made.streamed = streams and made.streamable
        self.config = JobConfig(
            workers=workers,
            save=SaveEvery(updates=save) if save else None,
            policy=policy if isinstance(policy, str) else type(policy).__name__,
            streams=made.streamed or made.pipelined,
            generation=GENERATION,
            **more,
        )
        self.state = JobState(made, self.config, Recorder(self.trace.append), restored, 0.0)
        self.shards = range(self.config.shards)
        self.connections: dict[int, int] = {}
        self.incarnations: dict[int, int] = {}
        self._last_connection = 0
        self.unfiltered: list[Instruction] = []  # the instructions for the last event, with log lines

    def tell(self, event: Event, at: float | None = None) -> list[Instruction]:
        """Send an event to the job and return the instructions, without log lines."""
        self.now = self.now if at is None else at
        self.log.append((event, self.now))
        out = self.unfiltered = self.state.handle(event, self.now)
        for each in out:
            if isinstance(each, instructions.SendWelcome):
                self.incarnations[each.worker] = each.incarnation
        return [each for each in out if not isinstance(each, instructions.LogLine)]

    def connect(self, worker: int) -> int:
        """Open a new connection for a worker, and return its number."""
        self._last_connection += 1
        self.connections[worker] = self._last_connection
        return self._last_connection

    def join(self, worker: int, at: float | None = None) -> list[Instruction]:
        return self.tell(events.WorkerJoined(self.connect(worker), worker), at)

    def begin(self, workers: int) -> list[Instruction]:
        """Have `workers` workers join, and the first one send the weights. Return the answer to the last event."""
        out: list[Instruction] = []
        for worker in range(workers):
            out = self.join(worker)
        if not self.state.has_begun:
            for shard in self.shards:
                out = self.tell(events.ShardInitialized(shard, 0, self.incarnations[0]))
        return out

    def resume(self, worker: int, generation: str = GENERATION, genuine: bool = True) -> list[Instruction]:
        identity = (worker, self.incarnations[worker], generation, genuine)
        return self.tell(events.WorkerResumed(self.connect(worker), *identity))

    def hang_up(self, worker: int) -> list[Instruction]:
        return self.tell(events.ConnectionLost(self.connections[worker]))

    def request(self, worker: int, number: int, count: int = 2, size: int = 8, epochs: int = 1) -> list[Instruction]:
        return self.tell(events.SamplesRequested(self.connections[worker], number, count, size, epochs))

    def ready(
        self, worker: int, iteration: int, *taken: int, version: int = 0, batch: int = 2, seconds: float = 0.1
    ) -> list[Instruction]:
        computed = (iteration, version, batch, seconds, None, taken)
        return self.tell(events.GradientComputed(self.connections[worker], *computed))

    def arrive(self, worker: int, iteration: int, *shards: int) -> list[Instruction]:
        """Have all shards, or only the given ones, receive an update. Return the answer to the last event."""
        out: list[Instruction] = []
        for shard in shards or self.shards:
            out = self.tell(events.UpdateArrived(shard, worker, self.incarnations[worker], iteration))
        return out

    def push(self, worker: int, iteration: int, *taken: int, version: int = 0) -> list[Instruction]:
        """Have a worker compute a gradient, and all shards receive it. Return all instructions."""
        return self.ready(worker, iteration, *taken, version=version) + self.arrive(worker, iteration)

    def heartbeat(self, worker: int, at: float) -> list[Instruction]:
        return self.tell(events.WorkerAlive(self.connections[worker]), at)

    def tick(self, at: float, due: float | None = None) -> list[Instruction]:
        """Have all shards send a heartbeat, and then let time pass."""
        for shard in self.shards:
            self.tell(events.ShardAlive(shard), at)
        return self.tell(events.TimePassed(at if due is None else due), at)


def only(kind: type[Kind], out: list[Instruction]) -> list[Kind]:
    """Return the instructions of one kind."""
    return [each for each in out if isinstance(each, kind)]


def kinds(out: list[Instruction]) -> list[str]:
    """Return the names of the kinds of instructions, in order."""
    return [type(each).__name__ for each in out]


class Obedient(ASP):
    """A policy that grants or cancels an iteration when a worker reports a metric of that name."""

    def measured(self, kind: str, subject: object, value: float, now: float) -> Decisions:
        assert isinstance(subject, WorkerId)
        if kind == "grant":
            return [Grant(subject)]
        self.promised.pop(subject, None)
        return [Cancel(subject)]
