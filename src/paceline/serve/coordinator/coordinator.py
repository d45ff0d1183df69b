"""The coordinator: a listening socket around a JobState.

It turns messages into events and instructions into messages, and it keeps time. The JobState and its policy make all
decisions. Everything runs in one event loop, so events are handled one after another.

One coordinator is one generation of a server. If a shard is lost, the coordinator fails, and a new generation begins
from the last checkpoint. A coordinator without shards only paces the workers, which exchange gradients by other means.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Any, cast

from paceline.job import JobState, events, instructions
from paceline.job.accounting import Ledger
from paceline.job.samples import Samples
from paceline.model.checkpoint import Checkpoint
from paceline.observe.journal import Journal
from paceline.observe.observer import Observer, Recorder, Tee
from paceline.observe.trace import Began, Event
from paceline.policies import Policy
from paceline.serve.coordinator.agreement import ModelAgreement
from paceline.serve.coordinator.checkpoint_writer import CheckpointWriter
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.coordinator.listener import CoordinatorListener
from paceline.serve.coordinator.shard_connections import ShardConnections
from paceline.serve.coordinator.subscribers import Subscribers
from paceline.serve.coordinator.timer import Timer
from paceline.serve.coordinator.translation import CLOSES_CONNECTION, TO_SHARDS, TO_WORKER, event_of
from paceline.serve.wire import handshake
from paceline.serve.wire.async_channel import AsyncChannel
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import (
    DropUpdate,
    Exclusions,
    InspectExclusions,
    Join,
    Register,
    Resume,
    SavePart,
    Setup,
    Stop,
    Subscribe,
    Welcome,
)

log = logging.getLogger(__name__)


class Coordinator:
    """Serves one generation of a job at a listening socket."""

    def __init__(
        self, policy: Policy, config: ServerConfig, observer: Observer | None = None, restored: Checkpoint | None = None
    ) -> None:
        self.config = config
        policy.streamed = config.streamed and policy.streamable
        self._streams = config.streams(policy)
        self._start = time.monotonic() if config.began is None else config.began
        self._loop = asyncio.get_running_loop()
        self.generation = secrets.token_hex(8)
        self._key = secrets.token_bytes(32)  # signs workers' tickets
        self._listener = CoordinatorListener(self.generation, config.token, config.shard_token, config.tls, self._serve)
        self._peers: dict[int, AsyncChannel] = {}  # workers, by the number of their connection
        self._connection_numbers = itertools.count(1)
        self._subscribers = Subscribers()
        self.agreement = ModelAgreement(config, policy, restored)
        self._restored = restored
        broadcaster = Recorder(self._subscribers.broadcast)
        watcher = Tee(observer, broadcaster) if observer else broadcaster
        self._journal: IO[str] | None = None
        job_config = config.job_config(policy, self.generation)
        if config.record:
            config.record.mkdir(parents=True, exist_ok=True)
            self._journal = (config.record / f"decisions-{self.generation}.jsonl").open("w")
            policy = cast(Policy, Journal(policy, config.policy, self._write_journal))
        self.state = JobState(policy, job_config, watcher, restored.job if restored else None, self.now)
        self.done = asyncio.Event()  # the job is over: every worker has left
        self.failed = asyncio.Event()  # a shard is lost, or cannot be set up
        self.reason = ""  # why the generation failed
        self.again: instructions.BeginAgain | None = None  # if the job begins again with the weights of a worker
        self._refused, self._closing = 0, False  # how many workers were refused; whether `close` has begun
        self.shards = ShardConnections(config, self.generation, self._set_up_shards, self.tell, self.fail)
        self._writer = CheckpointWriter(config.saving) if config.saving else None
        self._writing: asyncio.Task[None] | None = None  # the last step of a checkpoint
        self._ticking: asyncio.Task[None] | None = None
        self._timer = Timer(self._loop, lambda: self.tell(events.TimerFired()))
        self._pending: deque[events.Event] = deque()  # the event being handled, and those that wait for it
        self._handlers: dict[type, Callable[[Any], None]] = {
            **dict.fromkeys(TO_WORKER, self._send_to_worker),
            **dict.fromkeys(TO_SHARDS, self._send_to_shards),
            instructions.SendWelcome: self._send_welcome,
            instructions.CloseConnection: lambda hang_up: self._hang_up(hang_up.to, at_once=True),
            instructions.OrderApply: self._apply,
            instructions.OrderDrop: self._drop,
            instructions.OrderSave: self._save,
            instructions.StoreCheckpoint: self._store,
            instructions.ForgetCheckpoint: lambda forget: self._writer.forget(forget.version) if self._writer else None,
            instructions.SetTimer: lambda wake: self._timer.set(self._start + wake.time),
            instructions.LogLine: lambda line: log.log(logging.WARNING if line.warns else logging.INFO, line.text),
            instructions.FailGeneration: lambda fail: self.fail(fail.reason),
            instructions.GiveUpShard: lambda lost: self.shards.lose(lost.shard, lost.reason),
            instructions.BeginAgain: self._begin_again,
            instructions.JobDone: lambda _: self.done.set(),
        }
        if self.agreement.is_known:
            self.tell(self.agreement.described())

    @property
    def now(self) -> float:
        """Seconds since the job began."""
        return time.monotonic() - self._start  # the loop's own clock may count whole milliseconds

    @property
    def faults(self) -> int:
        """How many peers were refused."""
        return self._listener.faults + self.shards.faults + self._refused

    @property
    def ledger(self) -> Ledger:
        """The policy and the account of its decisions."""
        return self.state.ledger

    @property
    def samples(self) -> Samples | None:
        """The state of the data, or None before a worker has requested samples."""
        return self.state.samples

    @property
    def apply(self) -> str:
        """How updates are applied: "whole" or "streamed"."""
        return "streamed" if self._streams else "whole"

    @property
    def _max_transfers(self) -> int:
        """How many transfers a shard admits at once, to begin with. 0: any number, where workers take no turns.

        It is the number of shards, because a worker transfers to all of them at once.
        """
        return self.config.shards if self.ledger.policy.one_by_one and not self._streams else 0

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Begin to listen. Return the port."""
        port = await self._listener.listen(host, port)
        self._ticking = self._loop.create_task(self._tick())
        return port

    async def save(self) -> bool:
        """Write a last checkpoint, if the model has changed since the one before. Return False if that failed."""
        checkpoints, asked = self.state.checkpoints, -1  # the version: workers may still train
        while checkpoints and self.state.has_begun and not self.failed.is_set():
            if not self.state.is_saving:
                is_saved = checkpoints.saved is not None and checkpoints.saved >= max(asked, 0)
                if asked >= 0 or checkpoints.saved == self.state.version:
                    return is_saved
                asked = self.state.version
                self.tell(events.SaveRequested())
            await asyncio.sleep(0.01)
        return not self.failed.is_set()

    async def close(self, is_over: bool = False) -> None:
        """Stop the shards and close all connections. is_over: no other generation follows."""
        self._closing = self.shards.closing = True
        if self._ticking:
            self._ticking.cancel()
        self._timer.close()
        self._listener.stop()
        self.shards.send(Stop(is_over))
        self._subscribers.flush()
        if self._writing:
            await self._writing
        await self._listener.hang_up()
        if self._journal:
            self._journal.close()
            self._journal = None

    # Events in, instructions out

    def tell(self, event: events.Event) -> None:
        """Pass an event to the job, and carry out its instructions."""
        self._pending.append(event)
        if len(self._pending) > 1 or self._closing:
            return  # the outer call, which handles the event before, handles this one next
        try:
            while self._pending:
                for instruction in self.state.handle(self._pending[0], self.now):
                    self._handlers[type(instruction)](instruction)
                self._pending.popleft()
        except Exception as error:  # a bug in the job or in the policy: the state may be inconsistent
            log.error("the coordinator failed with an unexpected error", exc_info=error)
            self.fail(f"The coordinator failed with an unexpected error: {error!r}.")

    def fail(self, reason: str) -> None:
        """End this generation. The first reason counts."""
        if not self.failed.is_set():
            self.reason = reason
            self.failed.set()

    async def _tick(self) -> None:
        """Tell the job regularly that time has passed. From `due` it sees if this process itself was held up."""
        pause = self.state.leases.tick_seconds
        while True:
            due = self.now + pause
            await asyncio.sleep(pause)
            self.tell(events.TimePassed(due))

    def _send_to_worker(self, instruction: Any) -> None:
        """Send the message of an instruction to its worker. Where updates are applied whole, PushNow is not needed."""
        peer, kind = self._peers.get(instruction.to), type(instruction)
        self._refused += kind is instructions.SendRefused
        if peer is None or (kind is instructions.SendPushNow and not self.ledger.policy.streamed):
            return
        peer.send(TO_WORKER[kind](instruction))
        if kind is instructions.SendResumed:
            self.shards.inform(instruction.to, peer)
        if kind in CLOSES_CONNECTION:
            self._hang_up(instruction.to)

    def _hang_up(self, connection: int, at_once: bool = False) -> None:
        peer = self._peers.pop(connection, None)
        if peer:
            peer.abort() if at_once else peer.close()

    def _send_welcome(self, welcome: instructions.SendWelcome) -> None:
        peer, policy = self._peers.get(welcome.to), self.ledger.policy
        if peer is None:
            return
        worker, incarnation = welcome.worker, welcome.incarnation
        shards = tuple((*at, pieces) for at, pieces in zip(self.shards.addresses, self.agreement.pieces(), strict=True))
        gated, asks = policy.streamed and policy.takes_turns, self._max_transfers > 0
        how = (self.config.lease, gated, handshake.ticket(self._key, worker, incarnation), policy.mixes, asks)
        job = (self._streams, self.config.workers, self.state.missing, self.shards.certificates)
        peer.send(Welcome(worker, incarnation, shards, *how, *job, self.config.update_codec))
        self.shards.inform(welcome.to, peer)

    def _send_to_shards(self, instruction: Any) -> None:
        self.shards.send(TO_SHARDS[type(instruction)](instruction))

    def _apply(self, apply: instructions.OrderApply) -> None:
        if self._streams:
            return  # the shards have applied it piece by piece
        if apply.compare:
            self.shards.expect_comparison(apply.version, apply.decision)
        self._send_to_shards(apply)

    def _drop(self, drop: instructions.OrderDrop) -> None:
        self.shards.send(DropUpdate(drop.update), drop.shard)

    def _save(self, save: instructions.OrderSave) -> None:
        assert self._writer is not None
        error = self._writer.begin(save.version, {**save.snapshot, "description": json.loads(self.agreement.text)})
        if error:
            self.tell(events.CheckpointStored(save.version, error))
        else:
            self.shards.save(SavePart(save.version, str(self._writer.folder(save.version).resolve())))

    def _store(self, store: instructions.StoreCheckpoint) -> None:
        parts = self.shards.saved_parts(store.version)

        async def write() -> None:
            assert self._writer is not None
            error = await asyncio.to_thread(self._writer.finish, store.version, parts)
            self.tell(events.CheckpointStored(store.version, error))

        self._writing = self._loop.create_task(write())

    def _begin_again(self, again: instructions.BeginAgain) -> None:
        described = {**again.snapshot, "description": json.loads(self.agreement.text)}
        self.again = self.again or instructions.BeginAgain(again.provider, described)
        self.fail(f"Worker {again.provider} provides other weights.")

    # Connections

    async def _serve(self, peer: AsyncChannel, first: Any, is_shard: bool) -> None:
        """Serve a connection by its first message: a shard, a worker, a subscriber or a single request."""
        match first:
            case Register() if is_shard:
                await self.shards.serve(peer, first)
            case Join() | Resume():
                await self._serve_worker(peer, first)
            case Subscribe():
                present: list[Event] = [Began(self.now, "", self.config.policy, self.apply, 0)]
                self.state.introduce(Recorder(present.append))
                await self._subscribers.serve(peer, present)
            case InspectExclusions():
                peer.send(self._inspect_exclusions(first))
            case _:
                raise WireError(f"A {type(first).__name__} is not expected here.")

    async def _serve_worker(self, peer: AsyncChannel, first: Join | Resume) -> None:
        """Pass a worker's messages to the job as events, until its connection ends."""
        if isinstance(first, Join):
            await self.shards.complete.wait()
        connection = next(self._connection_numbers)
        if isinstance(first, Join) and self.config.shards and self.agreement.agree(peer.body):
            self.tell(self.agreement.described())
            self._set_up_shards()
        self._peers[connection] = peer
        try:
            if isinstance(first, Join):
                self.tell(events.WorkerJoined(connection, first.worker))
            else:
                worker, incarnation = first.worker, first.incarnation
                genuine = handshake.is_ticket(self._key, worker, incarnation, first.ticket)
                self.tell(events.WorkerResumed(connection, worker, incarnation, first.generation, genuine))
            while connection in self._peers:
                message = await peer.receive()
                event = event_of(message, connection)
                if event is None:
                    raise WireError(f"A {type(message).__name__} is not expected here.")
                self.tell(event)
        except WireError:
            self.tell(events.WorkerMisbehaved(connection))
            raise
        finally:
            self._peers.pop(connection, None)
            self.shards.forget(connection)
            self.tell(events.ConnectionLost(connection))  # the worker stays a member until its lease runs out

    def _set_up_shards(self) -> None:
        """Send each shard its Setup, if the model is known."""
        if not self.agreement.is_known:
            return
        folder = str(self._restored.folder.resolve()) if self._restored and self.config.provider is None else ""
        version = self._restored.version if self._restored else 0
        agreed = {**self.agreement.settings, "digests": self._restored.digests if self._restored and folder else ()}
        for number, pieces in enumerate(self.agreement.pieces()):
            record = f"{self.config.record}/shard-{number}-{self.generation}.rec" if self.config.record else ""
            setup = Setup(pieces, folder, version, record, self._key, self._streams, self._max_transfers, **agreed)
            self.shards.set_up(number, setup, self.agreement.text)

    def _write_journal(self, line: str) -> None:
        if self._journal:
            self._journal.write(line + "\n")

    def _inspect_exclusions(self, asked: InspectExclusions) -> Exclusions:
        """Readmit the named workers. Return the workers that the policy still leaves out."""
        blacklist = self.state.blacklist()
        pardoned = sorted(blacklist) if asked.everyone else [each for each in asked.pardon if each in blacklist]
        self.tell(events.WorkersPardoned(tuple(pardoned)))
        left = tuple(sorted(self.state.blacklist().items()))
        return Exclusions(self.ledger.policy.compares, left, tuple(pardoned))
