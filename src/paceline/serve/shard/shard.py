"""A shard: a process that holds one flat slice of the model, receives gradients, applies them in the order of the log,
and answers pulls.

It runs these threads, none of which holds a lock for long while it uses a tensor:
 - one for the coordinator. It carries out the orders of the log one after the other, so the order needs no other care;
 - one that sends heartbeats to the coordinator (`coordinator_session.py`);
 - one that accepts workers (`worker_listener.py`);
 - one or two for each worker. They receive a push straight into a buffer, and send weights (`worker_connection.py`);
 - one that writes a checkpoint, while there is one to write.

An update is applied when all of it has arrived (`whole_updates.py`), or piece by piece as it arrives
(`streamed_updates.py`).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch

from paceline.model import checkpoint
from paceline.model.checkpoint_pieces import load_pieces
from paceline.model.description import Description
from paceline.model.durable import cause
from paceline.model.optimizer import without_compiler
from paceline.model.slice import Slice
from paceline.model.tensor_file import SpoiledError
from paceline.serve.environment import JOINED, LOST, REFUSAL, REFUSED, SHARD_TOKEN, TOKEN, is_launched, tell_launcher
from paceline.serve.shard.admission import Admission, AdmittedTransfer
from paceline.serve.shard.bases import Bases
from paceline.serve.shard.coordinator_session import CoordinatorSession, ShardRefused
from paceline.serve.shard.pulls import PullServer
from paceline.serve.shard.replication import Backup, Relay
from paceline.serve.shard.store import Fenced, HeldUpdate, Store, WholeStore
from paceline.serve.shard.streamed_store import StreamedStore
from paceline.serve.shard.streamed_updates import StreamedUpdates
from paceline.serve.shard.updates import Updates
from paceline.serve.shard.whole_updates import WholeUpdates
from paceline.serve.shard.worker_listener import WorkerListener
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import WireError
from paceline.serve.wire.messages import (
    AddToSum,
    BackupUnreachable,
    CheckpointLoaded,
    ContinueAlone,
    Fence,
    Hello,
    Identity,
    InitialWeightsFrom,
    InitialWeightsReceived,
    PartSaved,
    SavePart,
    Setup,
    ShardFailed,
    Stop,
    TakeOver,
)
from paceline.serve.wire.tls import Tls, shown_certificate
from paceline.serve.wire.tokens import token_for

log = logging.getLogger(__name__)

AT_ONCE = 1 << 28  # bytes of pushes that are received at a time; other pushes wait in their sockets
MIN_AT_ONCE = 64  # pushes that are received at a time, however large they are
SLOW_SECONDS = 10.0  # without a byte, after which a push no longer keeps other pushes waiting
ELEMENTS_PER_THREAD = 1 << 23  # with fewer elements, threads spend more time waiting for each other than computing
NAMING_SECONDS = 30.0  # that initial weights wait for the coordinator to name the worker that provides them


class Shard:
    """One slice of the model, behind a listening socket."""

    def __init__(
        self,
        number: int,
        coordinator: Endpoint,
        host: str = "127.0.0.1",
        token: bytes | None = None,
        threads: int = 1,
        replica: int = 0,
    ) -> None:
        """token: from which the token of workers is derived; None: the token of the coordinator's endpoint.

        threads: that may compute a large step together. replica: which process of the shard this is.
        """
        self.number, self._replica, self._threads = number, replica, threads
        tls = coordinator.tls.listening() if coordinator.tls else None
        caller = replace(coordinator, token=token_for("shard", coordinator.token))
        self._coordinator = CoordinatorSession(caller, shown_certificate(tls))
        self._description = bytearray()  # of the model, from the body of the Setup
        self._stopping = threading.Event()
        self._state = threading.Condition()  # guards everything below
        known = token_for("worker", coordinator.token if token is None else token)
        self._endpoint = replace(coordinator, token=known)  # as workers see it
        self._backup: Backup | None = None
        self._loaded = False  # were the first weights loaded from a checkpoint?
        self._listener = WorkerListener(self, self._state, host, known, self._coordinator.generation, tls)
        self._updates: Updates | None = None  # chosen by the Setup
        self._provider: tuple[int, int] | None = None  # worker and incarnation that provide the initial weights
        self._provided: set[int] = set()  # pieces of the initial weights that have arrived
        self._first_version = 0  # of these weights
        self.push_admission: Admission | None = None  # if workers take turns on the link
        self.receiving = Admission(MIN_AT_ONCE, stuck=SLOW_SECONDS, adapts=False)  # if they do not
        self._alone = False  # is this the only shard of the job?
        self._adds = False  # are updates added to running sums as they arrive, without waiting for other shards?

    def run(self) -> bool:
        """Serve until the coordinator sends Stop or is gone. Return whether the job is over.

        Raise ShardRefused if the coordinator refuses this shard.
        """
        try:
            self.number = self._coordinator.begin(self.number, self._replica, self._listener.port)
            tell_launcher(JOINED)
            threading.Thread(target=self._listener.run, daemon=True).start()
            while True:
                order = self._coordinator.receive(self._buffer_for)
                if isinstance(order, Stop):
                    return order.is_over
                self._carry_out(order)
        except ShardRefused:
            raise
        except OSError:
            log.info("the coordinator is gone")
            return False
        finally:
            self._stopping.set()
            self._listener.close()
            if self._updates:
                self._updates.close()
            self._listener.hang_up()
            if self._backup:
                self._backup.end()
            self._coordinator.close()

    def tell(self, message: Any) -> None:
        """Send a message to the coordinator."""
        self._coordinator.tell(message)

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
            try:
                if not self._needs_weights_from(hello, store):
                    return
                store.slices[piece].weights.copy_(buffer)
            finally:
                store.return_buffer(piece, buffer)
            self._provided.add(piece)
            if len(self._provided) < len(store.slices):
                return
            updates.begin(self._first_version)
            self._state.notify_all()
            reports = not updates.follows
        if reports:
            self.tell(InitialWeightsReceived(hello.worker, hello.incarnation))

    def receive_initial_state(self, hello: Hello, part: bytes) -> None:
        """Take the initial weights and the optimizer's state, in the format of a checkpoint's part, as above."""
        updates = self.await_setup()
        store = updates.store
        with self._state:
            if not self._needs_weights_from(hello, store):
                return
            try:
                arrays, meta = checkpoint.parse(part)
                store.load({name: torch.from_numpy(array) for name, array in arrays.items()}, meta)
            except ValueError as error:
                raise WireError(f"The loaded state of the optimizer cannot be used: {error}.") from None
            self._provided.update(range(len(store.slices)))
            updates.begin(self._first_version, part)
            self._state.notify_all()
            reports = not updates.follows
        if reports:
            self.tell(InitialWeightsReceived(hello.worker, hello.incarnation))

    def _needs_weights_from(self, hello: Hello, store: Store) -> bool:
        """Return whether initial weights are still missing. The state is held.

        Raise WireError if they must come from another worker.
        """
        sender = (hello.worker, hello.incarnation)
        if store.version < 0 or self._provider:
            self._state.wait_for(lambda: self._provider == sender or self._is_over(hello), NAMING_SECONDS)
        if not store.accepts(hello.worker, hello.incarnation):
            raise Fenced
        if self._provider != sender:
            raise WireError("This worker was not asked for the initial weights of the model.")
        return len(self._provided) < len(store.slices)  # otherwise they are sent again, because the answer was lost

    def _is_over(self, hello: Hello) -> bool:
        return self._stopping.is_set() or not self.await_setup().store.accepts(hello.worker, hello.incarnation)

    def relay_of(self, hello: Hello) -> Relay | None:
        """Return what passes this worker's updates on to the backup, or None if the shard has no backup."""
        backup = self._backup
        return Relay(backup, hello) if backup and backup.is_expected else None

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
                self.tell(ShardFailed(str(error), isinstance(error, checkpoint.DamagedError)))
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
            case ContinueAlone():
                if self._backup:
                    self._backup.end()
            case TakeOver():
                self._take_over(updates)
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
        layout, optimizer = described.layout, described.optimizer
        slices = [Slice(layout, start, stop, optimizer, sparse=order.sparse) for start, stop in order.pieces]
        updates: Updates
        if order.streamed:
            updates = StreamedUpdates(StreamedStore(slices, order.correct), self._state, self.tell)
        else:
            store = WholeStore(slices[0], order.correct, Bases() if order.keep_bases else None)
            pulls = PullServer(store, self._state, self._stopping, _admission(order), threads)
            updates = WholeUpdates(store, self._state, self.tell, pulls)
        if order.checkpoint:
            arrays, meta = load_pieces(Path(order.checkpoint), order.digests, described, order.pieces)
            updates.load({name: torch.from_numpy(array) for name, array in arrays.items()}, meta, order.version)
        if order.record:
            without_key = msgspec.structs.replace(order, key=b"")
            updates.record(Path(order.record), without_key, bytes(self._description))
        updates.follows, updates.measures = order.follows, order.measure
        with self._state:
            if order.backup:
                place = self._endpoint.at(*order.backup)
                self._backup = Backup(place, self._coordinator.generation, self._report_backup)
            self._loaded = bool(order.checkpoint)
            self._updates, self._listener.key = updates, order.key
            self._first_version = order.version
            self.push_admission = _admission(order)
            self._alone = order.pieces[-1][1] - order.pieces[0][0] == described.layout.size
            self.receiving.slots = max(MIN_AT_ONCE, AT_ONCE // max(1, 4 * largest))
            self._state.notify_all()
        if order.checkpoint and not order.follows:
            self.tell(CheckpointLoaded())

    def _take_over(self, updates: Updates) -> None:
        """Become the primary of the shard. Report again what the lost primary may not have reported."""
        updates.take_over()
        with self._state:  # weights that become complete later are reported by the thread that receives them
            is_complete = len(self._provided) == len(updates.store.slices)
        if self._loaded:
            self.tell(CheckpointLoaded())
        elif is_complete and self._provider:
            self.tell(InitialWeightsReceived(*self._provider))

    def _report_backup(self, reason: str) -> None:
        """Tell the coordinator that the backup cannot be reached."""
        self.tell(BackupUnreachable(reason))

    def _save(self, updates: Updates, order: SavePart) -> None:
        """Copy this shard's part of a checkpoint, and write the copy in a thread while the log goes on."""
        arrays, meta = updates.snapshot()

        def write() -> None:
            try:
                saved = checkpoint.save_shard(Path(order.folder), self.number, arrays, meta)
            except SpoiledError as error:
                self.tell(PartSaved(order.version, str(error), is_spoiled=True))
            except (OSError, ValueError) as error:
                self.tell(PartSaved(order.version, f"{Path(order.folder).parent}: {cause(error)}"))
            else:
                self.tell(PartSaved(order.version, size=saved.size, digest=saved.digest))

        threading.Thread(target=write, daemon=True).start()


def _admission(setup: Setup) -> Admission | None:
    """Return the admission of one direction of the link, if workers take turns on it."""
    return Admission(setup.max_transfers) if setup.max_transfers else None


def main() -> None:
    """Run `python -m paceline.serve.shard NUMBER HOST PORT`, with the job's token in the environment.

    The exit code is 0 if the job is over, LOST if the server is gone or begins a new generation, and REFUSED if it
    refuses the shard.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("number", type=int, help="-1: the coordinator chooses one")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--listen", default="127.0.0.1")
    parser.add_argument("--threads", type=int, default=1, help="0: as many as torch would use")
    parser.add_argument("--replica", type=int, default=0)
    arguments = parser.parse_args()
    without_compiler()
    token, own = (bytes.fromhex(os.environ.get(name, "")) for name in (TOKEN, SHARD_TOKEN))
    threads = arguments.threads or torch.get_num_threads()
    try:
        endpoint = Endpoint(arguments.host, arguments.port, own or token, Tls.from_environment())
        is_over = Shard(arguments.number, endpoint, arguments.listen, token, threads, arguments.replica).run()
    except (ValueError, OSError) as error:  # ValueError: a token of another role, or TLS files that cannot be used
        if isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, WireError):
            sys.exit(LOST)  # a server that is gone is no error here
        _refuse(arguments.number, error)
    # The interpreter's own shutdown would crash threads that still run.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if is_over else LOST)


def _refuse(number: int, error: Exception) -> NoReturn:
    """End with the reason why this shard cannot serve."""
    if is_launched():
        tell_launcher(f"{REFUSAL}{error}")
    else:
        sys.stderr.write(f"Shard {number}: {error}\n")
    sys.exit(REFUSED)
