"""A shard: a process that holds one flat slice of the model, receives gradients, applies them in log order, and
answers pulls.

Threads, none of which touches a tensor under a lock for long:
 - one for the coordinator: it carries out the order log, one entry after the other, so the order needs no other care;
 - one for each worker: it receives a push straight into a buffer that waits there, or sends weights as they lie.

A pull must not see half of an update. Weights are sent in pieces, each only when the socket can take it; before an
update is applied, pulls under way are given a copy of what they have begun to send. So a slow reader delays nobody.
A pull that begins while an update is being applied is of the new version, and sends no further than that has come.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import threading
from typing import Any

import torch

from paceline.model.slice import Slice
from paceline.serve import greeting
from paceline.serve.description import Description
from paceline.serve.messages import (
    Accepted,
    Apply,
    Arrived,
    Begin,
    Begun,
    Challenge,
    Drop,
    Fence,
    Hello,
    Identity,
    Keep,
    Proof,
    Pull,
    Push,
    Pushed,
    Refused,
    Register,
    Setup,
    Stop,
    Weights,
)
from paceline.serve.wire import Channel, Closed, Reader, WireError, encode

log = logging.getLogger(__name__)

FROM_COORDINATOR = Reader(Challenge | Accepted | Refused | Setup | Apply | Drop | Keep | Fence | Stop)
FROM_WORKER = Reader(Proof | Hello | Begin | Push | Pull)
TOKEN = "PACELINE_TOKEN"  # the variable that carries the job's token, in hexadecimal, to processes we start
PIECE = 1 << 22  # bytes of weights sent at a time


class _Pull:
    """A pull under way: what is sent from, how far it has come, and a lock that is held while a piece is copied out."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.sent = 0
        self.own = False  # is the data a copy, that nobody changes?
        self.lock = threading.Lock()


class Shard:
    """One slice of the model, behind a listening socket."""

    def __init__(self, number: int, coordinator: tuple[str, int], token: bytes, host: str = "127.0.0.1") -> None:
        self._number = number
        self._token = token
        self._listener = socket.create_server((host, 0))
        self._coordinator = Channel(socket.create_connection(coordinator), FROM_COORDINATOR)
        self._sending = threading.Lock()  # on the coordinator's channel
        self._generation = greeting.call(self._coordinator, token)
        self._slice: Slice | None = None
        self._state = threading.Condition()
        self._version = -1  # of the weights here; -1: there are none yet
        self._fresh = 0  # bytes from the front that are of this version: it is being applied, or all are
        self._incarnation: dict[int, int] = {}  # of each worker, the newest that is known
        self._updates: dict[Identity, tuple[torch.Tensor, tuple[float, ...]]] = {}  # arrived and not decided
        self._settled: dict[tuple[int, int], int] = {}  # worker, incarnation → its newest iteration that is in
        self._kept: dict[int, tuple[torch.Tensor, tuple[float, ...]]] = {}
        self._slot_of: dict[Identity, int] = {}
        self._spare: list[torch.Tensor] = []  # buffers to receive into
        self._pulls: set[_Pull] = set()

    def run(self) -> None:
        """Serve until the coordinator says stop, or is gone."""
        self._tell(Register(self._number, self._listener.getsockname()[1]))
        threading.Thread(target=self._accept, daemon=True).start()
        try:
            while True:
                order = self._coordinator.receive(self._description)
                if isinstance(order, Stop):
                    return
                self._carry_out(order)
        except (Closed, ConnectionError, OSError):
            log.info("the coordinator is gone")
        finally:
            self._listener.close()

    # The coordinator

    def _tell(self, message: Any) -> None:
        with self._sending:
            self._coordinator.send(message)

    def _description(self, message: Any, size: int) -> memoryview:
        if not isinstance(message, Setup) or size > Description.MOST:
            raise WireError("Only a Setup has a body.")
        self._body = bytearray(size)
        return memoryview(self._body)

    def _carry_out(self, order: Any) -> None:
        match order:
            case Setup(start, stop):
                described = Description.from_json(bytes(self._body))
                with self._state:
                    self._slice = Slice(described.layout, start, stop, described.optimizer)
                    self._state.notify_all()
            case Apply():
                self._apply(order)
            case Drop(update):
                with self._state:
                    self._release(update)
            case Keep(update, slot):
                with self._state:
                    self._kept[slot] = self._updates.pop(update)
                    self._slot_of = {known: at for known, at in self._slot_of.items() if at != slot} | {update: slot}
            case Fence(worker, incarnation):
                with self._state:
                    self._incarnation[worker] = max(incarnation, self._incarnation.get(worker, 0))

    def _apply(self, order: Apply) -> None:
        assert self._slice is not None
        with self._state:
            parts = [
                self._kept[self._slot_of[update]] if update in self._slot_of else self._updates[update]
                for update in order.updates
            ]
        tensors = [tensor for tensor, _ in parts]
        steps = self._slice.steps(tensors, order.weights, parts[-1][1]) if order.mix is None else iter(())
        with self._state:
            # In one go: a pull that begins now is of the new version, and waits for it.
            self._part_from_pulls()
            self._set_fresh(order.version, 0)
        for done in steps:  # What is done does not change again, so pulls may send it while the rest is computed.
            self._set_fresh(order.version, done * 4)
        if order.mix is not None:
            self._slice.mix(tensors, order.weights, order.mix)
            self._set_fresh(order.version, len(self._slice.buffer))
        with self._state:
            for update in order.updates:
                self._release(update)

    def _set_fresh(self, version: int, count: int) -> None:
        """So many bytes from the front are of this version."""
        with self._state:
            self._version, self._fresh = version, count
            self._state.notify_all()

    def _release(self, update: Identity) -> None:
        """An update is decided: its buffer may be used again."""
        part = self._updates.pop(update, None)
        if part is not None:
            self._spare.append(part[0])

    def _part_from_pulls(self) -> None:
        """Give pulls under way a copy of the weights, so that they may change."""
        if not self._pulls:
            return
        assert self._slice is not None
        copy = self._slice.weights.clone().numpy().data.cast("B")
        for pull in self._pulls:
            with pull.lock:
                pull.data, pull.own = copy, True
        self._pulls.clear()

    # Workers

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        channel = Channel(sock, FROM_WORKER)
        try:
            sock.settimeout(10.0)
            greeting.listen(channel, self._token, self._generation)
            hello = channel.receive()
            if not isinstance(hello, Hello):
                raise WireError("The first message of a worker must be Hello.")
            sock.settimeout(None)
            _Worker(self, channel, sock, hello).run()
        except Closed:
            pass
        except (ConnectionError, OSError, ValueError) as error:
            log.info("a worker's connection ended: %s", error)
            with contextlib.suppress(OSError):
                channel.send(Refused(str(error)))
        finally:
            channel.close()


