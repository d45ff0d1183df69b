"""A worker's connection, as its shard sees it: what comes goes straight into a buffer that waits for it."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from paceline.job.saving import MAX_STALENESS
from paceline.model.half_precision import WIDTH, widen
from paceline.serve.shard.admission import NEARLY, AdmittedTransfer
from paceline.serve.shard.store import HeldUpdate
from paceline.serve.wire.frames import Channel, MessageDecoder, WireError
from paceline.serve.wire.messages import (
    AllowPush,
    Hello,
    Identity,
    InitialWeights,
    InitialWeightsReceived,
    Proof,
    Pull,
    Push,
    PushReceived,
    RequestPush,
)

if TYPE_CHECKING:
    from paceline.serve.shard.shard import Shard

FROM_WORKER = MessageDecoder(Proof | Hello | InitialWeights | RequestPush | Push | Pull)
STRETCH = 1 << 18  # elements of a gradient that are looked at together, while they are in the cache
MAX_UNREAD = 4  # times what the shard holds, that may wait to be sent to a worker; one who keeps step has half of it
LAST_WORDS = 5.0  # seconds for what is being sent to get out, before the reason why the connection ends follows it


class WorkerConnection:
    """One worker's connection."""

    def __init__(self, shard: Shard, channel: Channel, hello: Hello) -> None:
        self.channel = channel
        self._shard, self._hello, self._flow = shard, hello, shard.flow
        self._buffer: torch.Tensor | None = None
        self._piece = 0  # that it is for
        self._narrow: memoryview | None = None  # where two-byte elements are received
        self._looked_at, self._sum = 0, math.nan  # elements that have come, and their sum if it is known
        self._size = self._seen = 0  # bytes of a body, and those that have come
        self._pass: AdmittedTransfer | None = None  # it may push, or what it pushes is being received
        self._out: queue.SimpleQueue[tuple[Any, torch.Tensor | None, Callable[[], None] | None] | None]
        self._out = queue.SimpleQueue()
        self._sender: threading.Thread | None = None

    def run(self) -> None:
        """Until the worker hangs up."""
        self._elements = [part.weights.numel() for part in self._shard.opened().slices]
        torch.set_num_threads(1)  # of this thread: what it adds up is small, and the other cores have work
        if self._shard.pushes:
            self.channel.hold_little_back(NEARLY)
        if self._flow:
            self._flow.visited(self, self._hello)
            self._sender = threading.Thread(target=self._send_all, daemon=True)
            self._sender.start()
        try:
            while True:
                self._until_read()
                message = self.channel.receive(self._into, self._look)
                match message:
                    case Push():
                        self._pushed(message)
                    case Pull(version, expected):
                        _check_expected(expected)
                        if self._flow:
                            self._flow.pull(self, version, expected)
                        elif self._shard.pulls:
                            self._shard.pulls.send(self.channel, version, expected)
                    case RequestPush():
                        self._let_push()
                        self.give(AllowPush())
                    case InitialWeights(piece):
                        self._shard.begin(self._hello, piece, self._received("A Begin"))
                        self.give(InitialWeightsReceived(self._hello.worker, self._hello.incarnation))
                    case _:
                        raise WireError(f"A {type(message).__name__} is out of place here.")
        finally:
            self._out.put(None)
            self._let_next_push()
            if self._buffer is not None:
                self._shard.free(self._piece, self._buffer)
            if self._sender:
                self._sender.join(LAST_WORDS)

    def give(self, message: Any, body: torch.Tensor | None = None, sent: Callable[[], None] | None = None) -> None:
        """Send something to the worker. `sent` is called when it is out."""
        if self._flow:
            self._out.put((message, body, sent))
        else:
            self.channel.send(message)

    def _send_all(self) -> None:
        """Streamed, what goes out does not wait for what comes in, nor the other way round."""
        with contextlib.suppress(OSError):  # whoever receives here sees it too
            while (what := self._out.get()) is not None:
                message, body, sent = what
                self.channel.send(message, None if body is None else body.numpy().data.cast("B"))
                if sent:
                    sent()

    def _until_read(self) -> None:
        """Of one who asks and asks and does not read what it is answered, nothing more is heard: it would be kept."""
        while self._sender and self._sender.is_alive() and self._out.qsize() > MAX_UNREAD * len(self._elements):
            time.sleep(0.01)

    def _let_push(self) -> None:
        if self._shard.pushes and not self._pass:
            self._pass = self._shard.pushes.enter()

    def _let_next_push(self) -> None:
        if self._pass:
            self._pass.leave()
            self._pass = None

    def _into(self, message: Any, size: int) -> memoryview:
        """Where a body goes: its size is known before a byte of it is read."""
        if not isinstance(message, Push | InitialWeights):
            raise WireError(f"A {type(message).__name__} has no body.")
        if not 0 <= message.piece < len(self._elements):
            raise WireError(f"There are {len(self._elements)} pieces here, and no number {message.piece}.")
        dtype = message.dtype if isinstance(message, Push) else "float32"
        if dtype not in WIDTH:
            raise WireError(f"A gradient is sent as {', '.join(WIDTH)}, not as {dtype!r:.80}.")
        self._piece, elements = message.piece, self._elements[message.piece]
        due = elements * WIDTH[dtype]
        if size != due:
            raise WireError(f"{elements} elements of {dtype} are {due} bytes, not {size}.")
        if isinstance(message, Push) and not self._pass:
            self._pass = self._shard.receiving.enter()  # it depends on nobody but this worker how soon it is through
        self._buffer = self._shard.room(message.piece)
        self._looked_at, self._sum = 0, 0.0 if dtype == "float32" else math.nan
        self._size, self._seen = due, 0
        if dtype == "float32":
            return self._buffer.numpy().data.cast("B")
        if self._narrow is None or len(self._narrow) < due:
            self._narrow = memoryview(bytearray(due))
        return self._narrow[:due]

    def _look(self, received: int) -> None:
        """Add up what has come while it is still in the cache. A finite sum has only finite terms."""
        if self._pass:
            self._pass.moved(received - self._seen)
            self._seen = received
            if self._size - received <= NEARLY and self._shard.pushes:
                self._pass.leave()
        there = received // WIDTH["float32"]
        if self._buffer is None or math.isnan(self._sum):
            return
        if there - self._looked_at >= STRETCH or there == self._buffer.numel():
            self._sum += self._buffer[self._looked_at : there].sum().item()
            self._looked_at = there

    def _received(self, what: str) -> torch.Tensor:
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            raise WireError(f"{what} must have a body.")
        return buffer

    def _pushed(self, push: Push) -> None:
        if self._shard.pushes:
            self._let_next_push()
        buffer = self._received("A push")
        if push.dtype != "float32" and self._narrow is not None:
            widen(self._narrow[: buffer.numel() * WIDTH[push.dtype]], push.dtype, buffer.numpy())
        update = Identity(self._hello.worker, self._hello.incarnation, push.iteration)
        returned = self._shard.put(update, push.piece, HeldUpdate(buffer, push.rates), self._sum, self._pass)
        self._pass = None
        if not returned:
            self.channel.send(PushReceived(push.iteration))


def _check_expected(expected: int | None) -> None:
    if expected is not None and not 0 <= expected <= MAX_STALENESS:
        raise WireError(f"An update may be expected to be 0 to {MAX_STALENESS} versions stale, not {expected}.")
