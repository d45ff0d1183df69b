"""The process of the server: a real JobState, shards that count samples, and checkpoints that outlive the process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paceline import policies
from paceline.job import Identity, JobConfig, JobState, SaveEvery, events, instructions
from paceline.job.membership import Stage
from paceline.observe.observer import Recorder
from paceline.simulate.protocol.shard import SimulatedShard
from paceline.simulate.protocol.transport import SimulatedConnection, SimulatedProcess
from paceline.simulate.protocol.worker import SimulatedWelcome

if TYPE_CHECKING:
    from paceline.simulate.protocol.run import SimulatedCheckpoint, World

BEAT_SECONDS = 1.0  # between two heartbeats of a shard
FINAL_MESSAGES = (
    instructions.SendRefused,
    instructions.SendExpelled,
    instructions.SendLeave,
    instructions.CloseConnection,
)
ORDERS_TO_SHARDS = (
    instructions.OrderApply,
    instructions.OrderStream,
    instructions.OrderDiscard,
    instructions.OrderDrop,
    instructions.OrderKeep,
    instructions.OrderFence,
    instructions.OrderSave,
)


class SimulatedShardProcess:
    """The process of a shard."""

    def __init__(self, server: SimulatedServer, number: int, pieces: int, counts: list[dict[int, int]]) -> None:
        self.process = SimulatedProcess(server.process.clock)
        self.shard = SimulatedShard(number, pieces, self._tell, counts)
        self._giver: tuple[int, int] | None = None
        self._offers: list[tuple[tuple[int, int], Callable[[str], None]]] = []
        self._given_by: set[tuple[int, int]] = set()
        self.connection = SimulatedConnection(0, self, server, server.rng)
        self._beat()

    def _beat(self) -> None:
        self._tell("beat", None)
        self.process.after(BEAT_SECONDS, self._beat)

    def _tell(self, kind: str, what: Any) -> None:
        self.connection.send(self, (self.shard.number, kind, what))

    def begin(self, giver: tuple[int, int], answer: Callable[[str], None]) -> None:
        """Take the initial weights from an incarnation of a worker. They are used only if that one is to give them."""
        if not self.shard.accepts(Identity(*giver, 0)):
            answer("expelled")
            return
        self._offers.append((giver, answer))
        self._take_weights()

    def _take_weights(self) -> None:
        for giver, answer in [each for each in self._offers if each[0] == self._giver]:
            if giver not in self._given_by:
                self._given_by.add(giver)
                self._tell("begun", giver)
            answer("begun")
        self._offers = [each for each in self._offers if each[0] != self._giver]

    def received(self, connection: SimulatedConnection, message: Any) -> None:
        if isinstance(message, instructions.OrderInitialWeights):
            self._giver = (message.worker, message.incarnation)
            self._take_weights()
        else:
            self.shard.carry_out(message)

    def lost(self, connection: SimulatedConnection) -> None:
        self.process.kill()


class SimulatedServer:
    """A process of the server. When it loses a shard, it begins a new generation."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.process = SimulatedProcess(world.clock)
        self.state: JobState
        self.shard_processes: list[SimulatedShardProcess] = []
        self._connections: dict[int, SimulatedConnection] = {}
        self._wake = 0
        self._generation = 0  # number of generations that this process has begun
        self._parts: dict[int, list[dict[int, int]]] = {}  # shard → its part of the checkpoint that is being written
        self._snapshot: Mapping[str, Any] = {}
        self.begin(world.newest, None, {})

    def begin(
        self,
        restored: SimulatedCheckpoint | None,
        awaited: frozenset[int] | None,
        incarnations: Mapping[int, int],
        provider: int | None = None,
    ) -> None:
        """Begin a generation, restored from a checkpoint or fresh. provider: the worker that provides the weights."""
        setting = self.world.setting
        policy = policies.make(setting.policy)
        policy.streamed = setting.streamed and policy.streamable
        streams = policy.pipelined or policy.streamed
        self.world.generations += 1
        config = JobConfig(
            shards=setting.shards,
            workers=setting.workers,
            lease=setting.lease,
            save=SaveEvery(setting.save_every),
            policy=setting.policy,
            streams=streams,
            generation=f"generation {self.world.generations}",
            awaited=awaited,
            incarnations=dict(incarnations),
            provider=provider,
            visits=setting.visits if policy.streamed and policy.takes_turns else 0,
        )
        trace = self.world.begin_trace(restored.version if restored else 0)
        snapshot = restored.snapshot if restored else None
        self.state = self.world.make_state(policy, config, Recorder(trace.append), snapshot, self.process.clock.now)
        self._generation += 1
        self._streams, self._gated = streams, policy.streamed and policy.takes_turns
        pieces = setting.pieces if streams else 1
        counts = restored.counts if restored else [[] for _ in range(setting.shards)]
        self.shard_processes = [
            SimulatedShardProcess(self, number, pieces, counts[number]) for number in range(setting.shards)
        ]
        for shard_process in self.shard_processes:
            shard_process.shard.streams = streams
        self._tell(events.ModelDescribed(0.9))
        if restored:
            for shard_process in self.shard_processes:
                shard_process.shard.version = restored.version
        if restored and provider is None:
            for number in range(setting.shards):
                self._restore_shard(number, self.rng.uniform(0.0, setting.restore_seconds))
        self._tick(self._generation, self.process.clock.now)

    def _restore_shard(self, number: int, seconds: float) -> None:
        """Tell the job that a shard has loaded its part of the checkpoint, after this time."""
        generation = self._generation

        def loaded() -> None:
            if generation == self._generation:
                self._tell(events.ShardLoaded(number))

        if seconds:
            self.process.after(seconds, loaded)
        else:
            loaded()

    # Events in, instructions out

    def _tell(self, event: events.Event) -> None:
        state = self.state
        for instruction in state.handle(event, self.process.clock.now):
            self.world.log(self.process.clock.now, event, instruction)
            if self.state is state:  # otherwise this generation has failed meanwhile
                self._carry_out(instruction)
            if isinstance(instruction, instructions.SendResumed) and isinstance(event, events.WorkerResumed):
                self.world.resumed(event.worker, event.generation, state.config.generation)

    def _carry_out(self, instruction: Any) -> None:
        match instruction:
            case instructions.SendWelcome(to, worker, incarnation):
                identity = (worker, incarnation, self.state.config.generation)
                self._send(to, SimulatedWelcome(*identity, self._gated, self._streams, tuple(self.shard_processes)))
            case instructions.OrderSave(version, snapshot):
                self._parts, self._snapshot = {}, snapshot
                self._to_shards(instruction)
            case instructions.OrderApply() if self._streams:
                pass
            case instructions.OrderInitialWeights():
                self._to_shards(instruction)
            case instructions.StoreCheckpoint(version):
                generation = self._generation
                self.process.after(self.rng.uniform(0.0, 0.5), lambda: self._store(version, generation))
            case instructions.SetTimer(time):
                self._wake += 1
                number, generation = self._wake, self._generation
                wait = max(0.0, time - self.process.clock.now)
                self.process.after(wait, lambda: self._woke(number, generation))
            case instructions.JobDone():
                self._save_and_end(self._generation)
            case instructions.FailGeneration() | instructions.GiveUpShard():
                self.restart()
            case instructions.BeginAgain(provider, snapshot):
                self._begin_again(provider, snapshot)
            case instructions.LogLine() | instructions.OrderAdd() | instructions.ForgetCheckpoint():
                pass
            case _ if isinstance(instruction, ORDERS_TO_SHARDS):
                self._to_shards(instruction)
            case _:
                if not isinstance(instruction, instructions.CloseConnection):
                    self._send(instruction.to, instruction)
                if isinstance(instruction, FINAL_MESSAGES):
                    connection = self._connections.pop(instruction.to, None)
                    if connection:
                        connection.close(self)

    def _send(self, to: int, message: Any) -> None:
        if to in self._connections:
            self._connections[to].send(self, message)

    def _to_shards(self, order: Any) -> None:
        shard = getattr(order, "shard", None)
        for shard_process in self.shard_processes if shard is None else [self.shard_processes[shard]]:
            shard_process.connection.send(self, order)

    def _tick(self, generation: int, due: float) -> None:
        if generation == self._generation:
            before = self.state.roster.present()
            self._tell(events.TimePassed(due))
            if generation != self._generation:
                return  # a shard was lost, and a new generation has begun
            for member in before:
                if member.stage is Stage.GONE:
                    self.world.given_up(member.worker)
            pause = self.state.leases.tick_seconds
            then = self.process.clock.now + pause
            self.process.after(pause, lambda: self._tick(generation, then))

    def _woke(self, number: int, generation: int) -> None:
        if number == self._wake and generation == self._generation:
            self._tell(events.TimerFired())

    def _store(self, version: int, generation: int) -> None:
        if generation != self._generation:
            return
        error = self.world.store(version, self._snapshot, [self._parts[number] for number in sorted(self._parts)])
        self._tell(events.CheckpointStored(version, error))

    def _save_and_end(self, generation: int) -> None:
        """Write a last checkpoint, and end. All workers have left."""
        if generation != self._generation:
            return
        saved = self.state.checkpoints.saved if self.state.checkpoints else None
        if not self.state.is_saving:
            if saved == self.state.version:
                self.world.end()
                return
            self._tell(events.SaveRequested())
        self.process.after(0.1, lambda: self._save_and_end(generation))

    # Connections

    def accept(self, connection: SimulatedConnection) -> None:
        self._connections[connection.number] = connection

    def received(self, connection: SimulatedConnection, message: Any) -> None:
        if connection.number == 0:
            if any(shard_process.connection is connection for shard_process in self.shard_processes):
                self._from_shard(*message)
        elif connection.number in self._connections:
            self._tell(message)

    def _from_shard(self, shard: int, kind: str, what: Any) -> None:
        match kind:
            case "arrived":
                self._tell(events.UpdateArrived(shard, *what))
            case "held":
                self._tell(events.UpdateHeldBack(shard, *what))
            case "beat":
                self._tell(events.ShardAlive(shard))
            case "begun":
                self._tell(events.ShardInitialized(shard, *what))
            case "saved":
                version, counts = what
                self._parts[shard] = counts
                self._tell(events.ShardSaved(shard, version))

    def lost(self, connection: SimulatedConnection) -> None:
        if connection.number == 0:
            if any(shard_process.connection is connection for shard_process in self.shard_processes):
                self.restart()
        elif self._connections.pop(connection.number, None):
            self._tell(events.ConnectionLost(connection.number))

    # Faults

    def lose_shard(self, number: int) -> None:
        """Kill the process of a shard."""
        shard_process = self.shard_processes[number % len(self.shard_processes)]
        shard_process.process.kill()
        shard_process.connection.close(shard_process)

    def restart(self) -> None:
        """Return to the last checkpoint in a new generation, because a shard was lost."""
        expected, incarnations = self.state.roster.expected, self.state.incarnations
        self._end_generation()
        self.begin(self.world.newest, expected, incarnations)
        self.world.restart_workers()

    def _begin_again(self, provider: int, snapshot: Mapping[str, Any]) -> None:
        """Begin a new generation with the weights of a worker, which no sample has changed yet."""
        expected, incarnations = self.state.roster.expected, self.state.incarnations
        self._end_generation()
        counts: list[list[dict[int, int]]] = [[] for _ in range(self.world.setting.shards)]
        self.begin(self.world.provided(snapshot, counts), expected, incarnations, provider)

    def _end_generation(self) -> None:
        for shard_process in self.shard_processes:
            shard_process.process.kill()
        self.shard_processes = []
        for connection in self._connections.values():
            connection.close(self)
        self._connections = {}

    def kill(self) -> None:
        """Kill the process, with its shards."""
        self._end_generation()
        self.process.kill()
