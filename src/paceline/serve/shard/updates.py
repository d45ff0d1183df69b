"""How a shard receives updates, applies them and answers pulls: the interface that both ways of applying share.

`WholeUpdates` applies an update when all of it has arrived. `StreamedUpdates` applies each piece as it arrives. The
shard chooses one of them when the coordinator sends Setup.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from paceline.model import checkpoint
from paceline.serve.shard.admission import AdmittedTransfer
from paceline.serve.shard.store import HeldUpdate, Store
from paceline.serve.wire.frames import Channel, WireError
from paceline.serve.wire.messages import Hello, Identity, Pull, Setup, UpdateReceived

if TYPE_CHECKING:
    from paceline.serve.shard.worker_connection import WorkerConnection


class Updates(ABC):
    """How a shard receives updates, applies them and answers pulls. Any thread may call, except `carry_out`."""

    #: Whether a connection sends and receives at the same time, which takes a second thread.
    full_duplex: ClassVar[bool]

    def __init__(self, store: Store, state: threading.Condition, tell: Callable[[Any], None]) -> None:
        """state: guards the store. tell: sends a message to the coordinator."""
        self.store = store
        self.follows = False  # is this the shard's backup, which reports nothing that the primary reports?
        self.measures = False  # must the coordinator be told the size of each update?
        self._state, self._tell = state, tell

    # Workers; each call comes from the thread of a connection

    def take_buffer(self, piece: int) -> torch.Tensor:
        """Return a buffer to receive an update of a piece into. Pass it to `receive`, or back to `return_buffer`."""
        with self._state:
            return self.store.take_buffer(piece)

    def return_buffer(self, piece: int, buffer: torch.Tensor) -> None:
        """Take back a buffer that was not passed to `receive`."""
        with self._state:
            self.store.return_buffer(piece, buffer)

    def check(self, held: HeldUpdate, piece: int, is_checked: bool) -> None:
        """Raise WireError, and take back the buffer, if an update must not change the model.

        is_checked: the elements are known to be finite and not huge, so they are not checked again.
        """
        fault = self.store.fault(held, piece, is_checked)
        if fault:
            self.return_buffer(piece, held.gradient)
            raise WireError(f"The update was refused: {fault}.")

    @abstractmethod
    def connected(self, connection: WorkerConnection, hello: Hello) -> None:
        """Take note of a worker's new connection."""

    @abstractmethod
    def disconnected(self, channel: Channel, hello: Hello) -> None:
        """Take note that a worker's connection has ended."""

    @abstractmethod
    def receive(self, update: Identity, piece: int, held: HeldUpdate, transfer: AdmittedTransfer | None) -> bool:
        """Take a piece of an update that has arrived and passed `check`.

        Return True if the worker is to be answered with PushReceived now.
        transfer: a place among the pushes that are received, which the update keeps until the log has decided on it.
        """

    @abstractmethod
    def pull(self, connection: WorkerConnection, request: Pull) -> None:
        """Send a worker the weights that it requests."""

    # The coordinator; each call comes from the shard's main thread

    def load(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any], version: int) -> None:
        """Begin from a checkpoint. Raise ValueError if it does not fit this shard."""
        self.store.load(tensors, meta)
        self.store.version = version

    def record(  # noqa: B027  # streamed updates cannot be recorded
        self, path: Path, setup: Setup, description: bytes
    ) -> None:
        """Record every order and its updates in a file, if this way of applying can be recorded."""

    def begin(self, version: int, part: bytes | None = None) -> None:
        """Begin from the initial weights, which are complete now. The state is held.

        version: of these weights. part: this shard's part of a checkpoint that they were loaded from, if they were.
        """
        self.store.version = version

    @abstractmethod
    def carry_out(self, order: Any) -> None:
        """Carry out an order of the log about updates."""

    def take_over(self) -> None:
        """Become the primary. Report the updates that are held, because the coordinator may not know of them."""
        with self._state:
            self.follows = False
            waiting = self.store.waiting()
        for update, held in waiting.items():
            self._tell(UpdateReceived(update, held.size))

    def snapshot(self) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, object]]:
        """Return a copy of everything that a checkpoint must hold, taken while no update is being applied."""
        with self._state:
            self._await_quiet()
            tensors, meta = self.store.state()
            return {name: np.array(tensor.numpy()) for name, tensor in tensors.items()}, meta

    def optimizer_state(self) -> tuple[int, bytes]:
        """Return the version of the model, and the optimizer's state in the format of a checkpoint's part."""
        with self._state:
            self._await_quiet()
            tensors, meta = self.store.optimizer_state()
            return self.store.version, checkpoint.format_part(
                {name: tensor.numpy() for name, tensor in tensors.items()}, meta
            )

    def close(self) -> None:  # noqa: B027  # streamed updates cannot be recorded
        """Finish the recording, if there is one."""

    @abstractmethod
    def _await_quiet(self) -> None:
        """Wait until no update is being applied. The state is held."""
