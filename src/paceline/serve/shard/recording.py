"""A shard's recording: every update that changed the model, in order, so that a run can be replayed bit for bit.

The file holds frames of the wire: the Setup with the model's description, the first weights, then each order of the
log, with the updates that it is the first to name before it, and at the end the digest of the weights. A shard that
begins from a checkpoint puts a copy of its part of it beside the file.
"""

from __future__ import annotations

import hashlib
import shutil
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
    InitialWeights,
    KeepUpdate,
    Message,
    Setup,
)


class RecordedUpdate(Message, frozen=True):
    """An update that the next order names; the body is its gradient in float32."""

    update: Identity
    rates: tuple[float, ...]


class RecordingEnd(Message, frozen=True):
    """The version that was reached, and the SHA-256 of the weights."""

    version: int
    digest: str


FRAMES = MessageDecoder(
    Setup | InitialWeights | RecordedUpdate | AddToSum | ApplyUpdates | DropUpdate | KeepUpdate | RecordingEnd
)


class Recording:
    """Writes it. Nothing of it is lost but what the process had not yet given to the system when it was killed."""

    def __init__(self, path: Path, setup: Setup, description: bytes, number: int, store: WholeStore) -> None:
        """number: the shard's. store: what it holds."""
        self._store = store
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._put: set[Identity] = set()  # kept ones, which later orders name again
        self._write(setup, description)
        if setup.checkpoint:
            shutil.copy(checkpoint.shard_file(Path(setup.checkpoint), number), start_of(path))

    def begin(self) -> None:
        """Write down the weights that the model begins with."""
        self._write(InitialWeights(), self._store.slice.buffer)

    def order(self, order: Any) -> None:
        """Write down an order before it is carried out."""
        match order:
            case ApplyUpdates():
                for update in () if order.sums else order.updates:
                    self._put_once(update)
            case AddToSum(update):
                self._put_once(update)
            case KeepUpdate(update):
                self._put_once(update)
                self._put.add(update)
            case DropUpdate(update) if self._store.is_added(update):
                pass
            case _:
                return
        self._write(order)

    def close(self) -> None:
        """Write down what the model has come to."""
        self._write(RecordingEnd(self._store.version, digest(self._store)))
        self._file.close()

    def _put_once(self, update: Identity) -> None:
        if update not in self._put:
            held = self._store.held(update)
            self._write(RecordedUpdate(update, held.rates), held.gradient.numpy().data.cast("B"))

    def _write(self, message: Message, body: bytes | memoryview = b"") -> None:
        self._file.write(encode(message, len(body)))
        self._file.write(body)


@dataclass(frozen=True)
class Replayed:
    """What a replay came to. `expected` is empty if the recording was cut short."""

    version: int
    digest: str
    expected: str
    updates: int
    store: WholeStore


def replay(path: Path) -> Replayed:
    """Run a recording again, by the same code that a shard runs. WireError if it cannot be read."""
    store: WholeStore | None = None
    expected, updates = "", 0
    for message, body in _frames(path):
        if isinstance(message, Setup):
            store = _set_up(message, body, path)
            continue
        if store is None:
            raise WireError(f"The recording {path} does not begin with a Setup.")
        match message:
            case InitialWeights():
                store.slice.weights.copy_(_tensor(body))
                store.version = 0
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
    """SHA-256 of the weights, in hex."""
    return hashlib.sha256(store.slice.buffer).hexdigest()


def start_of(path: Path) -> Path:
    """Where the checkpoint's part is that a recording begins from."""
    return path.with_suffix(".start.safetensors")


def _set_up(setup: Setup, description: bytes, path: Path) -> WholeStore:
    described = Description.from_json(description)
    ((start, stop),) = setup.pieces
    store = WholeStore(Slice(described.layout, start, stop, described.optimizer), setup.correct)
    if setup.checkpoint:
        arrays, meta = checkpoint.load(start_of(path))
        store.load({name: torch.from_numpy(array) for name, array in arrays.items()}, meta)
        store.version = setup.version
    return store


def _tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.float32)


def _frames(path: Path) -> Iterator[tuple[Any, bytes]]:
    with path.open("rb") as file:
        while prefix := file.read(PREFIX.size):
            if len(prefix) < PREFIX.size:
                return  # cut short
            head_size, body_size = decode_prefix(prefix)
            head, body = _read(file, head_size), _read(file, body_size)
            if head is None or body is None:
                return
            yield FRAMES.head(head), body


def _read(file: BinaryIO, size: int) -> bytes | None:
    data = file.read(size)
    return data if len(data) == size else None
