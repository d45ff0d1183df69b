"""A shard: a process that holds one flat slice of the model, receives gradients, applies them in log order, and
answers pulls.

Threads, none of which touches a tensor under a lock for long:
 - one for the coordinator: it carries out the order log, one entry after the other, so the order needs no other care;
 - one for each worker: it receives a push straight into a buffer that waits there, or sends weights as they lie;
 - one that writes a checkpoint, when there is one to be written.

A pull must not see half of an update. Weights are sent in pieces, each only when the socket can take it; before an
update is applied, pulls under way are given a copy of what they have begun to send. So a slow reader delays nobody.

Where staleness is corrected for, a pull is sent weights as they will be (`foresight.py`): a copy anyway, made by the
worker's thread, for which an update waits.

Streamed, pieces of the slice are moved and sent back one by one (`flow.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import socket
import ssl
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError

from paceline.model.optimizer import without_compiler
from paceline.model.slice import Slice
from paceline.serve import checkpoint, greeting
from paceline.serve.description import Description
from paceline.serve.door import CALLERS, Door, answer
from paceline.serve.flow import Flow
from paceline.serve.foresight import Foreseen, Foresight
from paceline.serve.messages import (
    Accepted,
    Add,
    Apply,
    Arrived,
    Beat,
    Begun,
    Challenge,
    Compared,
    Drop,
    Expelled,
    Failed,
    Faulted,
    Fence,
    Giver,
    Hello,
    Identity,
    Keep,
    Loaded,
    Refused,
    Register,
    Save,
    Saved,
    Setup,
    Stop,
    Stream,
    Weights,
)
from paceline.serve.record import Recording
from paceline.serve.store import Fenced, Held, Store
from paceline.serve.stream import Streams
from paceline.serve.tls import Tls
from paceline.serve.turnstile import Pass, Turnstile
from paceline.serve.variables import SHARD_TOKEN, TOKEN
from paceline.serve.visit import FROM_WORKER, NEARLY, Visit
from paceline.serve.wire import Channel, Closed, Pieces, Reader, WireError

log = logging.getLogger(__name__)

FROM_COORDINATOR = Reader(
    Challenge | Accepted | Refused | Setup | Giver | Add | Apply | Stream | Drop | Keep | Fence | Save | Stop
)
BEAT_SECONDS = 1.0
STRANGERS = 64  # connections that may be in the midst of their greeting
QUEUEING = 0.5  # seconds that the next one is made to wait for a place among them, before it is turned away
AT_ONCE = 1 << 28  # bytes of pushes that are received at a time; the others wait in their sockets
LEAST_AT_ONCE = 64  # pushes that are, however large
SLOW = 10.0  # seconds without a stretch of a push, after which it keeps nobody waiting any more
WORTH_A_THREAD = 1 << 23  # elements: with less, threads spend more time waiting for each other, and spin meanwhile
CUT_SECONDS = 30.0  # a worker's connection over which nothing gets through for so long is ended


class Copied:
    """A copy of weights, and the pulls that it is for."""

    def __init__(self, buffer: torch.Tensor, pulls: set[Pieces]) -> None:
        self.buffer, self._pulls = buffer, pulls

    def given_up(self, pull: Pieces, store: Store) -> None:
        """A pull is done with it. After the last, the buffer may be used again: new pages cost more than the copy."""
        self._pulls.discard(pull)
        if not self._pulls:
            store.free(0, self.buffer)


class Unwanted(WireError):
    """The coordinator would not have this shard; its reason."""


class Shard:
    """One slice of the model, behind a listening socket."""

    def __init__(
        self,
        number: int,
        coordinator: Door,
        host: str = "127.0.0.1",
        token: bytes | None = None,
        threads: int = 1,
    ) -> None:
        """token: the job's, which workers know; None: as the coordinator's door has it.

        threads: that may make a step together, if it is large.
        """
        self._threads = threads
        self._step_threads = 1  # that do so with the slice that there is
        self._number = number
        self._token = coordinator.token if token is None else token
        self._key = b""  # by which workers' tickets are known
        self._tls: ssl.SSLContext | None = coordinator.tls.listening() if coordinator.tls else None
        self._coordinator, self._generation = coordinator.open(FROM_COORDINATOR)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=CALLERS)
        self._sending = threading.Lock()  # on the coordinator's channel
        self._over = threading.Event()
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._state = threading.Condition()  # guards all that follows
        self._store: Store | Streams | None = None
        self._giver: tuple[int, int] | None = None  # who is to give the weights that the model begins with
        self._given = False  # has it?
        self._applying = False
        self._foresight: Foresight | None = None
        self._foreseeing = 0  # predictions that are being made
        self._pulls: set[Pieces] = set()  # under way, of the weights themselves
        self._copied: dict[Pieces, Copied] = {}  # under way, of a copy
        self._workers: dict[int, dict[Channel, Hello]] = {}  # worker → its connections
        self._given_pieces: set[int] = set()
        self._recording: Recording | None = None
        self.flow: Flow | None = None  # where updates are streamed
        self.pushes: Turnstile | None = None  # where workers take turns on the link, in either direction
        self._pulling: Turnstile | None = None
        self._alone = False  # is there no other shard?
        self._adds = False  # are updates added up as they come, and wait for no other shard before?
        self._places: dict[Identity, Pass] = {}  # of those that have come and are not added up yet
        self.receiving = Turnstile(LEAST_AT_ONCE, stuck=SLOW, adapts=False)  # where they take none

    def run(self) -> None:
        """Serve until the coordinator says stop, or is gone. Unwanted: it would not have this shard."""
        self.tell(Register(self._number, self._listener.getsockname()[1]))
        for work in (self._accept, self._beat):
            threading.Thread(target=work, daemon=True).start()
        try:
            while True:
                order = self._coordinator.receive(self._description)
                if isinstance(order, Stop):
                    return
                if isinstance(order, Refused):
                    raise Unwanted(order.reason)
                self._carry_out(order)
        except Unwanted:
            raise
        except OSError:
            log.info("the coordinator is gone")
        finally:
            self._over.set()
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # to close it would not wake who waits for a caller
            self._listener.close()
            if self._recording and isinstance(self._store, Store):
                self._recording.close(self._store)
            with self._state:
                for channels in self._workers.values():
                    for channel in channels:
                        channel.close()
            self._coordinator.close()

    # What workers ask for; each from its own thread

    def tell(self, message: Any) -> None:
        """Say something to the coordinator."""
        with self._sending, contextlib.suppress(OSError):  # if it is gone, `run` ends
            self._coordinator.send(message)

    def opened(self) -> Store | Streams:
        """The store, as soon as there is one: a worker may be quicker than the coordinator's Setup."""
        with self._state:
            while self._store is None:
                self._state.wait()
            return self._store

    def room(self, piece: int) -> torch.Tensor:
        store = self.opened()
        with self._state:
            return store.room(piece)

    def free(self, piece: int, buffer: torch.Tensor) -> None:
        with self._state:
            self.opened().free(piece, buffer)

    def begin(self, hello: Hello, piece: int, buffer: torch.Tensor) -> None:
        """The weights a piece begins with. A second worker gives them if the first one died over it.

        Only from whom the coordinator has named. It may have been quicker than that order, so it is waited for.
        """
        with self._state:
            store = self.opened()
            caller = (hello.worker, hello.incarnation)
            try:
                if store.version < 0 or self._giver:
                    self._state.wait_for(lambda: self._giver == caller or self._is_over(hello), CUT_SECONDS)
                if not store.accepts(hello.worker, hello.incarnation):
                    raise Fenced("This worker has been given up; it must join again.")
                if self._giver != caller:
                    raise WireError("This worker was not asked for the weights that the model begins with.")
                if self._given:
                    return  # sent again, since the answer was lost
                store.slices[piece].weights.copy_(buffer)
            finally:
                store.free(piece, buffer)
            self._given_pieces.add(piece)
            if len(self._given_pieces) < len(store.slices):
                return
            self._given = True
            store.version = 0
            if self._recording and isinstance(store, Store):
                self._recording.begin(store)
            self._state.notify_all()
        self.tell(Begun(hello.worker, hello.incarnation))

    def _is_over(self, hello: Hello) -> bool:
        return self._over.is_set() or not self.opened().accepts(hello.worker, hello.incarnation)

    def put(self, update: Identity, piece: int, held: Held, total: float, place: Pass | None = None) -> bool:
        """An update is in, of this sum. A NaN in it, and it is as if it had never come.

        place: it has among those that are received; it is left when the update is held for good, or decided.
        True if it is answered as a piece that comes back, when it has been applied, and needs no other answer.
        """
        store = self.opened()
        fault = store.fault(held, piece, looked_at=math.isfinite(total))
        if fault:
            self.free(piece, held.gradient)
            raise WireError(f"The update was refused: {fault}.")
        if self.flow:
            if place:
                place.leave()
            self.flow.put(update, piece, held)
            return True
        assert isinstance(store, Store)
        with self._state:
            new = store.put(update, held)
            if place and new and self._adds:
                self._places[update] = place
            elif place:
                place.leave()
        if new:
            self.tell(Arrived(update))
        return False

    def send_weights(self, channel: Channel, version: int, expected: int | None = None) -> None:
        """Send the weights when they are of this version or newer.

        expected: as they will be so many versions after this one. What has become of those versions by then is known.
        """
        store = self.opened()
        assert isinstance(store, Store)
        entered: Pass | None = None
        pull: Pieces | None = None

        def sent(size: int) -> None:
            if entered:
                entered.moved(size)
                if pull and len(pull.rest) <= NEARLY:
                    entered.leave()

        # Before it is let onto the link, which would be idle meanwhile.
        foreseen = self._foresee(store, version, expected)
        try:
            entered = self._pulling.enter() if self._pulling else None
            if foreseen and foreseen.version != store.version:  # others were before it on the link: this is old
                old, foreseen = foreseen, None
                self._forget(old)
                foreseen = self._foresee(store, version, expected)
            with self._state:
                if foreseen:
                    newest, pull = foreseen.version, Pieces(foreseen.bytes)
                else:
                    self._await_version(store, version)
                    newest, pull = store.version, Pieces(store.slice.buffer)
                    self._pulls.add(pull)
            channel.send_pieces(Weights(newest), pull, sent)
        finally:
            if entered:
                entered.leave()
            self._forget(foreseen)
            with self._state:
                if pull:
                    self._pulls.discard(pull)
                    if copied := self._copied.pop(pull, None):
                        copied.given_up(pull, store)

    def _foresee(self, store: Store, version: int, expected: int | None) -> Foreseen | None:
        """The weights as they will be, when they are of this version or newer. None: they are to be sent as they are.

        It is waited for in any case.
        """
        with self._state:
            self._await_version(store, version)
            steps = store.steps_ahead(expected, store.version - version)
            if not steps or not self._foresight:
                return None
            foreseen = self._foresight.take(steps)
            self._foreseeing += 1
        try:
            torch.set_num_threads(self._step_threads)  # of this thread; it is as much work as a step
            foreseen.make()
        except BaseException:
            self._forget(foreseen)
            raise
        finally:
            torch.set_num_threads(1)
            with self._state:
                self._foreseeing -= 1
                self._state.notify_all()
        return foreseen

    def _forget(self, foreseen: Foreseen | None) -> None:
        """It has been sent, or is not wanted."""
        if foreseen and self._foresight:
            with self._state:
                self._foresight.give_back(foreseen)

    def _await_version(self, store: Store, version: int) -> None:
        """Until the weights are of this version or newer, and no update is being applied."""
        with self._state:
            while store.version < version or self._applying:
                if self._over.is_set():
                    raise Closed("The shard is closing.")
                self._state.wait(1.0)

    # What the coordinator orders

    def _description(self, message: Any, size: int) -> memoryview:
        if not isinstance(message, Setup) or size > Description.MOST:
            raise WireError("Only a Setup has a body.")
        self._body = bytearray(size)
        return memoryview(self._body)

    def _carry_out(self, order: Any) -> None:
        if isinstance(order, Setup):
            try:
                self._set_up(order)
            except (ValueError, OSError, RuntimeError, MemoryError) as error:  # RuntimeError: torch's lack of memory
                self.tell(Failed(str(error)))
            return
        store = self.opened()
        if self._recording and isinstance(store, Store):
            self._recording.order(order, store)
        match order:
            case Giver(worker, incarnation):
                with self._state:
                    self._giver, self._given = (worker, incarnation), False
                    self._given_pieces.clear()
                    self._state.notify_all()
            case Fence(worker, incarnation):
                with self._state:
                    store.fence(worker, incarnation)
                    self._hang_up_on(order)
                    self._state.notify_all()
            case Save():
                self._save(store, order)
            case _ if self.flow:
                self.flow.carry_out(order)
            case Apply() if isinstance(store, Store):
                self._apply(store, order)
            case _ if isinstance(store, Store):
                with self._state:
                    store.carry_out(order)
                    self._adds = self._adds or (isinstance(order, Add) and self._alone)
                    if isinstance(order, Add | Drop) and (place := self._places.pop(order.update, None)):
                        place.leave()

    def _set_up(self, order: Setup) -> None:
        described = Description.from_json(bytes(self._body))
        largest = max(stop - start for start, stop in order.pieces)
        self._step_threads = min(self._threads, max(1, largest // WORTH_A_THREAD))
        torch.set_num_threads(self._step_threads)  # of this thread, which applies
        slices = [Slice(described.layout, start, stop, described.optimizer) for start, stop in order.pieces]
        store = Streams(slices, order.correct) if order.streamed else Store(slices[0], order.correct)
        if order.checkpoint:
            arrays, meta = checkpoint.load_shard(Path(order.checkpoint), self._number)
            store.load({name: torch.from_numpy(array) for name, array in arrays.items()}, meta)
            store.version = order.version
        if order.record:
            kept = msgspec.structs.replace(order, key=b"")
            self._recording = Recording(Path(order.record), kept, bytes(self._body), self._number)
        with self._state:
            self._store, self._key = store, order.key
            self.flow = Flow(store, self._state, self.tell) if isinstance(store, Streams) else None
            self._foresight = Foresight(store) if isinstance(store, Store) else None
            self._alone = order.pieces[-1][1] - order.pieces[0][0] == described.layout.size
            self.receiving.slots = max(LEAST_AT_ONCE, AT_ONCE // max(1, 4 * largest))
            if order.at_a_time:
                self.pushes, self._pulling = Turnstile(order.at_a_time), Turnstile(order.at_a_time)
            self._state.notify_all()
        if order.checkpoint:
            self.tell(Loaded())

    def _apply(self, store: Store, order: Apply) -> None:
        with self._state:
            self._applying = True  # from now on no pull begins
            while self._foreseeing:
                self._state.wait()
            self._part_from_pulls(store)
        store.apply(order)
        with self._state:
            store.applied(order)
            self._applying = False
            self._state.notify_all()
        if found := store.products:
            self.tell(Compared(order.version, found.with_whole, found.with_itself, found.whole))

    def _part_from_pulls(self, store: Store) -> None:
        """Give pulls under way a copy of what they have not sent of the weights, so that these may change."""
        if not self._pulls:
            return
        copied = Copied(store.room(), set(self._pulls))
        sent = store.slice.buffer.nbytes - max(len(pull.rest) for pull in self._pulls)  # it can only become more
        start = sent // store.slice.weights.element_size()
        copied.buffer[start:].copy_(store.slice.weights[start:])
        copy = copied.buffer.numpy().data.cast("B")
        for pull in self._pulls:
            with pull.lock:
                pull.rest = copy[len(copy) - len(pull.rest) :]
            self._copied[pull] = copied
        self._pulls.clear()

    def _hang_up_on(self, fence: Fence) -> None:
        """Whoever was given up, and perhaps neither reads nor writes any more, holds nothing here any longer."""
        for channel, hello in self._workers.get(fence.worker, {}).items():
            if hello.incarnation < fence.incarnation:
                channel.cut()

    def _save(self, store: Store | Streams, order: Save) -> None:
        """Copy what there is now, and write it while the log goes on."""
        with self._state:
            if self.flow:
                self.flow.await_quiet()
            tensors, meta = store.state()
            arrays = {name: np.array(tensor.numpy()) for name, tensor in tensors.items()}

        def write() -> None:
            fault = ""
            try:
                checkpoint.save_shard(Path(order.folder), self._number, arrays, meta)
            except (OSError, ValueError, SafetensorError) as error:
                fault = str(error)
            self.tell(Saved(order.version, fault))

        threading.Thread(target=write, daemon=True).start()

    # Connections

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            self.tell(Beat())

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # the shard is closing, or there are too many open files for the moment
                if self._over.wait(0.05):
                    return
                continue
            if not self._strangers.acquire(timeout=QUEUEING):  # a crowd that greets is through by then
                sock.close()  # too many who do not say who they are
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
            except RuntimeError:  # the system allows no more threads: who is here is served on
                log.warning("a worker was turned away: the system allows no more threads; raise `ulimit -u`")
                self._strangers.release()
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        channel: Channel | None = None
        hello: Any = None
        try:
            try:
                channel = answer(sock, FROM_WORKER, self._token, self._generation, self._tls)
                with channel.within(CUT_SECONDS):
                    hello = channel.receive()
            finally:
                self._strangers.release()
            if not isinstance(hello, Hello):
                raise WireError("The first message of a worker must be Hello.")
            channel.bear_cut(CUT_SECONDS)
            with self._state:
                opened = self.opened()
                if not greeting.is_ticket(self._key, hello.worker, hello.incarnation, hello.ticket):
                    raise WireError(f"This is not worker {hello.worker}: it does not have its ticket.")
                if not opened.accepts(hello.worker, hello.incarnation):
                    raise Fenced("This worker has been given up; it must join again.")
                self._workers.setdefault(hello.worker, {})[channel] = hello
            if self._pulling:
                channel.hold_little_back(NEARLY)
            Visit(self, channel, hello).run()
        except Closed:
            pass
        except (OSError, ValueError) as error:
            log.info("a worker's connection ended: %s", error)
            self._turn_away(channel, error)
        finally:
            if channel:
                if isinstance(hello, Hello):
                    self._visited(channel, hello)
                channel.close()
            sock.close()

    def _visited(self, channel: Channel, hello: Hello) -> None:
        """A worker's connection is over."""
        with self._state:
            channels = self._workers.get(hello.worker, {})
            if channels.pop(channel, None) and self.flow:
                self.flow.left(hello, channel)
            if not channels:
                self._workers.pop(hello.worker, None)

    def _turn_away(self, channel: Channel | None, error: Exception) -> None:
        if channel:
            with contextlib.suppress(OSError):
                channel.send(Expelled(str(error)) if isinstance(error, Fenced) else Refused(str(error)))
        if isinstance(error, WireError):
            self.tell(Faulted(str(error)))


def main() -> None:
    """`python -m paceline.serve.shard NUMBER HOST PORT`, with the job's token in the environment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("number", type=int)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--listen", default="127.0.0.1")
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    without_compiler()
    token, own = (bytes.fromhex(os.environ.get(name, "")) for name in (TOKEN, SHARD_TOKEN))
    try:
        door = Door(asked.host, asked.port, own or token, Tls.from_environment())
        Shard(asked.number, door, asked.listen, token, asked.threads).run()
    except OSError as error:
        over = isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, WireError)
        sys.exit(None if over else f"Shard {asked.number}: {error}")  # a server that is gone needs no words
    # Not by the interpreter's long way out, over which threads that are still at work trip.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
