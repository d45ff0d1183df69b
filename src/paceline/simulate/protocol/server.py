"""The server's process: a real JobState, shards that count, and checkpoints that outlive it."""

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
from paceline.simulate.protocol.worker import WelcomeTerms

if TYPE_CHECKING:
    from paceline.simulate.protocol.run import SimulatedCheckpoint, World

BEAT_SECONDS = 1.0  # between two signs of life of a shard
LAST_WORDS = (instructions.SendRefused, instructions.SendExpelled, instructions.SendLeave, instructions.HangUp)
TO_SHARDS = (
    instructions.OrderApply,
    instructions.OrderStream,
    instructions.OrderDiscard,
    instructions.OrderDrop,
    instructions.OrderKeep,
    instructions.OrderFence,
    instructions.OrderSave,
)


class SimulatedShardProcess:
    """A shard's process."""

    def __init__(self, server: SimulatedServer, number: int, pieces: int, counts: list[dict[int, int]]) -> None:
        self.process = SimulatedProcess(server.process.clock)
        self.shard = SimulatedShard(number, pieces, self._tell, counts)
        self._giver: tuple[int, int] | None = None
        self._begins: list[tuple[tuple[int, int], Callable[[str], None]]] = []
        self._given: set[tuple[int, int]] = set()
        self.connection = SimulatedConnection(0, self, server, server.chance)
        self._beat()

    def _beat(self) -> None:
        self._tell("beat", None)
        self.process.after(BEAT_SECONDS, self._beat)

    def _tell(self, kind: str, what: Any) -> None:
        self.connection.send(self, (self.shard.number, kind, what))

    def begin(self, who: tuple[int, int], answer: Callable[[str], None]) -> None:
        """The weights that the model begins with, from an incarnation of a worker; taken from its giver alone."""
        if not self.shard.accepts(Identity(*who, 0)):
            answer("expelled")
            return
        self._begins.append((who, answer))
        self._take_weights()

    def _take_weights(self) -> None:
        for who, answer in [each for each in self._begins if each[0] == self._giver]:
            if who not in self._given:
                self._given.add(who)
                self._tell("begun", who)
            answer("begun")
        self._begins = [each for each in self._begins if each[0] != self._giver]

    def received(self, connection: SimulatedConnection, message: Any) -> None:
        if isinstance(message, instructions.OrderInitialWeights):
            self._giver = (message.worker, message.incarnation)
            self._take_weights()
        else:
            self.shard.carry_out(message)

    def lost(self, connection: SimulatedConnection) -> None:
        self.process.kill()


