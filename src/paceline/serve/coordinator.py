"""The coordinator: it owns the policy, the membership, the leases and the order log.

It is told what happens by workers and shards, asks the policy, and carries its decisions out: an Apply goes to every
shard with its number in the log, so all shards apply in one order; a Grant goes to its worker. It never sees a tensor.
Everything happens in one event loop, one thing after the other.

One coordinator is one generation of a server. When a shard is lost it has failed, and a new generation begins from the
last checkpoint. Without any shard it only paces: somebody else moves the bytes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from paceline import policies
from paceline.model.correction import Asked, Correction, checked, chosen, momentum_of
from paceline.observe.events import Began, as_line
from paceline.observe.journal import Journal
from paceline.observe.ledger import Ledger
from paceline.observe.observer import Observer, Recorder, Tee
from paceline.policies import Decision, Policy, Update
from paceline.serve import greeting
from paceline.serve.alarm import Alarm
from paceline.serve.checkpoint import Checkpoint, CheckpointError
from paceline.serve.comparison import Comparison
from paceline.serve.description import Description
from paceline.serve.door import CALLERS
from paceline.serve.lull import Lull
from paceline.serve.messages import (
    MOST_STALENESS,
    Accepted,
    Add,
    Apply,
    Arrived,
    Barred,
    Beat,
    Begun,
    Cancelled,
    Compared,
    Drop,
    Expelled,
    Failed,
    Faulted,
    Fence,
    Finish,
    Finished,
    Give,
    Given,
    Giver,
    Granted,
    Happened,
    Identity,
    Inspect,
    Inspected,
    Join,
    Keep,
    Leave,
    Loaded,
    Measured,
    Proof,
    Ranges,
    Ready,
    Refused,
    Register,
    Resume,
    Resumed,
    Save,
    Saved,
    Setup,
    Soon,
    Stop,
    Stream,
    Subscribe,
    Turned,
    Want,
    Welcome,
)
from paceline.serve.peer import Peer
from paceline.serve.roster import Member, Roster
from paceline.serve.samples import Samples
from paceline.serve.saving import Plan, Saver
from paceline.serve.wire import Reader, WireError

log = logging.getLogger(__name__)

HEARD_HERE = Reader(
    Proof
    | Join
    | Resume
    | Want
    | Soon
    | Ready
    | Measured
    | Finish
    | Beat
    | Leave
    | Register
    | Loaded
    | Begun
    | Arrived
    | Compared
    | Saved
    | Failed
    | Faulted
    | Subscribe
    | Inspect
)
GREETING_SECONDS = 10.0
MOST_WORKERS = 1 << 31
MOST_SAMPLES = 1 << 40  # in an update
MOST_TAKEN = 1 << 14  # ranges of samples that a worker may hold at a time
AWAITED = 60.0  # seconds, or two leases, for which one who was given up is expected back before the job may end
HANGING_UP = 2.0  # seconds for what was said last to get out
SHARD_SILENCE = 20.0  # seconds of silence after which a shard counts as lost; it beats every second


@dataclass(frozen=True)
class Terms:
    """What a job is served under."""

    shards: int = 1
    workers: int = 1  # the job begins when so many have come; more may come later
    token: bytes = b""
    lease: float = 30.0  # seconds of silence before a worker is given up
    saving: Plan | None = None
    record: Path | None = None  # a folder that shards write every update to
    policy: str = ""  # its name, for the checkpoint and the trace
    streamed: bool = False  # is each piece of an update applied as it comes, where the policy allows it?
    slices: int | None = None  # pieces that the model is cut into then, at least; None: as many as its size calls for
    tls: ssl.SSLContext | None = None
    began: float | None = None  # by time.monotonic, when the job began, if it was not now
    awaited: frozenset[int] | None = None  # who took part in the generation before and had not left; None: not known
    incarnations: dict[int, int] = field(default_factory=dict)  # the last of each worker, from the generation before
    shard_token: bytes = b""  # what only the server's own shards know; empty: whoever knows the job's may be one
    correct: Asked = "auto"  # how staleness known in advance is taken into account; auto: as the optimizer allows

    def __post_init__(self) -> None:
        checked(self.correct)

    def streams(self, policy: Policy) -> bool:
        """Is each piece of an update applied as it comes, under this policy?"""
        return bool(self.shards) and (policy.pipelined or (self.streamed and policy.streamable))


class Coordinator:
    """The policy, at a listening socket."""

    def __init__(
        self, policy: Policy, terms: Terms, observer: Observer | None = None, restored: Checkpoint | None = None
    ) -> None:
        self.terms = terms
        policy.streamed = terms.streamed and policy.streamable
        self._streams = terms.streams(policy)
        self._loop = asyncio.get_running_loop()
        self.generation = secrets.token_hex(8)
        self._key = secrets.token_bytes(32)  # for workers' tickets
        self._met: dict[asyncio.Task[None], Peer] = {}  # every connection there is
        self._subscribers: set[Peer] = set()
        watching = Recorder(self._broadcast)
        self._observer: Observer = Tee(observer, watching) if observer else watching
        self._journal: IO[str] | None = None
        if terms.record:
            terms.record.mkdir(parents=True, exist_ok=True)
            self._journal = (terms.record / f"decisions-{self.generation}.jsonl").open("w")
            policy = cast(Policy, Journal(policy, terms.policy, self._journalize))
        self.ledger = Ledger(policy, self._observer)
        self.joined_ever = False  # has any worker taken part?
        self.done = asyncio.Event()  # everybody who took part has left of their own accord
        self.failed = asyncio.Event()  # a shard is lost, or cannot work
        self.reason = ""  # why it failed
        self.hopeless = False  # would it fail again?
        self.faults = 0  # peers that were turned away
        self.samples: Samples | None = None
        self._shards: dict[int, Peer] = {}
        self._heard_shard: dict[int, float] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._complete = asyncio.Event()  # all shards are there
        self._begun: set[int] = set()  # shards that have weights to begin with
        self._giver: Member | None = None  # who gives them
        self._described: Description | None = None
        self._description = b""
        self._correct: Correction = "none"  # until it is known what is trained
        self._turns: dict[int, int] = {}  # worker → the Applies that make up a round, as its last Grant told
        self._workers_wanted = 1 if restored else terms.workers  # not all may come back
        self._incarnations: dict[int, int] = dict(terms.incarnations)
        self.roster = Roster(terms.workers, terms.awaited, restored is not None)
        for worker in self.roster.awaited:
            self._expire(worker)
        self._grace: asyncio.TimerHandle | None = None
        # Arrived and undecided. Those of two incarnations of a worker may look the same; the first came first.
        self._identities: dict[Update, list[Identity]] = {}
        self._kept: dict[int, tuple[Update, Identity]] = {}  # by its slot
        self._lull = Lull()
        self._streams_issued = 0
        self._applied: dict[tuple[int, int], int] = {}  # worker, incarnation → its newest iteration that was applied
        self._restored = restored
        self._saver: Saver | None = None
        if terms.saving and terms.shards:
            self._saver = Saver(terms.saving, terms.shards, self._order_save, restored.version if restored else None)
        self._writing: asyncio.Task[None] | None = None  # a checkpoint's last step
        self._closing = False
        self._watch: asyncio.Task[None] | None = None
        self._alarm = Alarm(self._loop, self._woke)
        self._start = time.monotonic() if terms.began is None else terms.began
        self._server: asyncio.Server | None = None
        self._comparing: dict[int, Comparison] = {}  # version → what shards have said of its updates so far
        self._decide: dict[type, Callable[[Any], None]] = {
            policies.Grant: self._grant,
            policies.Turn: self._turn,
            policies.Stream: self._stream,
            policies.Add: self._add,
            policies.Apply: self._apply,
            policies.Discard: self._discard,
            policies.Keep: self._keep,
            policies.Cancel: self._cancel,
            policies.WakeAt: lambda wake: self._alarm.set(self._start + wake.time),
        }
        if restored:
            self._restore(restored)
        if not terms.shards:
            self._complete.set()

    @property
    def now(self) -> float:
        """Seconds since the job began."""
        return time.monotonic() - self._start  # the loop's own clock may count whole milliseconds

    @property
    def _at_a_time(self) -> int:
        """Where workers take turns: as many transfers as a worker has shards to talk to at once. 0: any number."""
        return self.terms.shards if self.ledger.policy.takes_turns and not self._streams else 0

    @property
    def apply(self) -> str:
        """How updates are applied: whole, or streamed."""
        return "streamed" if self._streams else "whole"

    @property
    def incarnations(self) -> dict[int, int]:
        """The last incarnation of each worker."""
        return dict(self._incarnations)

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Begin to listen; the port."""
        within = GREETING_SECONDS if self.terms.tls else None
        self._server = await asyncio.start_server(
            self._meet, host, port, backlog=CALLERS, ssl=self.terms.tls, ssl_handshake_timeout=within
        )
        self._watch = self._loop.create_task(self._watch_leases())
        return int(self._server.sockets[0].getsockname()[1])

    async def save(self) -> None:
        """Write a last checkpoint, if the model has moved since the one before."""
        saver = self._saver
        if saver is None or self.failed.is_set() or len(self._begun) < self.terms.shards:
            return
        begun = False  # one attempt: workers may train on meanwhile, and a disk may be full
        while not self.failed.is_set():
            if not saver.busy and not self._lull.is_awaited:
                if begun or saver.saved == self.ledger.version:
                    return
                self._begin_save()
                begun = True
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Tell the shards to stop, and hang up."""
        self._closing = True
        if self._watch:
            self._watch.cancel()
        if self._grace:
            self._grace.cancel()
        self._alarm.cancel()
        if self._server:
            self._server.close()
        for peer in self._shards.values():
            peer.send(Stop())
        if self._writing:
            await self._writing
        for peer in self._met.values():
            peer.close()
        if self._met:
            _, slow = await asyncio.wait(self._met, timeout=HANGING_UP)
            for meeting in slow:
                self._met[meeting].abort()
                meeting.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
        if self._journal:
            self._journal.close()
            self._journal = None

    # Meeting

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer, HEARD_HERE)
        first = None
        meeting = asyncio.current_task()
        assert meeting is not None
        if self._closing:
            peer.abort()
            return
        self._met[meeting] = peer
        try:
            first, is_shard = await asyncio.wait_for(self._greet(peer), GREETING_SECONDS)
            match first:
                case Register() if is_shard:
                    await self._serve_shard(peer, first)
                case Join() | Resume():
                    await self._serve_worker(peer, first)
                case Subscribe():
                    await self._serve_subscriber(peer)
                case Inspect():
                    peer.send(self._inspected(first))
                case _:
                    raise WireError(f"A {type(first).__name__} is out of place here.")
        except asyncio.CancelledError:
            pass  # the server is closing
        except (asyncio.IncompleteReadError, TimeoutError, OSError) as error:
            log.info("a connection ended: %s", error)
            if isinstance(error, WireError):
                self.faults += 1
                peer.send(Refused(str(error)))
        except Exception as error:
            if first is not None:
                self._stumble(error)
            else:  # a stranger must not be able to end a generation, whatever we overlooked
                log.error("a stranger made the coordinator stumble", exc_info=error)
        finally:
            peer.close()
            await peer.closed()
            del self._met[meeting]

    async def _greet(self, peer: Peer) -> tuple[Any, bool]:
        """Who is it? Its first message, and whether it is one of our shards. Strangers do not get past this."""
        asked = greeting.challenge(self.generation)
        peer.send(asked)
        answer = await peer.receive()
        own, verdict = self.terms.shard_token, greeting.judge(self.terms.token, asked, answer)
        is_shard = not own
        if own and isinstance(verdict, Refused) and isinstance(by_own := greeting.judge(own, asked, answer), Accepted):
            verdict, is_shard = by_own, True
        if isinstance(verdict, Refused):
            raise WireError(verdict.reason)
        peer.send(verdict)
        peer.most_body = Description.MOST
        return await peer.receive(), is_shard

    async def _serve_subscriber(self, peer: Peer) -> None:
        peer.send(Happened(as_line(Began(self.now, "", self.terms.policy, self.apply, 0))))
        self._subscribers.add(peer)
        try:
            while True:
                await peer.receive()  # it has nothing to say; this ends when it goes
        finally:
            self._subscribers.discard(peer)

    def _journalize(self, line: str) -> None:
        if self._journal:
            self._journal.write(line + "\n")

    def _broadcast(self, event: Any) -> None:
        if self._subscribers:
            happened = Happened(as_line(event))
            for peer in self._subscribers:
                peer.send(happened)

    # Shards

    async def _serve_shard(self, peer: Peer, first: Register) -> None:
        shard = first.shard
        if shard in self._shards or not 0 <= shard < self.terms.shards:
            raise WireError(f"There is a shard {shard} already, or none is wanted.")
        self._shards[shard] = peer
        self._heard_shard[shard] = self.now
        self._addresses[shard] = ("" if _is_loopback(peer.host) else peer.host, first.port)
        if len(self._shards) == self.terms.shards:
            if self._restored:
                self._set_up_shards()
            self._complete.set()
        try:
            while True:
                message = await peer.receive()
                self._heard_shard[shard] = self.now
                try:
                    self._from_shard(shard, message)
                except WireError:
                    raise
                except Exception as error:
                    self._stumble(error)
                    return
        finally:
            if not self._closing:
                self.fail(f"Shard {shard} is lost.")

    def _from_shard(self, shard: int, message: Any) -> None:
        match message:
            case Beat():
                pass
            case Arrived(update):
                self._arrived(shard, update)
            case Loaded():
                self._begun.add(shard)
                self._admit_waiting()
            case Begun(worker, incarnation):
                giver = self._giver
                if giver and (giver.worker, giver.incarnation) == (worker, incarnation):
                    self._begun.add(shard)
                    self._admit_waiting()
            case Compared():
                self._compared(message)
            case Saved(version, error):
                self._saved(shard, version, error)
            case Faulted(reason):
                log.warning("shard %d turned a peer away: %s", shard, reason)
                self.faults += 1
            case Failed(reason):
                self.hopeless = True
                self.fail(f"Shard {shard} cannot work: {reason}")
            case _:
                raise WireError(f"A {type(message).__name__} is out of place here.")

    def _set_up_shards(self) -> None:
        assert self._described is not None
        folder = str(self._restored.folder.resolve()) if self._restored else ""
        version = self._restored.version if self._restored else 0
        for number, pieces in enumerate(self._cut()):
            record = f"{self.terms.record}/shard-{number}-{self.generation}.rec" if self.terms.record else ""
            setup = Setup(pieces, folder, version, record, self._key, self._streams, self._at_a_time, self._correct)
            self._shards[number].send(setup, self._description)

    def _cut(self) -> list[Ranges]:
        """The pieces of the model that each shard holds: one, or where they are streamed, several."""
        assert self._described is not None
        return self._described.deal(self.terms.shards, self.terms.slices if self._streams else 1)

    def fail(self, reason: str) -> None:
        """This generation is over."""
        if not self.failed.is_set():
            self.reason = reason
            self.failed.set()

    def _stumble(self, error: Exception) -> None:
        """A mistake of our own, or of the policy's: what is in our books is not to be relied on any more."""
        log.error("the coordinator stumbled", exc_info=error)
        self.fail(f"The coordinator stumbled: {error!r}.")

    # Workers

    async def _serve_worker(self, peer: Peer, first: Join | Resume) -> None:
        await self._complete.wait()
        if isinstance(first, Join):
            await self._until_vacant(first.worker)
        member = self._welcome(peer, first) if isinstance(first, Join) else self._take_back(peer, first)
        if member is None:
            return
        try:
            while True:
                message = await peer.receive()
                if not self.roster.takes_part(member) or member.peer is not peer:
                    peer.send(Expelled("This worker has been given up; it must join again."))
                    return
                member.heard = self.now
                match message:
                    case Soon():
                        self._soon(member, message)
                    case Ready():
                        self._ready(member, message)
                    case Want():
                        self._give(member, message)
                    case Measured(kind, value):
                        if member.admitted:
                            self._carry_out(self.ledger.measured(kind[:80], member.worker, value, self.now))
                    case Beat():
                        peer.send(message)
                    case Finish():
                        self._finish(member)
                    case Leave():
                        peer.send(message)
                        self._leave(member)
                        return
                    case _:
                        raise WireError(f"A {type(message).__name__} is out of place here.")
        except WireError:
            self._leave(member)
            raise
        # When the connection is merely lost, the lease decides.

    async def _until_vacant(self, worker: int | None) -> None:
        """Whoever has this worker's place gets the time to show that it is alive; behind a dead link it does not."""
        asked = self.now
        while worker is not None and (before := self.roster.find(worker)):
            if not before.peer.is_open or self.now - before.heard >= self.terms.lease / 2:
                return
            if before.heard > asked:
                raise WireError(
                    f"There is a worker {worker} already, and it is alive; give every worker a number of its own."
                )
            await asyncio.sleep(min(0.1, self.terms.lease / 20))

    def _welcome(self, peer: Peer, join: Join) -> Member:
        if self.terms.shards:
            self._check_description(peer.body)
        worker = join.worker
        if worker is None:
            worker = self.roster.free_number()
        if not 0 <= worker < MOST_WORKERS:
            raise WireError(f"A worker's number is from 0 to {MOST_WORKERS - 1}, not {worker}.")
        before = self.roster.find(worker)
        if before:
            self._leave(before, given_up=True)  # it comes back before its lease has run out
        incarnation = self._incarnations[worker] = self._incarnations.get(worker, 0) + 1
        member = Member(worker, incarnation, peer, self.now)
        self.roster.enter(member)
        cut = self._cut() if self._described else ()
        shards = tuple((*self._addresses[number], pieces) for number, pieces in enumerate(cut))
        policy, ticket = self.ledger.policy, greeting.ticket(self._key, worker, incarnation)
        asks, gated = self._at_a_time > 0, policy.streamed and policy.takes_turns
        lease, mixes = self.terms.lease, policy.mixes
        peer.send(Welcome(worker, incarnation, shards, lease, gated, ticket, mixes, asks, self._streams))
        self._ask_for_weights()
        self._admit_waiting()
        return member

    def _check_description(self, text: bytes) -> None:
        """All workers of a job train one model."""
        try:
            described = Description.from_json(text)
        except ValueError as error:
            raise WireError(f"The description of the model cannot be read: {error}.") from None
        if self._described is None:
            try:
                described.deal(self.terms.shards, 1)
            except ValueError as error:
                raise WireError(f"The model cannot be cut: {error}; use fewer servers.") from None
            try:
                self._correct = self._correction(described)
            except ValueError as error:
                raise WireError(str(error)) from None
            self._described, self._description = described, text
            self._tell_momentum(described)
            self._set_up_shards()
            return
        if self._restored:
            try:
                self._restored.must_be_of(described)
            except CheckpointError as error:
                raise WireError(str(error)) from None
        difference = self._described.differs_from(described)
        if difference:
            raise WireError(f"All workers must train the same model: {difference}.")

    def _correction(self, described: Description) -> Correction:
        """How staleness is taken into account. ValueError if what was asked for cannot be had."""
        if self.ledger.policy.mixes:
            return "none"  # workers make their own steps: there is no momentum here
        asked = self.terms.correct
        try:
            return chosen(asked, described.optimizer)
        except ValueError as error:
            raise ValueError(f"--correct {asked} cannot be had: {error}; leave it at auto.") from None

    def _tell_momentum(self, described: Description) -> None:
        """Nobody has joined, so there is nothing to decide; nor to save, since shards have nothing yet."""
        policy = self.ledger.policy
        if policy.hears_loss and not policy.mixes:
            self.ledger.measured("momentum", None, momentum_of(described.optimizer), self.now)

    def _take_back(self, peer: Peer, resume: Resume) -> Member | None:
        """A worker whose connection was lost is back: both repeat what the other may have missed."""
        if not greeting.is_ticket(self._key, resume.worker, resume.incarnation, resume.ticket):
            raise WireError(f"This is not worker {resume.worker}: it does not have its ticket.")
        member = self.roster.find(resume.worker)
        if member is None or member.incarnation != resume.incarnation:
            peer.send(Expelled("This worker has been given up; it must join again."))
            return None
        log.info("worker %d is back on a new connection", member.worker)
        member.peer.abort()
        member.peer, member.heard = peer, self.now
        peer.send(Resumed())
        if member is self._giver and len(self._begun) < self.terms.shards:
            peer.send(Give())
        if member.barred:
            peer.send(Barred(member.barred))
        if member.finished:
            peer.send(member.finished)
        elif member.granted:
            peer.send(member.granted)
            if member.turned:
                peer.send(Turned(member.iteration))
        return member

    def _ask_for_weights(self) -> None:
        """Somebody must give the weights that the model begins with, and if that one dies over it, another."""
        if self._restored or len(self._begun) == self.terms.shards or not self.roster.members:
            return
        if self._giver is None or self.roster.members.get(self._giver.worker) is not self._giver:
            self._begun.clear()
            giver = self._giver = next(iter(self.roster.members.values()))
            self._tell_shards(Giver(giver.worker, giver.incarnation))
            giver.peer.send(Give())

    def _admit_waiting(self) -> None:
        """Let the policy know of those who wait, once there is a model to train and enough to train it."""
        if len(self._begun) < self.terms.shards or len(self.roster.members) < self._workers_wanted:
            return
        self._workers_wanted = 1  # later ones come one by one
        self._save_if_due()  # a first one before anything has changed: there is always one to go back to
        # In the order of their numbers, whoever came first: a ring's neighbours then begin at neighbouring shards.
        for member in sorted(self.roster.members.values(), key=lambda member: member.worker):
            if not member.admitted:
                member.admitted = self.joined_ever = True
                self._carry_out(self.ledger.joined(member.worker, self.now, member.incarnation))
                self._tell_if_barred(member.worker)

    def _leave(self, member: Member, given_up: bool = False) -> None:
        """It takes no part any more. One who was given up is expected back for a while."""
        if not self.roster.takes_part(member):
            return
        in_order = member.worker in self.roster.members
        expected_back = given_up and member.finished is None
        self.roster.leave(member, expected_back)
        if expected_back:
            self._expire(member.worker)
        self._tell_shards(Fence(member.worker, member.incarnation + 1))
        if in_order:
            self._go_on_without(member, lost=given_up)
        self._settle()

    def _finish(self, member: Member) -> None:
        """It has no more to train on, and waits for the others; it may still pull."""
        if member.worker in self.roster.members:
            self.roster.finish(member)
            self._go_on_without(member)
            self._settle()

    def _go_on_without(self, member: Member, lost: bool = False) -> None:
        """One who was in the order is not any more."""
        self._drop_parts(member)
        if self.samples:
            self.samples.abandoned(member.worker)
        self._ask_for_weights()
        if member.admitted:
            self._carry_out(self.ledger.left(member.worker, self.now, lost=lost))

    def _settle(self) -> None:
        """Is it the end? Those who wait for the last model are told, and when all have left, the job is done."""
        roster, over = self.roster, self.roster.nobody_trains
        if over or (self.samples and self.samples.all_done):
            for member in roster.finishing.values():
                if member.finished is None:
                    member.finished = Finished(self.ledger.version)
                    member.peer.send(member.finished)
        if over and not roster.finishing and self.joined_ever:
            if self._restored and self.samples and not self.samples.all_done:
                log.warning("the job ends before all samples are done again: everybody had finished when it went back")
            self.done.set()
        if roster.only_strangers_are_missing and self._grace is None:
            self._grace = self._loop.call_later(self.terms.lease, self._expect_no_strangers)

    def _expect_no_strangers(self) -> None:
        self.roster.expect_no_strangers()
        self._settle()

    def _expire(self, worker: int) -> None:
        """Somebody who is expected back is not expected for ever."""
        self._loop.call_later(max(AWAITED, 2 * self.terms.lease), self._await_no_more, worker)

    def _await_no_more(self, worker: int) -> None:
        if worker in self.roster.awaited and not self._closing:
            self.roster.awaited.discard(worker)
            self._settle()

    async def _watch_leases(self) -> None:
        """Give up whoever is silent for too long. If we ourselves were away, everybody gets their time again."""
        pause = min(1.0, self.terms.lease / 4)
        last = self.now
        while True:
            await asyncio.sleep(pause)
            away, last = self.now - last - pause, self.now
            if away > pause:
                log.warning("the coordinator itself was held up for %.1f s; leases are extended", away)
                for member in self.roster.present():
                    member.heard += away
                for shard in self._heard_shard:
                    self._heard_shard[shard] += away
            for member in self.roster.present():
                if self.now - member.heard > self.terms.lease:
                    log.warning("worker %d was silent for %.1f s and is given up", member.worker, self.terms.lease)
                    member.peer.send(Expelled("This worker was silent for too long; it must join again."))
                    member.peer.close()
                    try:
                        self._leave(member, given_up=True)
                    except Exception as error:
                        self._stumble(error)
            for shard, heard in self._heard_shard.items():
                if self.now - heard > SHARD_SILENCE:
                    self.fail(f"Shard {shard} has been silent for {SHARD_SILENCE:g} s.")

    # What happens

    def _give(self, member: Member, want: Want) -> None:
        if want.size < 1 or want.epochs < 0 or want.count < 1:
            raise WireError(f"There are no {want.count} samples in a dataset of {want.size} for {want.epochs} epochs.")
        if self.samples is None:
            self.samples = Samples(want.size, want.epochs)
        elif self.samples.size != want.size:
            raise WireError(
                f"All workers must train on the same data: {self.samples.size} samples here, and {want.size} there."
            )
        if self.samples.held_by(member.worker) >= MOST_TAKEN:
            raise WireError(f"A worker may hold {MOST_TAKEN} ranges of samples, and this one wants more.")
        given = self.samples.take(member.worker, want.number, want.count, want.epochs)
        member.peer.send(Given(want.number, *given) if given else Given(want.number))

    def _soon(self, member: Member, soon: Soon) -> None:
        """It will be ready, and can begin to push."""
        if not 1 <= soon.iteration <= member.iteration or not 1 <= soon.batch_size <= MOST_SAMPLES:
            raise WireError(f"Iteration {soon.iteration} of {soon.batch_size} samples was not granted to this worker.")
        if soon.iteration == member.iteration and not (member.announced or member.answered):
            if not 0 <= soon.base_version <= self.ledger.version:
                raise WireError("An update must be of a version that there was.")
            member.announced = True
            self._observer.pulled(self.now, member.worker, soon.base_version)
            self._carry_out(self.ledger.ready(member.worker, soon.batch_size, self.now))

    def _ready(self, member: Member, ready: Ready) -> None:
        if not 1 <= ready.iteration <= member.iteration:
            raise WireError(f"Iteration {ready.iteration} was not granted to this worker.")
        if ready.iteration != member.iteration:  # of a cancelled iteration
            if self.samples:
                self.samples.returned(member.worker, ready.taken)
            return
        if member.answered or member.ready:
            return  # it came back, and says again what was heard
        if not 1 <= ready.batch_size <= MOST_SAMPLES or not 0 <= ready.base_version <= self.ledger.version:
            raise WireError(f"An update must be of 1 to {MOST_SAMPLES} samples, and of a version that there was.")
        if not 0 <= ready.compute_seconds < math.inf:
            raise WireError(f"Computing took {ready.compute_seconds} s, says this worker, and that cannot be.")
        member.ready = ready
        if not member.announced:
            member.announced = True
            now = self.now
            self._observer.pulled(now, member.worker, ready.base_version)
            self._carry_out(self.ledger.ready(member.worker, ready.batch_size, now, ready.compute_seconds))
        self._whole(member)

    def _arrived(self, shard: int, update: Identity) -> None:
        member = self.roster.members.get(update.worker)
        if member and member.incarnation == update.incarnation and not 1 <= update.iteration <= member.iteration:
            self.faults += 1
            member.peer.send(Refused(f"Iteration {update.iteration} was not granted to this worker."))
            member.peer.close()
            self._leave(member)
            member = None
        if member is None or member.identity != update:
            self._shards[shard].send(Drop(update))  # of one who has left, or of a cancelled iteration
        elif not member.answered:
            member.parts.add(shard)
            self._whole(member)

    def _whole(self, member: Member) -> None:
        """Does an update count? It does when all shards have it."""
        ready = member.ready
        if ready is None or len(member.parts) < self.terms.shards:
            return
        member.ready, member.parts, member.answered = None, set(), True
        update = Update(
            member.worker,
            ready.iteration,
            ready.base_version,
            ready.batch_size,
            ready.compute_seconds,
            ready.loss if ready.loss is not None and math.isfinite(ready.loss) else None,
            incarnation=member.incarnation,
        )
        self._identities.setdefault(update, []).append(member.identity)
        if self.samples:
            self.samples.arrived(member.worker, ready.taken, member.identity)
        self._carry_out(self.ledger.arrived(update, self.now))

    def _drop_parts(self, member: Member) -> None:
        """Of an update that will never be whole."""
        if self._streams and member.announced and not member.answered:
            member.dropped = True
            self._tell_shards(Drop(member.identity))
            self._lull.settled(member.identity)
        for shard in () if self._streams else member.parts:
            self._shards[shard].send(Drop(member.identity))
        member.parts = set()
        if self.samples and member.ready:
            self.samples.returned(member.worker, member.ready.taken)
        member.ready = None

    # Decisions

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self._decide[type(decision)](decision)
        self._save_if_due()

    def _grant(self, grant: policies.Grant) -> None:
        member = self.roster.members[grant.worker]
        self._drop_parts(member)
        member.iteration += 1
        member.answered = member.turned = member.announced = member.dropped = False
        pull = not self._streams or member.applied != self.ledger.version
        expected = _within_reason(grant.expected_staleness)
        self._turns[grant.worker] = 1 if expected is None else expected + 1
        member.granted = Granted(member.iteration, self.ledger.version, grant.batch_size, pull, expected)
        member.peer.send(member.granted)

    def _turn(self, turn: policies.Turn) -> None:
        if not self.ledger.policy.streamed:
            return
        member = self.roster.members[turn.worker]
        iteration = member.iteration

        def now() -> None:
            if self._goes_on(member, iteration):
                member.turned = True
                member.peer.send(Turned(iteration))

        self._lull.unless_awaited(now)

    def _stream(self, stream: policies.Stream) -> None:
        members = [self.roster.members[worker] for worker in stream.workers]
        identities = [member.identity for member in members]

        def now() -> None:
            known = {
                identity: weight
                for member, identity, weight in zip(members, identities, stream.weights, strict=True)
                if self._goes_on(member, identity.iteration)
            }
            self._streams_issued += 1
            self._lull.begun(known)
            order = Stream(
                self._streams_issued,
                tuple(known),
                tuple(known.values()),
                stream.in_order,
                self._turns_of(identities),
                _within_reason(stream.expected_staleness),
            )
            self._tell_shards(order)

        self._lull.unless_awaited(now)

    def _goes_on(self, member: Member, iteration: int) -> bool:
        """Is it still at this iteration? When an order was put off, it may have left or been cancelled meanwhile."""
        return self.roster.takes_part(member) and member.iteration == iteration and not member.dropped

    def _decided(self, update: Update) -> Identity:
        """An update that waits no longer."""
        identities = self._identities[update]
        identity = identities.pop(0)
        if not identities:
            del self._identities[update]
        return identity

    def _add(self, add: policies.Add) -> None:
        newest = self._identities[add.update][-1]  # it has just arrived
        self._tell_shards(Add(newest, add.sum, add.weight))

    def _apply(self, apply: policies.Apply) -> None:
        kept = dict(self._kept.values())
        identities = tuple(kept.get(update) or self._decided(update) for update in apply.updates)
        if not self._streams:  # there they have applied it
            turns, compare = self._turns_of(identities), self.ledger.policy.compares and len(identities) > 1
            if compare and self._shards:
                self._comparing[self.ledger.version] = Comparison(apply)
            self._tell_shards(
                Apply(self.ledger.version, identities, apply.weights, apply.mix, turns, compare, apply.sums)
            )
        self._trained(*identities)
        for identity in identities:
            self._applied[identity.worker, identity.incarnation] = identity.iteration
            member = self.roster.members.get(identity.worker)
            if member and member.incarnation == identity.incarnation:
                member.applied = self.ledger.version
        for identity in identities:
            self._lull.settled(identity)

    def _compared(self, part: Compared) -> None:
        """What one shard says of the updates of an Apply; when all have, the policy is told."""
        comparison = self._comparing.get(part.version)
        if comparison is None or not comparison.fits(part):
            raise WireError("What was compared is not what was asked for.")
        comparison.add(part)
        if comparison.parts < len(self._shards):
            return
        del self._comparing[part.version]
        for update, cosine in zip(comparison.updates, comparison.cosines(), strict=True):
            self._carry_out(self.ledger.measured("cosine", update, cosine, self.now))
        for update in comparison.updates:
            self._tell_if_barred(update.worker)

    def _tell_if_barred(self, worker: int) -> None:
        """Who is not granted any more is told so, once: it would wait without a word."""
        member = self.roster.members.get(worker)
        if member:
            before, member.barred = member.barred, self.ledger.policy.barred(worker)
            if member.barred and not before:
                member.peer.send(Barred(member.barred))

    def _inspected(self, asked: Inspect) -> Inspected:
        """Whom the policy leaves out, when it has taken back those who were named."""
        blacklist = self._blacklist()
        pardoned = sorted(blacklist) if asked.everyone else [each for each in asked.pardon if each in blacklist]
        if pardoned:
            self._carry_out(self.ledger.measured("pardon", tuple(pardoned), 1.0, self.now))
            for worker in pardoned:
                self._tell_if_barred(worker)
        left = tuple(sorted(self._blacklist().items()))
        return Inspected(self.ledger.policy.compares, left, tuple(pardoned))

    def _blacklist(self) -> dict[int, tuple[float, ...]]:
        found = self.ledger.policy.memory().get("blacklist", {})
        return {int(client): tuple(cosines) for client, cosines in found.items()}

    def _turns_of(self, updates: Iterable[Identity]) -> int:
        """How many Applies like one of these updates make up a round, as far as the policy knows; the most, if any."""
        return max((self._turns.get(update.worker, 1) for update in updates), default=1)

    def _trained(self, *updates: Identity) -> None:
        """The samples of these updates are done."""
        if self.samples:
            for update in updates:
                self.samples.done(update)
            done, size = self.samples.trained, self.samples.size
            self._observer.progressed(self.now, done // size, done, size * self.samples.epochs)
            if self.roster.finishing:
                self._settle()

    def _discard(self, discard: policies.Discard) -> None:
        identity = self._decided(discard.update)
        self._lull.settled(identity)
        self._tell_shards(Drop(identity))
        if self.samples:
            self.samples.dropped(identity)

    def _keep(self, keep: policies.Keep) -> None:
        identity = self._decided(keep.update)
        self._kept[keep.slot] = (keep.update, identity)
        self._tell_shards(Keep(identity, keep.slot))
        self._trained(identity)

    def _cancel(self, cancel: policies.Cancel) -> None:
        member = self.roster.members[cancel.worker]
        member.peer.send(Cancelled(member.iteration))
        self._drop_parts(member)

    def _woke(self) -> None:
        try:
            self._carry_out(self.ledger.woke(self.now))
        except Exception as error:
            self._stumble(error)

    def _tell_shards(self, message: Any) -> None:
        for peer in self._shards.values():
            peer.send(message)

    # Checkpoints

    def _save_if_due(self) -> None:
        if self._saver and not self._lull.is_awaited and self._saver.is_due(self.ledger.version, self.now):
            self._begin_save()

    def _begin_save(self) -> None:
        saver = self._saver
        assert saver is not None
        self._lull.once(lambda: saver.begin(self.ledger.version, self.now, self._job()))

    def _order_save(self, version: int, folder: Path) -> None:
        self._tell_shards(Save(version, str(folder.resolve())))

    def _job(self) -> dict[str, Any]:
        """What the coordinator knows at this point of the log."""
        return {
            "version": self.ledger.version,
            "shards": self.terms.shards,
            "policy": self.terms.policy,
            "memory": self.ledger.policy.memory(),
            "seconds": self.now,
            "incarnations": {str(worker): last for worker, last in self._incarnations.items()},
            "applied": [[*key, iteration] for key, iteration in self._applied.items()],
            "samples": self.samples.as_json() if self.samples else None,
            "description": json.loads(self._description),
        }

    def _saved(self, shard: int, version: int, error: str) -> None:
        saver = self._saver
        if saver and saver.written(shard, version, error):
            self._writing = self._loop.create_task(asyncio.to_thread(saver.finish))

    def _restore(self, restored: Checkpoint) -> None:
        job = restored.job
        self._described = restored.description
        self._description = self._described.as_json()
        self._correct = self._correction(self._described)
        self._tell_momentum(self._described)
        self.ledger.version = restored.version
        if job["policy"] == self.terms.policy and isinstance(memory := job.get("memory"), dict):
            self.ledger.policy.recall(memory)
        self.samples = Samples.from_json(job["samples"]) if job["samples"] else None
        self._applied = {(worker, incarnation): iteration for worker, incarnation, iteration in job["applied"]}
        for worker, last in job["incarnations"].items():
            known = self._incarnations.get(int(worker), 0)
            self._incarnations[int(worker)] = max(last, known)


def _within_reason(staleness: int | None) -> int | None:
    """What a policy expects, as far as shards bear to be told of it."""
    return None if staleness is None else max(0, min(staleness, MOST_STALENESS))


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")
