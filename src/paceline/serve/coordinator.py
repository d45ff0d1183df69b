"""The coordinator: it owns the policy, the membership, the leases and the order log.

It is told what happens by workers and shards, asks the policy, and carries its decisions out: an Apply goes to every
shard with its number in the log, so all shards apply in one order; a Grant goes to its worker. It never sees a tensor.
Everything happens in one event loop, one thing after the other.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from typing import Any

from paceline import policies
from paceline.observe.ledger import Ledger
from paceline.observe.observer import Observer
from paceline.policies import Decision, Policy, Update
from paceline.serve import greeting
from paceline.serve.description import Description
from paceline.serve.messages import (
    Apply,
    Arrived,
    Beat,
    Begun,
    Cancelled,
    Drop,
    Fence,
    Given,
    Granted,
    Identity,
    Join,
    Keep,
    Leave,
    Proof,
    Ready,
    Refused,
    Register,
    Setup,
    Stop,
    Turned,
    Want,
    Welcome,
)
from paceline.serve.samples import Samples
from paceline.serve.wire import PREFIX, Reader, WireError, decode_prefix, encode

log = logging.getLogger(__name__)

HEARD_HERE = Reader(Proof | Join | Want | Ready | Beat | Leave | Register | Arrived | Begun)
GREETING_SECONDS = 10.0
MOST_WAITING = 1 << 20  # bytes that a peer may leave unread before it is given up


class Peer:
    """One connection: frames over a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host = str(writer.get_extra_info("peername")[0])
        self.body = b""  # of the last message that had one

    async def receive(self) -> Any:
        head_size, body_size = decode_prefix(await self._reader.readexactly(PREFIX.size))
        message = HEARD_HERE.head(await self._reader.readexactly(head_size))
        if body_size:
            if not isinstance(message, Join) or body_size > Description.MOST:
                raise WireError(f"A {type(message).__name__} with {body_size} bytes is not taken here.")
            self.body = await self._reader.readexactly(body_size)
        return message

    def send(self, message: Any, body: bytes = b"") -> None:
        """Send without waiting; a peer that does not read is cut off."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MOST_WAITING:
            log.warning("a peer at %s does not read; its connection is cut", self.host)
            self._writer.transport.abort()
            return
        self._writer.write(encode(message, len(body)) + body)

    def close(self) -> None:
        self._writer.close()


class Member:
    """A worker that takes part."""

    def __init__(self, worker: int, incarnation: int, peer: Peer, now: float) -> None:
        self.worker, self.incarnation, self.peer = worker, incarnation, peer
        self.heard = now
        self.admitted = False  # has the policy been told?
        self.iteration = 0
        self.ready: Ready | None = None
        self.parts: set[int] = set()  # shards at which this iteration's update is in


class Coordinator:
    """The policy, at a listening socket."""

    def __init__(
        self,
        policy: Policy,
        shards: int,
        token: bytes = b"",
        lease: float = 30.0,
        observer: Observer | None = None,
        workers: int = 1,
    ) -> None:
        """The job begins when so many workers have come; more may come later."""
        self.generation = secrets.token_hex(8)
        self.ledger = Ledger(policy, observer or Observer())
        self.lease = lease
        self.joined_ever = False  # has any worker taken part?
        self.done = asyncio.Event()  # every worker that took part has left
        self._shards_wanted = shards
        self._workers_wanted = workers
        self._token = token
        self._observer = observer or Observer()
        self._shards: dict[int, Peer] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._complete = asyncio.Event()  # all shards are there
        self._begun: set[int] = set()  # shards that have the first weights
        self._described: Description | None = None
        self._members: dict[int, Member] = {}
        self._incarnations: dict[int, int] = {}
        self._identity: dict[Update, Identity] = {}
        self.samples: Samples | None = None
        self._wake: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._server: asyncio.Server | None = None
        self._decide: dict[type, Callable[[Any], None]] = {
            policies.Grant: self._grant,
            policies.Turn: self._turn,
            policies.Apply: self._apply,
            policies.Discard: self._discard,
            policies.Keep: self._keep,
            policies.Cancel: self._cancel,
            policies.WakeAt: self._wake_at,
        }

    @property
    def now(self) -> float:
        """Seconds since the job began."""
        return self._loop.time() - self._start

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Begin to listen; the port."""
        self._server = await asyncio.start_server(self._meet, host, port)
        self._watch = self._loop.create_task(self._watch_leases())
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Tell the shards to stop, and hang up."""
        self._watch.cancel()
        if self._wake:
            self._wake.cancel()
        for peer in self._shards.values():
            peer.send(Stop())
        for member in self._members.values():
            member.peer.close()
        await asyncio.sleep(0)
        for peer in self._shards.values():
            peer.close()
        if self._server:
            self._server.close()

    # Meeting

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        try:
            asked = greeting.challenge(self.generation)
            peer.send(asked)
            verdict = greeting.judge(self._token, asked, await asyncio.wait_for(peer.receive(), GREETING_SECONDS))
            peer.send(verdict)
            if isinstance(verdict, Refused):
                raise WireError(verdict.reason)
            first = await asyncio.wait_for(peer.receive(), GREETING_SECONDS)
            if isinstance(first, Register):
                await self._serve_shard(peer, first)
            elif isinstance(first, Join):
                await self._serve_worker(peer, first)
            else:
                raise WireError(f"A {type(first).__name__} is out of place here.")
        except asyncio.CancelledError:
            pass  # the server is closing
        except (asyncio.IncompleteReadError, TimeoutError, OSError) as error:
            log.info("a connection ended: %s", error)
            if isinstance(error, WireError):
                peer.send(Refused(str(error)))
        finally:
            peer.close()

    async def _serve_shard(self, peer: Peer, first: Register) -> None:
        if first.shard in self._shards or not 0 <= first.shard < self._shards_wanted:
            raise WireError(f"There is a shard {first.shard} already, or none is wanted.")
        self._shards[first.shard] = peer
        self._addresses[first.shard] = (peer.host, first.port)
        if len(self._shards) == self._shards_wanted:
            self._complete.set()
        while True:
            message = await peer.receive()
            if isinstance(message, Arrived):
                self._arrived(first.shard, message.update)
            elif isinstance(message, Begun):
                self._begun.add(first.shard)
                self._admit_waiting()
            else:
                raise WireError(f"A {type(message).__name__} is out of place here.")

    async def _serve_worker(self, peer: Peer, first: Join) -> None:
        await self._complete.wait()
        member = self._welcome(peer, first)
        try:
            while True:
                message = await peer.receive()
                member.heard = self.now
                if self._members.get(member.worker) is not member:
                    raise WireError("This worker has been given up; it must join again.")
                if isinstance(message, Ready):
                    self._ready(member, message)
                elif isinstance(message, Want):
                    self._give(member, message)
                elif isinstance(message, Leave):
                    self._leave(member)
                    return
                elif not isinstance(message, Beat):
                    raise WireError(f"A {type(message).__name__} is out of place here.")
        except WireError:
            self._leave(member)
            raise
        # When the connection is merely lost, the lease decides.

    def _welcome(self, peer: Peer, join: Join) -> Member:
        try:
            described = Description.from_json(peer.body)
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(f"The description of the model cannot be read: {error}") from None
        first = self._described is None
        if self._described is None:
            self._described = described
            for number, part in enumerate(described.cut(self._shards_wanted)):
                self._shards[number].send(Setup(part.start, part.stop), peer.body)
        difference = self._described.layout.differs_from(described.layout)
        if difference:
            raise WireError(f"All workers must train the same model: {difference}")
        worker = join.worker
        if worker is None:
            worker = next(number for number in range(len(self._members) + 1) if number not in self._members)
        if worker in self._members:  # it comes back before its lease has run out
            self._leave(self._members[worker])
        incarnation = self._incarnations[worker] = self._incarnations.get(worker, 0) + 1
        member = self._members[worker] = Member(worker, incarnation, peer, self.now)
        shards = tuple(
            (*self._addresses[number], part.start, part.stop)
            for number, part in enumerate(self._described.cut(self._shards_wanted))
        )
        gated = self.ledger.policy.streamed
        peer.send(Welcome(worker, incarnation, self.generation, shards, self.lease, gated, first))
        self._admit_waiting()
        return member

    def _admit_waiting(self) -> None:
        """Let the policy know of those who wait, once there is a model to train and enough to train it."""
        if len(self._begun) < self._shards_wanted or len(self._members) < self._workers_wanted:
            return
        self._workers_wanted = 1  # later ones come one by one
        for member in list(self._members.values()):
            if not member.admitted:
                member.admitted = self.joined_ever = True
                self._carry_out(self.ledger.joined(member.worker, self.now))

    def _leave(self, member: Member) -> None:
        if self._members.get(member.worker) is not member:
            return
        del self._members[member.worker]
        if self.samples:
            self.samples.abandoned(member.worker)
        self._tell_shards(Fence(member.worker, member.incarnation + 1))
        if member.admitted:
            self._carry_out(self.ledger.left(member.worker, self.now))
        if not self._members:
            self.done.set()

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(self.lease / 4)
            for member in list(self._members.values()):
                if self.now - member.heard > self.lease:
                    log.warning("worker %d has been silent for %.1f s and is given up", member.worker, self.lease)
                    self._leave(member)
                    member.peer.close()

    # What happens

    def _give(self, member: Member, want: Want) -> None:
        if self.samples is None:
            self.samples = Samples(want.size, want.epochs)
        elif (self.samples.size, self.samples.epochs) != (want.size, want.epochs):
            ours = f"{self.samples.size} samples for {self.samples.epochs} epochs"
            raise WireError(f"All workers must train on the same data: {ours}, not {want.size} for {want.epochs}.")
        given = self.samples.take(member.worker, want.number, max(1, want.count))
        member.peer.send(Given(want.number, *given) if given else Given(want.number))

    def _ready(self, member: Member, ready: Ready) -> None:
        if ready.iteration != member.iteration:
            if self.samples:
                self.samples.returned(member.worker, ready.taken)
            return  # of a cancelled iteration
        member.ready = ready
        self._observer.pulled(self.now, member.worker, ready.base_version)
        self._carry_out(self.ledger.ready(member.worker, self.now))
        self._whole(member)

    def _arrived(self, shard: int, update: Identity) -> None:
        member = self._members.get(update.worker)
        if member is None or member.incarnation != update.incarnation or member.iteration != update.iteration:
            self._shards[shard].send(Drop(update))  # of one who has left, or of a cancelled iteration
            return
        member.parts.add(shard)
        self._whole(member)

    def _whole(self, member: Member) -> None:
        """Does an update count? It does when all shards have it."""
        ready = member.ready
        if ready is None or len(member.parts) < self._shards_wanted:
            return
        member.ready, member.parts = None, set()
        update = Update(
            member.worker,
            ready.iteration,
            ready.base_version,
            ready.batch_size,
            ready.compute_seconds,
            ready.loss,
        )
        identity = self._identity[update] = Identity(member.worker, member.incarnation, ready.iteration)
        if self.samples:
            self.samples.arrived(member.worker, ready.taken, identity)
        self._carry_out(self.ledger.arrived(update, self.now))

    # Decisions

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            self._decide[type(decision)](decision)

    def _grant(self, grant: policies.Grant) -> None:
        member = self._members[grant.worker]
        member.iteration += 1
        member.ready, member.parts = None, set()
        member.peer.send(Granted(member.iteration, self.ledger.version, grant.batch_size))

    def _turn(self, turn: policies.Turn) -> None:
        if self.ledger.policy.streamed:
            member = self._members[turn.worker]
            member.peer.send(Turned(member.iteration))

    def _apply(self, apply: policies.Apply) -> None:
        identities = tuple(self._identity[update] for update in apply.updates)
        self._tell_shards(Apply(self.ledger.version, identities, apply.weights, apply.mix))
        if self.samples:
            for identity in identities:
                self.samples.done(identity)
        if apply.mix is None:
            for update in apply.updates:
                del self._identity[update]

    def _discard(self, discard: policies.Discard) -> None:
        identity = self._identity.pop(discard.update)
        self._tell_shards(Drop(identity))
        if self.samples:
            self.samples.dropped(identity)

    def _keep(self, keep: policies.Keep) -> None:
        identity = self._identity[keep.update]
        self._tell_shards(Keep(identity, keep.slot))
        if self.samples:
            self.samples.done(identity)

    def _cancel(self, cancel: policies.Cancel) -> None:
        member = self._members[cancel.worker]
        member.peer.send(Cancelled(member.iteration))
        if self.samples and member.ready:
            self.samples.returned(member.worker, member.ready.taken)
        member.ready = None

    def _wake_at(self, wake: policies.WakeAt) -> None:
        if self._wake:
            self._wake.cancel()
        self._wake = self._loop.call_at(self._start + wake.time, self._woke)

    def _woke(self) -> None:
        self._wake = None
        self._carry_out(self.ledger.woke(self.now))

    def _tell_shards(self, message: Any) -> None:
        for peer in self._shards.values():
            peer.send(message)
