"""A shard's recording: every update that changed the model, in order, so that a run can be replayed bit for bit.

The file holds frames of the wire protocol: the Setup with the model's description, the initial weights, the orders of
the log, and at the end the digest of the weights. Each update is written before the first order that names it. A shard
that begins from a checkpoint writes the state that it has loaded to a file beside the recording.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from paceline.model import checkpoint
from paceline.model.description import Description
from paceline.model.slice import Slice
from paceline.serve.shard.store import HeldUpdate, WholeStore
from paceline.serve.wire.frames import PREFIX, MessageDecoder, WireError, decode_prefix, encode
from paceline.serve.wire.messages import (
    AddToSum,
    ApplyUpdates,
    DropUpdate,
    Identity,
    InitialState,
    InitialWeights,
    KeepUpdate,
    Message,
    Setup,
)


class RecordedUpdate(Message, frozen=True):
    """An update that the next order names. The body is its gradient in float32."""

    update: Identity
    rates: tuple[float, ...]


class RecordingEnd(Message, frozen=True):
    """The last version of the model, and the SHA-256 of its weights."""

    version: int
    digest: str


FRAMES = MessageDecoder(
    Setup
    | InitialWeights
    | InitialState
    | RecordedUpdate
    | AddToSum
    | ApplyUpdates
    | DropUpdate
    | KeepUpdate
    | RecordingEnd
)


class Recording:
    """Writes a recording. If the process is killed, only what was still in its write buffer is lost."""

    def __init__(self, path: Path, setup: Setup, description: bytes, store: WholeStore) -> None:
        """Open the file, and write the Setup. store: the shard's, which the recording reads."""
        self._store = store
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._kept: set[Identity] = set()  # updates that are written, and that later orders may name again
        self._write(setup, description)
        if setup.checkpoint:
            tensors, meta = store.state()
            checkpoint.save(start_of(path), {name: tensor.numpy() for name, tensor in tensors.items()}, meta)

    def begin(self, part: bytes | None = None) -> None:
        """Write the initial weights of the model. part: this shard's part of a checkpoint, if they came in one."""
        if part is None:
            self._write(InitialWeights(), self._store.slice.buffer)
        else:
            self._write(InitialState(), part)

    def order(self, order: Any) -> None:
        """Write an order, and the updates that it is the first to name. Call this before the order is carried out."""
        match order:
            case ApplyUpdates():
                for update in () if order.sums else order.updates:
                    self._write_update(update)
            case AddToSum(update):
                self._write_update(update)
            case KeepUpdate(update):
                self._write_update(update)
                self._kept.add(update)
            case DropUpdate(update) if self._store.is_added(update):
                pass
            case _:
                return
        self._write(order)

    def close(self) -> None:
        """Write the last version and the digest of the weights, and close the file."""
        self._write(RecordingEnd(self._store.version, digest(self._store)))
        self._file.close()

    def _write_update(self, update: Identity) -> None:
        """Write an update, unless it is written already."""
        if update not in self._kept:
            held = self._store.held(update)
            self._write(RecordedUpdate(update, held.rates), held.gradient.numpy().data.cast("B"))

    def _write(self, message: Message, body: bytes | memoryview = b"") -> None:
        self._file.write(encode(message, len(body)))
        self._file.write(body)


@dataclass(frozen=True)
class Replayed:
    """The result of a replay."""

    version: int
    digest: str  # of the weights after the replay
    expected: str  # digest at the end of the recording; empty if the recording was cut short
    updates: int  # that were replayed
    store: WholeStore


def replay(path: Path) -> Replayed:
    """Replay a recording with the code that a shard runs. Raise WireError if the recording cannot be read."""
    store: WholeStore | None = None
    expected, updates, first_version = "", 0, 0
    for message, body in _frames(path):
        if isinstance(message, Setup):
            store, first_version = _set_up(message, body, path), message.version
            continue
        if store is None:
            raise WireError(f"The recording {path} does not begin with a Setup.")
        match message:
            case InitialWeights():
                store.slice.weights.copy_(_tensor(body))
                store.version = first_version
            case InitialState():
                arrays, meta = checkpoint.parse(body)
                store.load({name: torch.from_numpy(array) for name, array in arrays.items()}, meta)
                store.version = first_version
            case RecordedUpdate(update, rates):
                store.put(update, HeldUpdate(_tensor(body), rates))
                updates += 1
            case ApplyUpdates():
                store.apply(message)
                store.applied(message)
            case AddToSum() | DropUpdate() | KeepUpdate():
                store.carry_out(message)
            case RecordingEnd():
                expected = message.digest
    if store is None:
        raise WireError(f"The recording {path} is empty.")
    return Replayed(store.version, digest(store), expected, updates, store)


def digest(store: WholeStore) -> str:
    """Return the SHA-256 of a shard's weights, in hex."""
    return hashlib.sha256(store.slice.buffer).hexdigest()


def start_of(path: Path) -> Path:
    """Return the path of the copy of the checkpoint that a recording begins from."""
    return path.with_suffix(".start.safetensors")


def _set_up(setup: Setup, description: bytes, path: Path) -> WholeStore:
    """Return the store with which the shard of a recording began."""
    described = Description.from_json(description)
    ((start, stop),) = setup.pieces
    part = Slice(described.layout, start, stop, described.optimizer, sparse=setup.sparse)
    store = WholeStore(part, setup.correct)
    if setup.checkpoint:
        arrays, meta = checkpoint.load(start_of(path))
        store.load({name: torch.from_numpy(array) for name, array in arrays.items()}, meta)
        store.version = setup.version
    return store


def _tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.float32)


def _frames(path: Path) -> Iterator[tuple[Any, bytes]]:
    """Yield each message of a recording and its body, up to the end or to where the file was cut short."""
    with path.open("rb") as file:
        while prefix := file.read(PREFIX.size):
            if len(prefix) < PREFIX.size:
                return
            head_size, body_size = decode_prefix(prefix)
            head, body = _read(file, head_size), _read(file, body_size)
            if head is None or body is None:
                return
            yield FRAMES.head(head), body


def _read(file: BinaryIO, size: int) -> bytes | None:
    """Return the next `size` bytes of a file, or None if there are fewer."""
    data = file.read(size)
    return data if len(data) == size else None
