"""The coordinator: a listening socket around a JobState.

It turns messages into events and instructions into messages, and it keeps time. What is decided is decided by the
JobState and its policy. Everything happens in one event loop, one thing after the other.

One coordinator is one generation of a server. When a shard is lost it has failed, and a new generation begins from the
last checkpoint. Without any shard it only paces: somebody else moves the bytes.
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
from paceline.serve.coordinator.agreement import Agreement
from paceline.serve.coordinator.checkpoint_writer import Writer
from paceline.serve.coordinator.config import Terms
from paceline.serve.coordinator.listener import Listener
from paceline.serve.coordinator.shard_connections import Shards
from paceline.serve.coordinator.subscribers import Onlookers
from paceline.serve.coordinator.timer import Alarm
from paceline.serve.coordinator.translation import LAST_WORDS, TO_SHARDS, TO_WORKER, event_of
from paceline.serve.wire import handshake
from paceline.serve.wire.async_channel import Peer
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import (
    Drop,
    Inspect,
    Inspected,
    Join,
    Register,
    Resume,
    Save,
    Setup,
    Stop,
    Subscribe,
    Welcome,
)

log = logging.getLogger(__name__)


class Coordinator:
    """The job, at a listening socket."""

    def __init__(
        self, policy: Policy, terms: Terms, observer: Observer | None = None, restored: Checkpoint | None = None
    ) -> None:
        self.terms = terms
        policy.streamed = terms.streamed and policy.streamable
        self._streams = terms.streams(policy)
        self._start = time.monotonic() if terms.began is None else terms.began
        self._loop = asyncio.get_running_loop()
        self.generation = secrets.token_hex(8)
        self._key = secrets.token_bytes(32)  # for workers' tickets
        self._listener = Listener(self.generation, terms.token, terms.shard_token, terms.tls, self._serve)
        self._peers: dict[int, Peer] = {}  # workers, by the number of their connection
        self._numbers = itertools.count(1)
        self._onlookers = Onlookers()
        self.agreement = Agreement(terms, policy, restored)
        self._restored = restored
        watching = Recorder(self._onlookers.broadcast)
        watcher = Tee(observer, watching) if observer else watching
        self._journal: IO[str] | None = None
        of_job = terms.of_job(policy, self.generation)
        if terms.record:
            terms.record.mkdir(parents=True, exist_ok=True)
            self._journal = (terms.record / f"decisions-{self.generation}.jsonl").open("w")
            policy = cast(Policy, Journal(policy, terms.policy, self._write_journal))
        self.state = JobState(policy, of_job, watcher, restored.job if restored else None, self.now)
        self.done = asyncio.Event()  # everybody who took part has left of their own accord
        self.failed = asyncio.Event()  # a shard is lost, or cannot work
        self.reason = ""  # why it failed
        self._refused = 0  # workers that were turned away
        self.shards = Shards(terms.shards, self.tell, self.fail)
        self._writer = Writer(terms.saving) if terms.saving else None
        self._writing: asyncio.Task[None] | None = None  # a checkpoint's last step
        self._closing = False
        self._ticking: asyncio.Task[None] | None = None
        self._alarm = Alarm(self._loop, lambda: self.tell(events.Woke()))
        self._due: deque[events.Event] = deque()  # events that wait until the one before is dealt with
        self._do: dict[type, Callable[[Any], None]] = {
            **dict.fromkeys(TO_WORKER, self._to_worker),
            **dict.fromkeys(TO_SHARDS, self._to_shards),
            instructions.Welcome: self._welcome,
            instructions.HangUp: lambda hang_up: self._hang_up(hang_up.to, at_once=True),
            instructions.Apply: self._apply,
            instructions.Drop: self._drop,
            instructions.Save: self._save,
            instructions.Store: self._store,
            instructions.Forget: lambda forget: self._writer.forget(forget.version) if self._writer else None,
            instructions.WakeAt: lambda wake: self._alarm.set(self._start + wake.time),
            instructions.Log: lambda line: log.log(logging.WARNING if line.warns else logging.INFO, line.text),
            instructions.Fail: lambda fail: self.fail(fail.reason),
            instructions.Done: lambda _: self.done.set(),
        }
        if self.agreement.is_known:
            self.tell(events.Described(self.agreement.momentum))

    @property
    def now(self) -> float:
        """Seconds since the job began."""
        return time.monotonic() - self._start  # the loop's own clock may count whole milliseconds

    @property
    def faults(self) -> int:
        """Peers that were turned away."""
        return self._listener.faults + self.shards.faults + self._refused

    @property
    def hopeless(self) -> bool:
        """Would a new generation fail in the same way?"""
        return self.shards.hopeless

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    @property
    def samples(self) -> Samples | None:
        return self.state.samples

    @property
    def apply(self) -> str:
        """How updates are applied: whole, or streamed."""
        return "streamed" if self._streams else "whole"

    @property
    def _at_a_time(self) -> int:
        """Where workers take turns: as many transfers as a worker has shards to talk to at once. 0: any number."""
        return self.terms.shards if self.ledger.policy.takes_turns and not self._streams else 0

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Begin to listen; the port."""
        port = await self._listener.listen(host, port)
        self._ticking = self._loop.create_task(self._tick())
        return port

    async def save(self) -> None:
        """Write a last checkpoint, if the model has moved since the one before."""
        asked = False  # one attempt: workers may train on meanwhile, and a disk may be full
        while self.state.checkpoints and self.state.has_begun and not self.failed.is_set():
            if not self.state.is_saving:
                if asked or self.state.checkpoints.saved == self.state.version:
                    return
                self.tell(events.SaveNow())
                asked = True
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Tell the shards to stop, and hang up."""
        self._closing = self.shards.closing = True
        if self._ticking:
            self._ticking.cancel()
        self._alarm.cancel()
        self._listener.stop()
        self.shards.send(Stop())
        if self._writing:
            await self._writing
        await self._listener.hang_up()
        if self._journal:
            self._journal.close()
            self._journal = None

    # Events in, instructions out

    def tell(self, event: events.Event) -> None:
        """Tell the job what happened, and carry out its instructions."""
        self._due.append(event)
        if len(self._due) > 1 or self._closing:
            return  # whoever tells of the one before goes on with this one
        try:
            while self._due:
                for instruction in self.state.handle(self._due[0], self.now):
                    self._do[type(instruction)](instruction)
                self._due.popleft()
        except Exception as error:  # a mistake of our own, or of the policy's: the state cannot be relied on any more
            log.error("the coordinator stumbled", exc_info=error)
            self.fail(f"The coordinator stumbled: {error!r}.")

    def fail(self, reason: str) -> None:
        """This generation is over."""
        if not self.failed.is_set():
            self.reason = reason
            self.failed.set()

    async def _tick(self) -> None:
        """Tell the job that time passes. If we ourselves were held up, it sees that by when this was due."""
        pause = self.state.leases.tick_seconds
        while True:
            due = self.now + pause
            await asyncio.sleep(pause)
            self.tell(events.Tick(due))

    def _to_worker(self, instruction: Any) -> None:
        peer, kind = self._peers.get(instruction.to), type(instruction)
        self._refused += kind is instructions.Refused
        if peer is None or (kind is instructions.Turned and not self.ledger.policy.streamed):
            return
        peer.send(TO_WORKER[kind](instruction))
        if kind in LAST_WORDS:
            self._hang_up(instruction.to)

    def _hang_up(self, connection: int, at_once: bool = False) -> None:
        peer = self._peers.pop(connection, None)
        if peer:
            peer.abort() if at_once else peer.close()

    def _welcome(self, welcome: instructions.Welcome) -> None:
        peer, policy = self._peers.get(welcome.to), self.ledger.policy
        if peer is None:
            return
        worker, incarnation = welcome.worker, welcome.incarnation
        shards = tuple(
            (*self.shards.addresses[number], pieces) for number, pieces in enumerate(self.agreement.pieces())
        )
        ticket = handshake.ticket(self._key, worker, incarnation)
        gated, asks = policy.streamed and policy.takes_turns, self._at_a_time > 0
        lease, mixes = self.terms.lease, policy.mixes
        peer.send(Welcome(worker, incarnation, shards, lease, gated, ticket, mixes, asks, self._streams))

    def _to_shards(self, instruction: Any) -> None:
        self.shards.send(TO_SHARDS[type(instruction)](instruction))

    def _apply(self, apply: instructions.Apply) -> None:
        if self._streams:
            return  # the shards have applied it already
        if apply.compare:
            self.shards.expect_comparison(apply.version, apply.decision)
        self._to_shards(apply)

    def _drop(self, drop: instructions.Drop) -> None:
        if drop.shard is None:
            self.shards.send(Drop(drop.update))
        else:
            self.shards.send_to(drop.shard, Drop(drop.update))

    def _save(self, save: instructions.Save) -> None:
        assert self._writer is not None
        error = self._writer.begin(save.version, {**save.snapshot, "description": json.loads(self.agreement.text)})
        if error:
            self.tell(events.Stored(save.version, error))
        else:
            self.shards.send(Save(save.version, str(self._writer.folder(save.version).resolve())))

    def _store(self, store: instructions.Store) -> None:
        async def write() -> None:
            assert self._writer is not None
            error = await asyncio.to_thread(self._writer.finish, store.version)
            self.tell(events.Stored(store.version, error))

        self._writing = self._loop.create_task(write())

    # Callers

    async def _serve(self, peer: Peer, first: Any, is_shard: bool) -> None:
        match first:
            case Register() if is_shard:
                await self.shards.serve(peer, first, self._set_up_shards)
            case Join() | Resume():
                await self._serve_worker(peer, first)
            case Subscribe():
                so_far: list[Event] = [Began(self.now, "", self.terms.policy, self.apply, 0)]
                self.state.introduce(Recorder(so_far.append))
                await self._onlookers.serve(peer, so_far)
            case Inspect():
                peer.send(self._inspected(first))
            case _:
                raise WireError(f"A {type(first).__name__} is out of place here.")

    async def _serve_worker(self, peer: Peer, first: Join | Resume) -> None:
        if isinstance(first, Join):
            await self.shards.complete.wait()
        connection = next(self._numbers)
        if isinstance(first, Join) and self.terms.shards and self.agreement.agree(peer.body):
            self.tell(events.Described(self.agreement.momentum))
            self._set_up_shards()
        self._peers[connection] = peer
        try:
            if isinstance(first, Join):
                self.tell(events.Join(connection, first.worker))
            else:
                who = (first.worker, first.incarnation)
                genuine = handshake.is_ticket(self._key, *who, first.ticket)
                self.tell(events.Resume(connection, *who, first.generation, genuine))
            while connection in self._peers:
                message = await peer.receive()
                event = event_of(message, connection)
                if event is None:
                    raise WireError(f"A {type(message).__name__} is out of place here.")
                self.tell(event)
        except WireError:
            self.tell(events.Misbehaved(connection))
            raise
        finally:
            self._peers.pop(connection, None)
            self.tell(events.Disconnected(connection))  # merely that: the lease decides

    def _set_up_shards(self) -> None:
        """Tell each shard which part of which model it holds, once that is known."""
        if not self.agreement.is_known:
            return
        folder = str(self._restored.folder.resolve()) if self._restored else ""
        version = self._restored.version if self._restored else 0
        how = (self._key, self._streams, self._at_a_time, self.agreement.correct)
        for number, pieces in enumerate(self.agreement.pieces()):
            record = f"{self.terms.record}/shard-{number}-{self.generation}.rec" if self.terms.record else ""
            self.shards.send_to(number, Setup(pieces, folder, version, record, *how), self.agreement.text)

    def _write_journal(self, line: str) -> None:
        if self._journal:
            self._journal.write(line + "\n")

    def _inspected(self, asked: Inspect) -> Inspected:
        """The workers that the policy leaves out, when it has taken back those who were named."""
        blacklist = self.state.blacklist()
        pardoned = sorted(blacklist) if asked.everyone else [each for each in asked.pardon if each in blacklist]
        self.tell(events.Pardon(tuple(pardoned)))
        left = tuple(sorted(self.state.blacklist().items()))
        return Inspected(self.ledger.policy.compares, left, tuple(pardoned))
