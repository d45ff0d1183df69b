"""A shard: a process that holds one flat slice of the model, receives gradients, applies them in the order of the log,
and answers pulls.

It runs these threads, none of which holds a lock for long while it uses a tensor:
 - one for the coordinator. It carries out the orders of the log one after the other, so the order needs no other care;
 - one that accepts workers (`worker_listener.py`);
 - one or two for each worker. They receive a push straight into a buffer, and send weights (`worker_connection.py`);
 - one that writes a checkpoint, while there is one to write.

An update is applied when all of it has arrived (`whole_updates.py`), or piece by piece as it arrives
(`streamed_updates.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError

from paceline.model import checkpoint
from paceline.model.description import Description
from paceline.model.optimizer import without_compiler
from paceline.model.slice import Slice
from paceline.serve.environment import SHARD_TOKEN, TOKEN
from paceline.serve.shard.admission import Admission, AdmittedTransfer
from paceline.serve.shard.pulls import PullServer
from paceline.serve.shard.store import Fenced, HeldUpdate, WholeStore
from paceline.serve.shard.streamed_store import StreamedStore
from paceline.serve.shard.streamed_updates import StreamedUpdates
from paceline.serve.shard.updates import Updates
from paceline.serve.shard.whole_updates import WholeUpdates
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
HEARTBEAT_SECONDS = 1.0
AT_ONCE = 1 << 28  # bytes of pushes that are received at a time; other pushes wait in their sockets
MIN_AT_ONCE = 64  # pushes that are received at a time, however large they are
SLOW_SECONDS = 10.0  # without a byte, after which a push no longer keeps other pushes waiting
ELEMENTS_PER_THREAD = 1 << 23  # with fewer elements, threads spend more time waiting for each other than computing
NAMING_SECONDS = 30.0  # that initial weights wait for the coordinator to name the worker that provides them


class ShardRefused(WireError):
    """The coordinator refuses this shard. The message is its reason."""


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
        """token: the job's, which workers prove to know; None: the token of the coordinator's endpoint.

        threads: that may compute a large step together.
        """
        self._number, self._threads = number, threads
        tls = coordinator.tls.listening() if coordinator.tls else None
        self._coordinator, generation = coordinator.open(FROM_COORDINATOR)
        self._sending = threading.Lock()  # held while a message is sent to the coordinator
        self._description = bytearray()  # of the model, from the body of the Setup
        self._stopping = threading.Event()
        self._state = threading.Condition()  # guards everything below
        known = coordinator.token if token is None else token
        self._listener = WorkerListener(self, self._state, host, known, generation, tls)
        self._updates: Updates | None = None  # chosen by the Setup
        self._provider: tuple[int, int] | None = None  # worker and incarnation that provide the initial weights
        self._provided: set[int] = set()  # pieces of the initial weights that have arrived
        self.push_admission: Admission | None = None  # if workers take turns on the link
        self.receiving = Admission(MIN_AT_ONCE, stuck=SLOW_SECONDS, adapts=False)  # if they do not
        self._alone = False  # is this the only shard of the job?
        self._adds = False  # are updates added to running sums as they arrive, without waiting for other shards?

    def run(self) -> None:
        """Serve until the coordinator sends Stop or is gone. Raise ShardRefused if it refuses this shard."""
        self.tell(Register(self._number, self._listener.port))
        for work in (self._listener.run, self._send_heartbeats):
            threading.Thread(target=work, daemon=True).start()
        try:
            while True:
                order = self._coordinator.receive(self._buffer_for)
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
            self._stopping.set()
            self._listener.close()
            if self._updates:
                self._updates.close()
            self._listener.hang_up()
            self._coordinator.close()

    def tell(self, message: Any) -> None:
        """Send a message to the coordinator."""
        with self._sending, contextlib.suppress(OSError):  # `run` ends when the coordinator is gone
            self._coordinator.send(message)

    def _send_heartbeats(self) -> None:
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            self.tell(Heartbeat())

    # Workers; each call comes from the thread of a connection

    def await_setup(self) -> Updates:
        """Wait for the coordinator's Setup, which may come after the first worker. Return what it has set up."""
        with self._state:
            while self._updates is None:
                self._state.wait()
            return self._updates

    def receive_initial_weights(self, hello: Hello, piece: int, buffer: torch.Tensor) -> None:
        """Take the initial weights of a piece from the worker that the coordinator has named, and from no other.

        They may arrive before that order does, so wait for it. If the worker dies over it, the coordinator names
        another one.
        """
        updates = self.await_setup()
        store = updates.store
        with self._state:
            sender = (hello.worker, hello.incarnation)
            try:
                if store.version < 0 or self._provider:
                    self._state.wait_for(lambda: self._provider == sender or self._is_over(hello), NAMING_SECONDS)
                if not store.accepts(hello.worker, hello.incarnation):
                    raise Fenced
                if self._provider != sender:
                    raise WireError("This worker was not asked for the initial weights of the model.")
                if len(self._provided) == len(store.slices):
                    return  # sent again, because the answer was lost
                store.slices[piece].weights.copy_(buffer)
            finally:
                store.return_buffer(piece, buffer)
            self._provided.add(piece)
            if len(self._provided) < len(store.slices):
                return
            updates.begin()
            self._state.notify_all()
        self.tell(InitialWeightsReceived(hello.worker, hello.incarnation))

    def _is_over(self, hello: Hello) -> bool:
        return self._stopping.is_set() or not self.await_setup().store.accepts(hello.worker, hello.incarnation)

    def receive(self, update: Identity, piece: int, held: HeldUpdate, transfer: AdmittedTransfer | None) -> bool:
        """Take a piece of an update. Return True if the worker is to be answered with PushReceived now.

        transfer: its place among the pushes that are received. Where updates are added to running sums, it is left
        after the update was added, so that few updates are in memory at a time. Otherwise it is left now.
        """
        if transfer and not self._adds:
            transfer.leave()
            transfer = None
        return self.await_setup().receive(update, piece, held, transfer)

    # The coordinator

    def _buffer_for(self, message: Any, size: int) -> memoryview:
        if not isinstance(message, Setup) or size > Description.MAX_BYTES:
            raise WireError("Only a Setup has a body.")
        self._description = bytearray(size)
        return memoryview(self._description)

    def _carry_out(self, order: Any) -> None:
        """Carry out the next order of the log."""
        if isinstance(order, Setup):
            try:
                self._set_up(order)
            except (ValueError, OSError, RuntimeError, MemoryError) as error:  # RuntimeError: torch is out of memory
                self.tell(ShardFailed(str(error)))
            return
        updates = self.await_setup()
        match order:
            case InitialWeightsFrom(worker, incarnation):
                with self._state:
                    self._provider = (worker, incarnation)
                    self._provided.clear()
                    self._state.notify_all()
            case Fence(worker, incarnation):
                with self._state:
                    updates.store.fence(worker, incarnation)
                    self._listener.hang_up_on(worker, incarnation)
                    self._state.notify_all()
            case SavePart():
                self._save(updates, order)
            case _:
                updates.carry_out(order)
        if isinstance(order, AddToSum) and self._alone:
            self._adds = True

    def _set_up(self, order: Setup) -> None:
        """Hold the slice that the order names, from a checkpoint if the order names one."""
        described = Description.from_json(bytes(self._description))
        largest = max(stop - start for start, stop in order.pieces)
        threads = min(self._threads, max(1, largest // ELEMENTS_PER_THREAD))
        torch.set_num_threads(threads)  # of this thread, which applies updates
        slices = [Slice(described.layout, start, stop, described.optimizer) for start, stop in order.pieces]
        updates: Updates
        if order.streamed:
            updates = StreamedUpdates(StreamedStore(slices, order.correct), self._state, self.tell)
        else:
            store = WholeStore(slices[0], order.correct)
            pulls = PullServer(store, self._state, self._stopping, _admission(order), threads)
            updates = WholeUpdates(store, self._state, self.tell, pulls)
        if order.checkpoint:
            arrays, meta = checkpoint.load_shard(Path(order.checkpoint), self._number)
            updates.load({name: torch.from_numpy(array) for name, array in arrays.items()}, meta, order.version)
        if order.record:
            without_key = msgspec.structs.replace(order, key=b"")
            updates.record(Path(order.record), without_key, bytes(self._description), self._number)
        with self._state:
            self._updates, self._listener.key = updates, order.key
            self.push_admission = _admission(order)
            self._alone = order.pieces[-1][1] - order.pieces[0][0] == described.layout.size
            self.receiving.slots = max(MIN_AT_ONCE, AT_ONCE // max(1, 4 * largest))
            self._state.notify_all()
        if order.checkpoint:
            self.tell(CheckpointLoaded())

    def _save(self, updates: Updates, order: SavePart) -> None:
        """Copy this shard's part of a checkpoint, and write the copy in a thread while the log goes on."""
        arrays, meta = updates.snapshot()

        def write() -> None:
            fault = ""
            try:
                checkpoint.save_shard(Path(order.folder), self._number, arrays, meta)
            except (OSError, ValueError, SafetensorError) as error:
                fault = str(error)
            self.tell(PartSaved(order.version, fault))

        threading.Thread(target=write, daemon=True).start()


def _admission(setup: Setup) -> Admission | None:
    """Return the admission of one direction of the link, if workers take turns on it."""
    return Admission(setup.max_transfers) if setup.max_transfers else None


def main() -> None:
    """Run `python -m paceline.serve.shard NUMBER HOST PORT`, with the job's token in the environment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("number", type=int)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--listen", default="127.0.0.1")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    without_compiler()
    token, own = (bytes.fromhex(os.environ.get(name, "")) for name in (TOKEN, SHARD_TOKEN))
    try:
        endpoint = Endpoint(arguments.host, arguments.port, own or token, Tls.from_environment())
        Shard(arguments.number, endpoint, arguments.listen, token, arguments.threads).run()
    except OSError as error:
        is_gone = isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, WireError)
        sys.exit(None if is_gone else f"Shard {arguments.number}: {error}")  # a server that is gone is no error here
    # The interpreter's own shutdown would crash threads that still run.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
