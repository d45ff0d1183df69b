"""A whole job from a seed: its setting, its processes, its faults, and what became of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline import policies
from paceline.job import JobConfig, JobState
from paceline.job.accounting import Watcher
from paceline.observe.trace import Event
from paceline.policies import Policy
from paceline.simulate.clock import Clock
from paceline.simulate.protocol.faults import TO_WORKERS, ScheduledFault, draw_faults
from paceline.simulate.protocol.server import SimulatedServer
from paceline.simulate.protocol.transport import SimulatedConnection
from paceline.simulate.protocol.worker import SimulatedWorker

#: Policies as the jobs are run under, streamed where they can be.
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
LIMIT = 3000.0  # seconds of virtual time, within which a job must end
MakeState = Callable[[Policy, JobConfig, Watcher, Mapping[str, Any] | None, float], JobState]


@dataclass(frozen=True)
class Setting:
    """A job, without its faults."""

    policy: str
    streamed: bool
    workers: int
    shards: int
    pieces: int  # of each shard, where updates are streamed
    samples: int
    batch: int
    epochs: int
    lease: float
    save_every: int
    pace: tuple[float, ...]  # how slow each worker is
    loss: float  # share of the messages between workers and shards that are lost


@dataclass(frozen=True)
class SimulatedCheckpoint:
    """What a restored server begins with."""

    version: int
    snapshot: Mapping[str, Any]
    counts: list[list[dict[int, int]]]  # of each shard, of each piece: sample → how often it has changed it


@dataclass
class GenerationTrace:
    """What happened in one generation, which began at this version."""

    version: int
    events: list[Event]


@dataclass
class ProtocolOutcome:
    """What became of a job."""

    setting: Setting
    faults: tuple[ScheduledFault, ...]
    problems: list[str] = field(default_factory=list)  # in sentences; none if every promise was kept
    traces: list[GenerationTrace] = field(default_factory=list)  # one a generation
    seconds: float = 0.0


def draw_setting(chance: random.Random) -> Setting:
    """A small job under any policy."""
    policy = chance.choice(POLICIES)
    streamed = policies.make(policy).streamable and chance.random() < 0.6
    workers = chance.choice((1, 2, 3, 3, 4))
    return Setting(
        policy=policy,
        streamed=streamed,
        workers=workers,
        shards=chance.choice((1, 1, 2)),
        pieces=chance.choice((1, 2, 3)),
        samples=chance.choice((6, 12, 20)),
        batch=chance.choice((1, 2, 3)),
        epochs=chance.choice((1, 2)),
        lease=chance.choice((4.0, 8.0, 20.0)),
        save_every=chance.choice((1, 3, 8, 1000)),
        pace=tuple(chance.choice((0.5, 1.0, 1.0, 2.0)) for _ in range(workers)),
        loss=chance.choice((0.0, 0.0, 0.03)),
    )


class World:
    """Everything there is in one run."""

    def __init__(
        self, setting: Setting, faults: tuple[ScheduledFault, ...], seed: int, make_state: MakeState | None
    ) -> None:
        self.setting, self.clock = setting, Clock()
        self.chance = random.Random(f"{seed} world")
        self.make_state: MakeState = make_state or JobState
        self.outcome = ProtocolOutcome(setting, faults)
        self.newest: SimulatedCheckpoint | None = None
        self.generations = 0
        self.over = False
        self.history: list[str] | None = None  # of instructions, for whoever looks into a seed
        self._disk_is_full = False
        self._struck: set[int] = set()  # workers that something has happened to
        self._connections = 0
        self.server: SimulatedServer | None = SimulatedServer(self, random.Random(f"{seed} server"))
        self._starts = 0
        self._seed = seed
        self.workers: list[SimulatedWorker] = []
        for number in range(setting.workers):
            self._start_worker(number)
        for fault in faults:
            self.clock.at(fault.time, self._strike, fault)

    def run(self) -> ProtocolOutcome:
        while not self.over and self.clock.now < LIMIT and self.clock.run(most=500):
            pass
        self.outcome.seconds = self.clock.now
        self._judge()
        return self.outcome

    # What processes ask of the world

    def connect(self, worker: SimulatedWorker) -> SimulatedConnection | None:
        """A connection to the server; None if there is no server."""
        if self.server is None:
            return None
        self._connections += 1
        connection = SimulatedConnection(self._connections, worker, self.server, self.chance)
        self.server.accept(connection)
        return connection

    def begin_trace(self, version: int) -> list[Event]:
        self.outcome.traces.append(GenerationTrace(version, []))
        return self.outcome.traces[-1].events

    def store(self, version: int, snapshot: Mapping[str, Any], counts: list[list[dict[int, int]]]) -> str:
        """Write a checkpoint; an error, if it cannot be written."""
        if self._disk_is_full:
            self._disk_is_full = False
            return "the disk is full"
        self._check_parts(version, snapshot, counts)
        self.newest = SimulatedCheckpoint(version, snapshot, counts)
        return ""

    def _check_parts(self, version: int, snapshot: Mapping[str, Any], counts: list[list[dict[int, int]]]) -> None:
        """All parts of a checkpoint are of one version: each piece has the samples that are done, and no others."""
        done = snapshot["samples"]["trained"] if snapshot["samples"] else 0
        pieces = [piece for shard in counts for piece in shard]
        keeps = policies.make(self.setting.policy).keeps  # then kept updates are applied again and again
        if not keeps and any(sum(piece.values()) != done for piece in pieces):
            text = f"The parts of checkpoint {version} do not agree that {done} samples are done: {counts}."
            self.outcome.problems.append(text)

    def resumed(self, number: int, generation: str, server_generation: str) -> None:
        """A worker was told that it still takes part. It must have joined this generation of the server."""
        if generation != server_generation:
            self.outcome.problems.append(f"Worker {number} of {generation} was taken for a member of another.")

    def end(self) -> None:
        self.over = True
        self.clock.running = False

    def log(self, now: float, event: Any, instruction: Any) -> None:
        if self.history is not None:
            self.history.append(f"{now:9.3f} {event} → {instruction}")

    def given_up(self, number: int) -> None:
        """The server has not heard of a worker for too long. That can only be if something happened to the worker."""
        if number not in self._struck:
            self.outcome.problems.append(f"Worker {number} was given up, and nothing was wrong with it.")

    def worker_ended(self, worker: SimulatedWorker) -> None:
        """A worker's process has ended by itself."""
        if worker.ended not in ("done", "killed") and "is alive" not in worker.ended:
            self.outcome.problems.append(f"Worker {worker.number} was refused: {worker.ended}")
        self.clock.at(self.clock.now + 1.0, self._restart_if_all_left)

    def _restart_if_all_left(self, _: None) -> None:
        """The server may have gone back to a checkpoint when everybody had left. Then nobody is there to train."""
        nobody = all(worker.ended for worker in self.workers)
        if nobody and not self.over and self.server and not self.server.state.is_done:
            self.restart_workers()

    # Faults

    def _start_worker(self, number: int) -> None:
        self._starts += 1
        self.workers.append(SimulatedWorker(self, number, random.Random(f"{self._seed} worker {self._starts}")))

    def _running(self, number: int) -> SimulatedWorker | None:
        """The newest process of this worker, if it runs."""
        mine = [worker for worker in self.workers if worker.number == number % self.setting.workers]
        running = [worker for worker in mine if not worker.ended]
        return running[-1] if running else None

    def _strike(self, fault: ScheduledFault) -> None:
        worker, server, seconds = self._running(fault.target), self.server, fault.seconds
        if worker and fault.kind in TO_WORKERS:
            self._struck.add(worker.number)
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
                self.clock.at(self.clock.now + seconds, self._restart_server)
            case "stop shard" if server and server.holders:
                server.holders[fault.target % len(server.holders)].process.stop(min(seconds, 5.0))
            case "kill shard" if server and server.holders and self.newest:
                server.lose_shard(fault.target)
            case "full disk":
                self._disk_is_full = True

    def _restart_worker(self, number: int) -> None:
        if not self.over and self._running(number) is None:
            self._start_worker(number)

    def restart_workers(self) -> None:
        """Start those again that had left: the server may have gone back to a version before that."""
        for number in range(self.setting.workers):
            self._restart_worker(number)

    def _restart_server(self, _: None) -> None:
        self.server = SimulatedServer(self, random.Random(f"{self._seed} server {self.generations}"))
        self.restart_workers()

    # What became of it

    def _judge(self) -> None:
        problems, setting = self.outcome.problems, self.setting
        if not self.over:
            running = [f"worker {worker.number}" for worker in self.workers if not worker.ended]
            problems.append(f"The job did not end within {LIMIT:g} s; still there: {', '.join(running) or 'nobody'}.")
            return
        assert self.newest is not None and self.server is not None
        samples = self.newest.snapshot["samples"]
        if samples is None or samples["open"] or samples["trained"] != setting.samples * setting.epochs:
            problems.append(f"Not every sample is done: {samples}.")
            return
        if not policies.make(setting.policy).keeps:  # kept updates are applied again and again
            for shard in self.newest.counts:
                for counts in shard:
                    if any(counts.get(sample, 0) != setting.epochs for sample in range(setting.samples)):
                        problems.append(f"Every sample must count {setting.epochs} times: {counts}.")
        for holder in self.server.holders:
            if holder.shard.order != sorted(set(holder.shard.order)):
                problems.append(f"A shard applied versions out of order: {holder.shard.order}.")


def run(
    seed: int,
    make_state: MakeState | None = None,
    setting: Setting | None = None,
    faults: tuple[ScheduledFault, ...] | None = None,
    history: list[str] | None = None,
) -> ProtocolOutcome:
    """Run the job of a seed. make_state: makes the JobState, if it is to be another than the real one."""
    chance = random.Random(seed)
    drawn = draw_setting(chance)
    setting = setting or drawn
    if faults is None:
        faults = draw_faults(chance, setting.workers, chance.choice((5.0, 20.0, 60.0)), setting.lease)
    world = World(setting, faults, seed, make_state)
    world.history = history
    try:
        return world.run()
    except Exception as error:
        world.outcome.problems.append(f"It broke: {error!r}.")
        world.outcome.seconds = world.clock.now
        raise