class SimulatedServer:
    """One process of the server. It lives in generations: when a shard is lost, a new one begins."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world, self.chance = world, chance
        self.process = SimulatedProcess(world.clock)
        self.state: JobState
        self.holders: list[SimulatedShardProcess] = []
        self._connections: dict[int, SimulatedConnection] = {}
        self._wake = 0
        self._incarnation = 0  # of generations in this process
        self._parts: dict[int, list[dict[int, int]]] = {}  # shard → what it has written of the checkpoint under way
        self._snapshot: Mapping[str, Any] = {}
        self.begin(world.newest, None, {})

    def begin(
        self, restored: SimulatedCheckpoint | None, awaited: frozenset[int] | None, incarnations: Mapping[int, int]
    ) -> None:
        """Begin a generation."""
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
        )
        trace = self.world.begin_trace(restored.version if restored else 0)
        snapshot = restored.snapshot if restored else None
        self.state = self.world.make_state(policy, config, Recorder(trace.append), snapshot, self.process.clock.now)
        self._incarnation += 1
        self._streams, self._gated = streams, policy.streamed and policy.takes_turns
        pieces = setting.pieces if streams else 1
        counts = restored.counts if restored else [[] for _ in range(setting.shards)]
        self.holders = [SimulatedShardProcess(self, number, pieces, counts[number]) for number in range(setting.shards)]
        for holder in self.holders:
            holder.shard.streams = streams
        self._tell(events.ModelDescribed(0.9))
        if restored:
            for holder in self.holders:
                holder.shard.version = restored.version
            for number in range(setting.shards):
                self._tell(events.ShardLoaded(number))
        self._tick(self._incarnation, self.process.clock.now)

    # Events in, instructions out

    def _tell(self, event: events.Event) -> None:
        state = self.state
        for instruction in state.handle(event, self.process.clock.now):
            self.world.log(self.process.clock.now, event, instruction)
            if self.state is state:  # else this generation has failed meanwhile
                self._carry_out(instruction)
            if isinstance(instruction, instructions.SendResumed) and isinstance(event, events.WorkerResumed):
                self.world.resumed(event.worker, event.generation, state.config.generation)

    def _carry_out(self, instruction: Any) -> None:
        match instruction:
            case instructions.SendWelcome(to, worker, incarnation):
                who = (worker, incarnation, self.state.config.generation)
                self._send(to, WelcomeTerms(*who, self._gated, self._streams, tuple(self.holders)))
            case instructions.OrderSave(version, snapshot):
                self._parts, self._snapshot = {}, snapshot
                self._to_shards(instruction)
            case instructions.OrderApply() if self._streams:
                pass
            case instructions.OrderInitialWeights():
                self._to_shards(instruction)
            case instructions.StoreCheckpoint(version):
                self.process.after(self.chance.uniform(0.0, 0.5), lambda: self._store(version))
            case instructions.SetTimer(time):
                self._wake += 1
                number, life = self._wake, self._incarnation
                wait = max(0.0, time - self.process.clock.now)
                self.process.after(wait, lambda: self._woke(number, life))
            case instructions.JobDone():
                self._save_and_end(self._incarnation, asked=False)
            case instructions.FailGeneration():
                self.restart()
            case instructions.LogLine() | instructions.OrderAdd() | instructions.ForgetCheckpoint():
                pass
            case _ if isinstance(instruction, TO_SHARDS):
                self._to_shards(instruction)
            case _:
                if not isinstance(instruction, instructions.HangUp):
                    self._send(instruction.to, instruction)
                if isinstance(instruction, LAST_WORDS):
                    connection = self._connections.pop(instruction.to, None)
                    if connection:
                        connection.close(self)

    def _send(self, to: int, message: Any) -> None:
        if to in self._connections:
            self._connections[to].send(self, message)

    def _to_shards(self, order: Any) -> None:
        shard = getattr(order, "shard", None)
        for holder in self.holders if shard is None else [self.holders[shard]]:
            holder.connection.send(self, order)

    def _tick(self, life: int, due: float) -> None:
        if life == self._incarnation:
            before = self.state.roster.present()
            self._tell(events.TimePassed(due))
            if life != self._incarnation:
                return  # a shard was lost
            for member in before:
                if member.stage is Stage.GONE:
                    self.world.given_up(member.worker)
            pause = self.state.leases.tick_seconds
            then = self.process.clock.now + pause
            self.process.after(pause, lambda: self._tick(life, then))

    def _woke(self, number: int, life: int) -> None:
        if number == self._wake and life == self._incarnation:
            self._tell(events.TimerFired())

    def _store(self, version: int) -> None:
        error = self.world.store(version, self._snapshot, [self._parts[number] for number in sorted(self._parts)])
        self._tell(events.CheckpointStored(version, error))

    def _save_and_end(self, life: int, asked: bool) -> None:
        """Everybody has left: write a last checkpoint, and end."""
        if life != self._incarnation:
            return
        saved = self.state.checkpoints.saved if self.state.checkpoints else None
        if not self.state.is_saving:
            if saved == self.state.version:
                self.world.end()
                return
            self._tell(events.SaveRequested())
        self.process.after(0.1, lambda: self._save_and_end(life, asked=True))

    # Connections

    def accept(self, connection: SimulatedConnection) -> None:
        self._connections[connection.number] = connection

    def received(self, connection: SimulatedConnection, message: Any) -> None:
        if connection.number == 0:
            if any(holder.connection is connection for holder in self.holders):
                self._from_shard(*message)
        elif connection.number in self._connections:
            self._tell(message)

    def _from_shard(self, shard: int, kind: str, what: Any) -> None:
        match kind:
            case "arrived":
                self._tell(events.UpdateArrived(shard, *what))
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
            if any(holder.connection is connection for holder in self.holders):
                self.restart()
        elif self._connections.pop(connection.number, None):
            self._tell(events.ConnectionLost(connection.number))

    # Faults

    def lose_shard(self, number: int) -> None:
        """A shard's process dies."""
        holder = self.holders[number % len(self.holders)]
        holder.process.kill()
        holder.connection.close(holder)

    def restart(self) -> None:
        """A shard is lost: go back to the last checkpoint, in a new generation."""
        expected, incarnations = self.state.roster.expected, self.state.incarnations
        self._end_generation()
        self.begin(self.world.newest, expected, incarnations)
        self.world.restart_workers()

    def _end_generation(self) -> None:
        for holder in self.holders:
            holder.process.kill()
        self.holders = []
        for connection in self._connections.values():
            connection.close(self)
        self._connections = {}

    def kill(self) -> None:
        """The process dies, and its shards with it."""
        self._end_generation()
        self.process.kill()