class _Worker:
    """One worker's connection."""

    def __init__(self, shard: Shard, channel: Channel, sock: socket.socket, hello: Hello) -> None:
        self.shard, self.channel, self.sock = shard, channel, sock
        self.worker, self.incarnation = hello.worker, hello.incarnation
        self.buffer: torch.Tensor | None = None

    def run(self) -> None:
        shard = self.shard
        with shard._state:
            while shard._slice is None:  # the worker was quicker than the coordinator's Setup
                shard._state.wait()
        while True:
            message = self.channel.receive(self._into)
            match message:
                case Push(iteration, rates):
                    self._pushed(iteration, rates)
                case Pull(version):
                    self._send_weights(version)
                case Begin():
                    with shard._state:
                        if shard._version < 0:
                            assert shard._slice is not None
                            shard._set_fresh(0, len(shard._slice.buffer))
                    shard._tell(Begun())
                case _:
                    raise WireError(f"A {type(message).__name__} is out of place here.")

    def _into(self, message: Any, size: int) -> memoryview:
        """Where a body goes: its size is known before a byte of it is read."""
        part = self.shard._slice
        if part is None:
            raise WireError("This shard does not know the model yet.")
        if isinstance(message, Begin):
            if self.shard._version >= 0:
                raise WireError("The model has begun already.")
            return part.buffer
        if not isinstance(message, Push):
            raise WireError(f"A {type(message).__name__} has no body.")
        if size != part.weights.numel() * 4:
            raise WireError(f"A push to this shard has {part.weights.numel() * 4} bytes, not {size}.")
        with self.shard._state:
            self.buffer = self.shard._spare.pop() if self.shard._spare else torch.empty_like(part.weights)
        return self.buffer.numpy().data.cast("B")

    def _pushed(self, iteration: int, rates: tuple[float, ...]) -> None:
        shard, buffer = self.shard, self.buffer
        if buffer is None or shard._slice is None:
            raise WireError("A push must have a body.")
        self.buffer = None
        update = Identity(self.worker, self.incarnation, iteration)
        fault = shard._slice.check(buffer)
        if fault:
            shard._spare.append(buffer)
            raise WireError(fault)
        with shard._state:
            if self.incarnation < shard._incarnation.get(self.worker, 0):
                raise WireError("This worker has been given up; it must join again.")
            again = shard._settled.get((self.worker, self.incarnation), 0) >= iteration
            if again:  # sent twice, applied once
                shard._spare.append(buffer)
            else:
                shard._settled[self.worker, self.incarnation] = iteration
                shard._updates[update] = (buffer, rates)
        if not again:
            shard._tell(Arrived(update))
        self.channel.send(Pushed(iteration))

    def _send_weights(self, version: int) -> None:
        shard = self.shard
        with shard._state:
            while shard._version < version:
                shard._state.wait()
            assert shard._slice is not None
            pull = _Pull(shard._slice.buffer)
            shard._pulls.add(pull)
            newest = shard._version
        try:
            self.sock.sendall(encode(Weights(newest), len(pull.data)))
            self._send_pieces(pull)
        finally:
            with shard._state:
                shard._pulls.discard(pull)

    def _send_pieces(self, pull: _Pull) -> None:
        """Send without ever waiting with the lock held: while a piece is copied out, its bytes do not change."""
        sock, size = self.sock, len(pull.data)
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        sock.setblocking(False)
        try:
            while pull.sent < size:
                ready = self._ready(pull)
                poll.poll()
                with pull.lock:
                    try:
                        pull.sent += sock.send(pull.data[pull.sent : min(ready, pull.sent + PIECE)])
                    except BlockingIOError:
                        continue
        finally:
            sock.setblocking(True)

    def _ready(self, pull: _Pull) -> int:
        """How far a pull may send; waits until that is further than it has come.

        A pull that is given a copy is given a whole one. Otherwise the weights are of its own version, as far as they
        are fresh: before they become of another, it gets its copy.
        """
        shard = self.shard
        with shard._state:
            shard._state.wait_for(lambda: pull.own or shard._fresh > pull.sent)
            return len(pull.data) if pull.own else shard._fresh


def main() -> None:
    """`python -m paceline.serve.shard NUMBER HOST PORT`, with the job's token in the environment."""
    number, host, port = sys.argv[1:]
    token = bytes.fromhex(os.environ.get(TOKEN, ""))
    try:
        Shard(int(number), (host, int(port)), token).run()
    except ConnectionError as error:
        sys.exit(f"Shard {number}: {error}" if isinstance(error, WireError) else None)  # else the job is over already


if __name__ == "__main__":
    main()
