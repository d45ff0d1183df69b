"""A whole job from a seed: its setting, its processes, its faults, and its outcome."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline import policies
from paceline.job import JobConfig, JobState
from paceline.job.accounting import Watcher
from paceline.observe.trace import Event
from paceline.policies import Policy
from paceline.simulate.clock import Clock
from paceline.simulate.protocol.faults import WORKER_FAULTS, ScheduledFault, add_second_faults, draw_faults
from paceline.simulate.protocol.server import SimulatedServer
from paceline.simulate.protocol.transport import SimulatedConnection
from paceline.simulate.protocol.worker import SimulatedWorker

#: The policies of the jobs. They are streamed in some jobs if they can be.
POLICIES = (
    "bsp",
    "bsp:backup=1",
    "bsp:fraction=0.6",
    "bsp:pipeline=true",
    "ksync:k=2",
    "kbatch:k=2",
    "asp",
    "ssp:staleness=2",
    "dssp:low=1,high=3",
    "r2sp",
    "r2sp:groups=2",
    "r2sp:patience=0.5",
    "safa",
    "fedbuff:k=1,discount=0",
    "filtered:policy=bsp",
    "fl-r2sp:groups=2",
    "groups:count=2",
    "rlp",
)
LIMIT = 3000.0  # virtual seconds within which a job must end
MakeState = Callable[[Policy, JobConfig, Watcher, Mapping[str, Any] | None, float], JobState]


@dataclass(frozen=True)
class Setting:
    """A job without its faults."""

    policy: str
    streamed: bool
    workers: int
    shards: int
    pieces: int  # pieces of each shard, if updates are streamed
    samples: int
    batch: int
    epochs: int
    lease: float
    save_every: int
    pace: tuple[float, ...]  # factor of each worker's compute time
    loss: float  # fraction of the messages between workers and shards that is lost
    loads: Literal["", "main", "all"] = ""  # the processes that load other weights after their first pull
    restore_seconds: float = 0.0  # that a shard takes at most to load its part of a checkpoint
    visits: int = 0  # parts of a shard, if workers push when they are told to visit it


@dataclass(frozen=True)
class SimulatedCheckpoint:
    """The checkpoint from which a server is restored."""

    version: int
    snapshot: Mapping[str, Any]
    counts: list[list[dict[int, int]]]  # shard → piece → sample → how often it has changed that piece


@dataclass
class GenerationTrace:
    """The trace of one generation, which began at this version."""

    version: int
    events: list[Event]


@dataclass
class ProtocolOutcome:
    """The outcome of a job."""

    setting: Setting
    faults: tuple[ScheduledFault, ...]
    problems: list[str] = field(default_factory=list)  # broken promises, as sentences
    traces: list[GenerationTrace] = field(default_factory=list)  # one for each generation
    seconds: float = 0.0


def draw_setting(rng: random.Random) -> Setting:
    """Return a small job under any policy."""
    policy = rng.choice(POLICIES)
    streamed = policies.make(policy).streamable and rng.random() < 0.6
    workers = rng.choice((1, 2, 3, 3, 4))
    return Setting(
        policy=policy,
        streamed=streamed,
        workers=workers,
        shards=rng.choice((1, 1, 2)),
        pieces=rng.choice((1, 2, 3)),
        samples=rng.choice((6, 12, 20)),
        batch=rng.choice((1, 2, 3)),
        epochs=rng.choice((1, 2)),
        lease=rng.choice((4.0, 8.0, 20.0)),
        save_every=rng.choice((1, 3, 8, 1000)),
        pace=tuple(rng.choice((0.5, 1.0, 1.0, 2.0)) for _ in range(workers)),
        loss=rng.choice((0.0, 0.0, 0.03)),
        visits=rng.choice((0, 1, 2)) if streamed else 0,
    )


class World:
    """Everything in one run: the processes, the disk, the faults and the outcome."""

    def __init__(
        self, setting: Setting, faults: tuple[ScheduledFault, ...], seed: int, make_state: MakeState | None
    ) -> None:
        self.setting, self.clock = setting, Clock()
        self.rng = random.Random(f"{seed} world")
        self.make_state: MakeState = make_state or JobState
        self.outcome = ProtocolOutcome(setting, faults)
        self.newest: SimulatedCheckpoint | None = None
        self.generations = 0
        self.over = False
        self.history: list[str] | None = None  # events and instructions, to examine a seed
        self._disk_is_full = False
        self._faulted: set[int] = set()  # workers that a fault has struck
        self._connections = 0
        self.server: SimulatedServer | None = SimulatedServer(self, random.Random(f"{seed} server"))
        self._starts = 0
        self._restarts = 0  # of the server that were planned
        self._seed = seed
        self.workers: list[SimulatedWorker] = []
        for number in range(setting.workers):
            self._start_worker(number)
        for fault in faults:
            self.clock.at(fault.time, self._strike, fault)

    def run(self) -> ProtocolOutcome:
        """Run the job to its end, and return its outcome."""
        while not self.over and self.clock.now < LIMIT and self.clock.run(most=500):
            pass
        self.outcome.seconds = self.clock.now
        self._check_outcome()
        return self.outcome

    # Called by processes

    def connect(self, worker: SimulatedWorker) -> SimulatedConnection | None:
        """Return a new connection to the server, or None if the server is down."""
        if self.server is None:
            return None
        self._connections += 1
        connection = SimulatedConnection(self._connections, worker, self.server, self.rng)
        self.server.accept(connection)
        return connection

    def begin_trace(self, version: int) -> list[Event]:
        """Begin the trace of a generation. Return the list to which its events are added."""
        self.outcome.traces.append(GenerationTrace(version, []))
        return self.outcome.traces[-1].events

    def store(self, version: int, snapshot: Mapping[str, Any], counts: list[list[dict[int, int]]]) -> str:
        """Write a checkpoint. Return an error, or "" if it was written."""
        if self._disk_is_full:
            self._disk_is_full = False
            return "the disk is full"
        self._check_parts(version, snapshot, counts)
        self.newest = SimulatedCheckpoint(version, snapshot, counts)
        return ""

    def provided(self, snapshot: Mapping[str, Any], counts: list[list[dict[int, int]]]) -> SimulatedCheckpoint:
        """Return the state that a job begins again with, after a worker has loaded other weights."""
        return SimulatedCheckpoint(int(snapshot["version"]), snapshot, counts)

    def _check_parts(self, version: int, snapshot: Mapping[str, Any], counts: list[list[dict[int, int]]]) -> None:
        """Check that all parts of a checkpoint agree: each piece counts the samples that are done, and no others."""
        done = snapshot["samples"]["trained"] if snapshot["samples"] else 0
        pieces = [piece for shard in counts for piece in shard]
        keeps = policies.make(self.setting.policy).keeps  # kept updates are applied again and again
        if not keeps and any(sum(piece.values()) != done for piece in pieces):
            text = f"The parts of checkpoint {version} do not agree that {done} samples are done: {counts}."
            self.outcome.problems.append(text)

    def resumed(self, number: int, generation: str, server_generation: str) -> None:
        """Check that a worker whose membership was resumed had joined this generation of the server."""
        if generation != server_generation:
            self.outcome.problems.append(f"Worker {number} of {generation} was accepted by another generation.")

    def end(self) -> None:
        """End the run: the job is done."""
        self.over = True
        self.clock.running = False

    def log(self, now: float, event: Any, instruction: Any) -> None:
        if self.history is not None:
            self.history.append(f"{now:9.3f} {event} → {instruction}")

    def given_up(self, number: int) -> None:
        """Check that a fault struck a worker that the server has given up."""
        if number not in self._faulted:
            self.outcome.problems.append(f"Worker {number} was given up, although no fault struck it.")

    def worker_ended(self, worker: SimulatedWorker) -> None:
        """Note that the process of a worker has ended by itself."""
        if worker.ended not in ("done", "killed") and "is alive" not in worker.ended:
            self.outcome.problems.append(f"Worker {worker.number} was refused: {worker.ended}")
        self.clock.at(self.clock.now + 1.0, self._restart_if_all_left)

    def _restart_if_all_left(self, _: None) -> None:
        """Restart the workers if all have ended before the job is done.

        The server may have returned to a checkpoint after the last worker left.
        """
        all_ended = all(worker.ended for worker in self.workers)
        if all_ended and not self.over and self.server and not self.server.state.is_done:
            self.restart_workers()

    # Faults

    def _start_worker(self, number: int) -> None:
        self._starts += 1
        self.workers.append(SimulatedWorker(self, number, random.Random(f"{self._seed} worker {self._starts}")))

    def _running_process(self, number: int) -> SimulatedWorker | None:
        """Return the newest running process of a worker, or None."""
        mine = [worker for worker in self.workers if worker.number == number % self.setting.workers]
        running = [worker for worker in mine if not worker.ended]
        return running[-1] if running else None

    def _strike(self, fault: ScheduledFault) -> None:
        worker, server, seconds = self._running_process(fault.target), self.server, fault.seconds
        if worker and fault.kind in WORKER_FAULTS:
            self._faulted.add(worker.number)
        match fault.kind:
            case "kill worker" if worker:
                worker.kill()
                self.clock.at(self.clock.now + seconds, lambda _: self._restart_worker(worker.number))
            case "stop worker" if worker:
                worker.process.stop(seconds)
            case "cut worker" if worker:
                worker.cut(seconds)
            case "twin" if worker:
                worker.cut(seconds)
                worker.process.stop(seconds)
                self._start_worker(worker.number)
            case "stop server" if server:
                server.process.stop(seconds)
            case "kill server" if server and self.newest:
                server.kill()
                self.server = None
                self._plan_restart(seconds)
            case "kill server" if server is None:  # while it restarts
                self._plan_restart(seconds)
            case "stop shard" if server and server.shard_processes:
                server.shard_processes[fault.target % len(server.shard_processes)].process.stop(min(seconds, 5.0))
            case "kill shard" if server and server.shard_processes and self.newest:
                server.lose_shard(fault.target)
            case "full disk":
                self._disk_is_full = True

    def _restart_worker(self, number: int) -> None:
        if not self.over and self._running_process(number) is None:
            self._start_worker(number)

    def restart_workers(self) -> None:
        """Restart the workers that have ended: the server may have returned to a version at which they were needed."""
        for number in range(self.setting.workers):
            self._restart_worker(number)

    def _plan_restart(self, seconds: float) -> None:
        """Restart the server after this time, unless it is killed again before."""
        self._restarts += 1
        number = self._restarts
        self.clock.at(self.clock.now + seconds, lambda _: self._restart_server() if number == self._restarts else None)

    def _restart_server(self) -> None:
        self.server = SimulatedServer(self, random.Random(f"{self._seed} server {self.generations}"))
        self.restart_workers()

    # The outcome

    def _check_outcome(self) -> None:
        problems, setting = self.outcome.problems, self.setting
        if not self.over:
            running = [f"worker {worker.number}" for worker in self.workers if not worker.ended]
            problems.append(
                f"The job did not end within {LIMIT:g} s; still running: {', '.join(running) or 'nothing'}."
            )
            return
        assert self.newest is not None and self.server is not None
        samples = self.newest.snapshot["samples"]
        if samples is None or samples["open"] or samples["trained"] != setting.samples * setting.epochs:
            problems.append(f"Not all samples are done: {samples}.")
            return
        if not policies.make(setting.policy).keeps:  # kept updates are applied again and again
            for shard in self.newest.counts:
                for counts in shard:
                    if any(counts.get(sample, 0) != setting.epochs for sample in range(setting.samples)):
                        problems.append(f"Every sample must be applied {setting.epochs} times: {counts}.")
        for shard_process in self.server.shard_processes:
            if shard_process.shard.order != sorted(set(shard_process.shard.order)):
                problems.append(f"A shard applied versions out of order: {shard_process.shard.order}.")


def run(
    seed: int,
    make_state: MakeState | None = None,
    setting: Setting | None = None,
    faults: tuple[ScheduledFault, ...] | None = None,
    history: list[str] | None = None,
) -> ProtocolOutcome:
    """Run the job of a seed. make_state: makes the JobState, to test with a faulty one."""
    rng = random.Random(seed)
    drawn = draw_setting(rng)
    # Drawn apart, so that all else about a seed stays as it was.
    loads: Literal["", "main", "all"] = random.Random(f"{seed} loads").choice(("", "", "main", "all"))
    setting = setting or replace(drawn, loads=loads)
    if faults is None:
        faults = draw_faults(rng, setting.workers, rng.choice((5.0, 20.0, 60.0)), setting.lease)
        again = random.Random(f"{seed} recovery")  # drawn apart, as above
        if again.random() < 0.5:
            faults = add_second_faults(again, faults, setting.workers, setting.lease)
            setting = replace(setting, restore_seconds=again.choice((0.0, 0.5, 4.0)))
    world = World(setting, faults, seed, make_state)
    world.history = history
    try:
        return world.run()
    except Exception as error:
        world.outcome.problems.append(f"The run raised {error!r}.")
        world.outcome.seconds = world.clock.now
        raise
