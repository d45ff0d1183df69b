"""A shard: a process that holds one flat slice of the model, receives gradients, applies them in log order, and
answers pulls.

Threads, none of which touches a tensor under a lock for long:
 - one for the coordinator: it carries out the order log, one entry after the other, so the order needs no other care;
 - one that lets workers in (`listener.py`);
 - one for each worker: it receives a push straight into a buffer that waits there, or sends weights as they lie
   (`visit.py`);
 - one that writes a checkpoint, when there is one to be written.

Pulls are answered between updates, and never with half of one (`pulls.py`). Streamed, pieces of the slice are moved and
sent back one by one (`flow.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError

from paceline.model import checkpoint
from paceline.model.description import Description
from paceline.model.optimizer import without_compiler
from paceline.model.slice import Slice
from paceline.serve.environment import SHARD_TOKEN, TOKEN
from paceline.serve.shard.admission import Admission, AdmittedTransfer
from paceline.serve.shard.piece_applier import PieceApplier
from paceline.serve.shard.pulls import PullServer
from paceline.serve.shard.recording import Recording
from paceline.serve.shard.store import Fenced, HeldUpdate, WholeStore
from paceline.serve.shard.streamed_store import StreamedStore
from paceline.serve.shard.worker_listener import WorkerListener
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import MessageDecoder, WireError
from paceline.serve.wire.messages import (
    Accepted,
    AddToSum,
    ApplyUpdates,
    Challenge,
    CheckpointLoaded,
    DropUpdate,
    Fence,
    Heartbeat,
    Hello,
    Identity,
    InitialWeightsFrom,
    InitialWeightsReceived,
    KeepUpdate,
    PartSaved,
    Refused,
    Register,
    SavePart,
    Setup,
    ShardFailed,
    Stop,
    StreamUpdates,
    UpdateProducts,
    UpdateReceived,
)
from paceline.serve.wire.tls import Tls

log = logging.getLogger(__name__)

FROM_COORDINATOR = MessageDecoder(
    Challenge
    | Accepted
    | Refused
    | Setup
    | InitialWeightsFrom
    | AddToSum
    | ApplyUpdates
    | StreamUpdates
    | DropUpdate
    | KeepUpdate
    | Fence
    | SavePart
    | Stop
)
BEAT_SECONDS = 1.0
AT_ONCE = 1 << 28  # bytes of pushes that are received at a time; the others wait in their sockets
MIN_AT_ONCE = 64  # pushes that are, however large
SLOW = 10.0  # seconds without a stretch of a push, after which it keeps nobody waiting any more
WORTH_A_THREAD = 1 << 23  # elements: with less, threads spend more time waiting for each other, and spin meanwhile
NAMING_SECONDS = 30.0  # that first weights wait for the coordinator to name the worker that gives them


class ShardRefused(WireError):
    """The coordinator would not have this shard; the message is its reason."""


class Shard:
    """One slice of the model, behind a listening socket."""

    def __init__(
        self,
        number: int,
        coordinator: Endpoint,
        host: str = "127.0.0.1",
        token: bytes | None = None,
        threads: int = 1,
    ) -> None:
        """token: the job's, which workers know; None: as the coordinator's door has it.

        threads: that may make a step together, if it is large.
        """
        self._number, self._threads = number, threads
        tls = coordinator.tls.listening() if coordinator.tls else None
        self._coordinator, generation = coordinator.open(FROM_COORDINATOR)
        self._sending = threading.Lock()  # on the coordinator's channel
        self._body = bytearray()  # of the Setup
        self._over = threading.Event()
        self._state = threading.Condition()  # guards all that follows
        known = coordinator.token if token is None else token
        self._listener = WorkerListener(self, self._state, host, known, generation, tls)
        self._store: WholeStore | StreamedStore | None = None
        self._giver: tuple[int, int] | None = None  # the worker that gives the weights that the model begins with
        self._given = False  # has it?
        self._given_pieces: set[int] = set()  # of those weights
        self._recording: Recording | None = None
        self.flow: PieceApplier | None = None  # where updates are streamed
        self.pulls: PullServer | None = None  # where they are not
        self.pushes: Admission | None = None  # where workers take turns on the link
        self.receiving = Admission(MIN_AT_ONCE, stuck=SLOW, adapts=False)  # where they take none
        self._alone = False  # is there no other shard?
        self._adds = False  # are updates added up as they come, and wait for no other shard before?
        self._places: dict[Identity, AdmittedTransfer] = {}  # of those that have come and are not added up yet

    def run(self) -> None:
        """Serve until the coordinator says stop, or is gone. Unwanted: it would not have this shard."""
        self.tell(Register(self._number, self._listener.port))
        for work in (self._listener.run, self._beat):
            threading.Thread(target=work, daemon=True).start()
        try:
            while True:
                order = self._coordinator.receive(self._description)
                if isinstance(order, Stop):
                    return
                if isinstance(order, Refused):
                    raise ShardRefused(order.reason)
                self._carry_out(order)
        except ShardRefused:
            raise
        except OSError:
            log.info("the coordinator is gone")
        finally:
            self._over.set()
            self._listener.close()
            if self._recording:
                self._recording.close()
            self._listener.hang_up()
            self._coordinator.close()

    def tell(self, message: Any) -> None:
        """Say something to the coordinator."""
        with self._sending, contextlib.suppress(OSError):  # if it is gone, `run` ends
            self._coordinator.send(message)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            self.tell(Heartbeat())

    # What workers ask for; each from its own thread

    def opened(self) -> WholeStore | StreamedStore:
        """The store, as soon as there is one: a worker may be quicker than the coordinator's Setup."""
        with self._state:
            while self._store is None:
                self._state.wait()
            return self._store

    def room(self, piece: int) -> torch.Tensor:
        """A buffer to receive an update of a piece into. Give it to `put` or `begin`, or back with `free`."""
        store = self.opened()
        with self._state:
            return store.room(piece)

    def free(self, piece: int, buffer: torch.Tensor) -> None:
        with self._state:
            self.opened().free(piece, buffer)

    def begin(self, hello: Hello, piece: int, buffer: torch.Tensor) -> None:
        """The weights a piece begins with. A second worker gives them if the first one died over it.

        They are taken only from the worker that the coordinator names. They may be here before that order is, so it is
        waited for.
        """
        with self._state:
            store = self.opened()
            caller = (hello.worker, hello.incarnation)
            try:
                if store.version < 0 or self._giver:
                    self._state.wait_for(lambda: self._giver == caller or self._is_over(hello), NAMING_SECONDS)
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
            if self._recording:
                self._recording.begin()
            self._state.notify_all()
        self.tell(InitialWeightsReceived(hello.worker, hello.incarnation))

    def _is_over(self, hello: Hello) -> bool:
        return self._over.is_set() or not self.opened().accepts(hello.worker, hello.incarnation)

    def put(
        self, update: Identity, piece: int, held: HeldUpdate, total: float, place: AdmittedTransfer | None = None
    ) -> bool:
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
        assert isinstance(store, WholeStore)
        with self._state:
            new = store.put(update, held)
            if place and new and self._adds:
                self._places[update] = place
            elif place:
                place.leave()
        if new:
            self.tell(UpdateReceived(update))
        return False

    # What the coordinator orders

    def _description(self, message: Any, size: int) -> memoryview:
        if not isinstance(message, Setup) or size > Description.MAX_BYTES:
            raise WireError("Only a Setup has a body.")
        self._body = bytearray(size)
        return memoryview(self._body)

    def _carry_out(self, order: Any) -> None:
        """The next entry of the log."""
        if isinstance(order, Setup):
            try:
                self._set_up(order)
            except (ValueError, OSError, RuntimeError, MemoryError) as error:  # RuntimeError: torch's lack of memory
                self.tell(ShardFailed(str(error)))
            return
        store = self.opened()
        if self._recording:
            self._recording.order(order)
        match order:
            case InitialWeightsFrom(worker, incarnation):
                with self._state:
                    self._giver, self._given = (worker, incarnation), False
                    self._given_pieces.clear()
                    self._state.notify_all()
            case Fence(worker, incarnation):
                with self._state:
                    store.fence(worker, incarnation)
                    self._listener.hang_up_on(worker, incarnation)
                    self._state.notify_all()
            case SavePart():
                self._save(store, order)
            case _ if self.flow:
                self.flow.carry_out(order)
            case ApplyUpdates() if self.pulls:
                self._apply(self.pulls, order)
            case _ if isinstance(store, WholeStore):
                with self._state:
                    store.carry_out(order)
                    self._adds = self._adds or (isinstance(order, AddToSum) and self._alone)
                    if isinstance(order, AddToSum | DropUpdate) and (place := self._places.pop(order.update, None)):
                        place.leave()

    def _set_up(self, order: Setup) -> None:
        """Make the store, with what a checkpoint holds if there is one."""
        described = Description.from_json(bytes(self._body))
        largest = max(stop - start for start, stop in order.pieces)
        threads = min(self._threads, max(1, largest // WORTH_A_THREAD))
        torch.set_num_threads(threads)  # of this thread, which applies
        slices = [Slice(described.layout, start, stop, described.optimizer) for start, stop in order.pieces]
        store = StreamedStore(slices, order.correct) if order.streamed else WholeStore(slices[0], order.correct)
        if order.checkpoint:
            arrays, meta = checkpoint.load_shard(Path(order.checkpoint), self._number)
            store.load({name: torch.from_numpy(array) for name, array in arrays.items()}, meta)
            store.version = order.version
        if order.record and isinstance(store, WholeStore):
            kept = msgspec.structs.replace(order, key=b"")
            self._recording = Recording(Path(order.record), kept, bytes(self._body), self._number, store)
        with self._state:
            self._store, self._listener.key = store, order.key
            self.pushes = Admission(order.at_a_time) if order.at_a_time else None
            if isinstance(store, StreamedStore):
                self.flow = PieceApplier(store, self._state, self.tell)
            else:
                link = Admission(order.at_a_time) if order.at_a_time else None
                self.pulls = PullServer(store, self._state, self._over, link, threads)
            self._alone = order.pieces[-1][1] - order.pieces[0][0] == described.layout.size
            self.receiving.slots = max(MIN_AT_ONCE, AT_ONCE // max(1, 4 * largest))
            self._state.notify_all()
        if order.checkpoint:
            self.tell(CheckpointLoaded())

    def _apply(self, pulls: PullServer, order: ApplyUpdates) -> None:
        store = pulls.store
        pulls.pause()
        store.apply(order)
        with self._state:
            store.applied(order)
            pulls.resume()
        if found := store.products:
            self.tell(UpdateProducts(order.version, found.with_whole, found.with_itself, found.whole))

    def _save(self, store: WholeStore | StreamedStore, order: SavePart) -> None:
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
            self.tell(PartSaved(order.version, fault))

        threading.Thread(target=write, daemon=True).start()


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
        endpoint = Endpoint(asked.host, asked.port, own or token, Tls.from_environment())
        Shard(asked.number, endpoint, asked.listen, token, asked.threads).run()
    except OSError as error:
        over = isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, WireError)
        sys.exit(None if over else f"Shard {asked.number}: {error}")  # a server that is gone needs no words
    # Not by the interpreter's long way out, over which threads that are still at work trip.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
