"""A shard's side of the connection of one worker. It receives pushes straight into buffers that already exist."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from paceline.job.saving import MAX_STALENESS
from paceline.model.codecs import NAMES, decode, encoded_size
from paceline.model.differences import EXACT, FollowedModel
from paceline.model.half_precision import WIDTH
from paceline.model.slice import is_bounded
from paceline.serve.shard.admission import AdmittedTransfer
from paceline.serve.shard.store import HeldUpdate
from paceline.serve.wire.frames import Channel, MessageDecoder, WireError
from paceline.serve.wire.messages import (
    AllowPush,
    Hello,
    Identity,
    InitialState,
    InitialWeights,
    InitialWeightsReceived,
    OptimizerState,
    Proof,
    Pull,
    PullState,
    Push,
    PushReceived,
    RequestPush,
    UpdatedPiece,
    Weights,
)
from paceline.serve.wire.transfer_messages import NEARLY_DONE

if TYPE_CHECKING:
    from paceline.serve.shard.shard import Shard

FROM_WORKER = MessageDecoder(Proof | Hello | InitialWeights | InitialState | RequestPush | Push | Pull | PullState)
MAX_STATES = 8  # tensors of the size of the model that an optimizer's state may have; Adam has 2, RMSprop up to 3
MAX_HEADER = 1 << 24  # bytes of a part's other values
SUM_ELEMENTS = 1 << 18  # of a gradient that are summed together, while they are in the cache
MAX_UNREAD = 4  # answers for each piece that may wait to be sent; a worker that reads its answers has 2 at most
FLUSH_SECONDS = 5.0  # to send what is queued, before the reason follows why the connection ends


class WorkerConnection:
    """The connection of one worker."""

    def __init__(self, shard: Shard, channel: Channel, hello: Hello, number: int) -> None:
        """number: of the connection, in the order in which the shard accepted them."""
        self.channel, self.hello, self.number = channel, hello, number
        self._shard = shard
        self._updates = shard.await_setup()
        self._elements = [part.weights.numel() for part in self._updates.store.slices]  # of each piece
        #: Elements at the end of each piece that are running statistics, and are not encoded.
        self._unencoded = [part.weights.numel() - part.trained_elements for part in self._updates.store.slices]
        #: The pieces of the model as the worker has them, if it wants encoded differences to them.
        self.followed = self._followed_models(hello.codec) if hello.codec else None
        self._piece = 0  # that is being received
        self._part = bytearray()  # of a checkpoint, that is being received
        self._buffer: torch.Tensor | None = None  # that the piece is received into
        self._encoded: memoryview | None = None  # that a body in another form than float32 is received into
        # The sum of the squares of the elements received so far. NaN: it is not computed.
        self._summed, self._squares = 0, math.nan
        self._size = self._received = 0  # bytes of the body, and how many of them have arrived
        self._transfer: AdmittedTransfer | None = None  # of the push that is expected or being received
        self._relay = shard.relay_of(hello)  # if the shard has a backup
        # What the second thread calls to send frames, or rests of frames, that the kernel did not take at once.
        self._out: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None] | None] | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        self._sending = threading.Lock()  # keeps frames apart and in order; never held while waiting for the worker
        self._unsent = 0  # frames that are queued, or that the second thread is sending

    def run(self) -> None:
        """Answer the worker's messages until it closes the connection."""
        torch.set_num_threads(1)  # of this thread: its sums are small, and the other cores are busy
        torch.set_grad_enabled(False)  # of this thread, once and not in each step
        if self._shard.push_admission:
            self.channel.limit_unsent(NEARLY_DONE)
        if self._updates.full_duplex:
            self._sender = threading.Thread(target=self._send_queued, daemon=True)
            self._sender.start()
        self._updates.connected(self, self.hello)
        try:
            while True:
                self._await_reader()
                message = self.channel.receive(self._buffer_for, self._on_progress)
                match message:
                    case Push():
                        self._on_push(message)
                    case Pull():
                        _check_expected(message.expected)
                        self._updates.pull(self, message)
                    case RequestPush():
                        if self._shard.push_admission and not self._transfer:
                            self._transfer = self._shard.push_admission.enter()
                        self.send(AllowPush())
                    case InitialWeights(piece):
                        self._finish_relay()
                        self._shard.receive_initial_weights(self.hello, piece, self._take_body("InitialWeights"))
                        self.send(InitialWeightsReceived(self.hello.worker, self.hello.incarnation))
                    case InitialState():
                        self._finish_relay()
                        part, self._part = bytes(self._part), bytearray()
                        self._shard.receive_initial_state(self.hello, part)
                        self.send(InitialWeightsReceived(self.hello.worker, self.hello.incarnation))
                    case PullState():
                        version, state = self._updates.optimizer_state()
                        self.send(OptimizerState(version), torch.frombuffer(bytearray(state), dtype=torch.uint8))
                    case _:
                        raise WireError(f"A {type(message).__name__} is out of place here.")
        finally:
            with self._sending:
                self._unsent += 1  # whatever follows is queued, and never sent
            self._out.put(None)
            self._end_transfer()
            if self._buffer is not None:
                self._updates.return_buffer(self._piece, self._buffer)
            if self._relay:
                self._relay.close()
            if self._sender:
                self._sender.join(FLUSH_SECONDS)

    def send(self, message: Any, body: torch.Tensor | None = None, on_sent: Callable[[], None] | None = None) -> None:
        """Send a message to the worker. `on_sent` is called when it is sent.

        Where a connection sends and receives at the same time, this thread sends as many bytes as the kernel takes at
        once, and a second thread sends the rest. Mostly there is no rest, and the second thread need not wake.
        """
        data = None if body is None else body.numpy().data.cast("B")
        if self._sender:
            with self._sending:
                send_later = self._send_at_once(message, data)
                if send_later:
                    self._unsent += 1
                    self._out.put((send_later, on_sent))
                    return
        else:
            self.channel.send(message, data)
        if on_sent:
            on_sent()

    def send_weights(
        self,
        message: Weights | UpdatedPiece,
        weights: torch.Tensor,
        on_sent: Callable[[], None] | None = None,
        exact: bool = False,
    ) -> None:
        """Send a piece of the model from a buffer that does not change until it is sent, where updates are streamed.

        exact: in float32, although the worker wants encoded differences. The second thread encodes these, so that the
        pieces for several workers are encoded at the same time.
        """
        if self.followed is None:
            self.send(message, weights, on_sent)
            return
        with self._sending:
            self._unsent += 1
            self._out.put((partial(self._send_followed, message, weights.numpy(), exact), on_sent))

    def _send_followed(self, message: Weights | UpdatedPiece, values: np.ndarray[Any, Any], exact: bool) -> None:
        """Send a piece of the model in the form that the worker can use now."""
        assert self.followed is not None
        model = self.followed[message.piece]
        if exact or model.next_type == EXACT:
            model.set(values)
            self.channel.send(message, model.values.data.cast("B"))
        else:
            message = msgspec.structs.replace(message, dtype=model.next_type)
            self.channel.send(message, model.encode(model.subtract_from(values)))

    def _followed_models(self, name: str) -> list[FollowedModel]:
        """Return the pieces of the model as the worker has them: there are no values yet."""
        try:
            return [FollowedModel(name, *each) for each in zip(self._elements, self._unencoded, strict=True)]
        except ValueError as error:
            raise WireError(f"The model cannot be sent to this worker: {error}.") from None

    def _send_at_once(self, message: Any, data: memoryview | None) -> Callable[[], None] | None:
        """Send what the kernel takes, if no frame is queued. Return a function that sends the rest, or None."""
        if not self._unsent:
            try:
                rest = self.channel.send_at_once(message, data)
                return partial(self.channel.send_rest, *rest) if rest else None
            except OSError:  # the connection is lost; the second thread finds that out too, and ends
                pass
        return partial(self.channel.send, message, data)

    def _send_queued(self) -> None:
        with contextlib.suppress(OSError):  # the receiving thread notices a lost connection too
            while (queued := self._out.get()) is not None:
                send, on_sent = queued
                send()
                with self._sending:
                    self._unsent -= 1
                if on_sent:
                    on_sent()

    def _await_reader(self) -> None:
        """Wait while too many answers are queued, so that a worker that does not read them cannot fill the memory."""
        while self._sender and self._sender.is_alive() and self._out.qsize() > MAX_UNREAD * len(self._elements):
            time.sleep(0.01)

    def _end_transfer(self) -> None:
        if self._transfer:
            self._transfer.leave()
            self._transfer = None

    def _finish_relay_of(self, held: HeldUpdate, piece: int) -> None:
        """Wait until the backup has an update too. Take back its buffer if the backup refuses it."""
        try:
            self._finish_relay()
        except BaseException:
            self._updates.return_buffer(piece, held.gradient)
            raise

    def _finish_relay(self) -> None:
        """Wait until the backup has the message too, if there is one."""
        if self._relay:
            self._relay.finish()

    def _buffer_for(self, message: Any, size: int) -> memoryview:
        """Return the buffer for a body, which is passed on to the backup as it arrives."""
        buffer = self._checked_buffer(message, size)
        if self._relay:
            self._relay.begin(message, buffer)
        return buffer

    def _checked_buffer(self, message: Any, size: int) -> memoryview:
        """Return the buffer for a body. Raise WireError if it is not a valid one: nothing of it is read yet."""
        if isinstance(message, InitialState):
            return self._buffer_for_state(size)
        if not isinstance(message, Push | InitialWeights):
            raise WireError(f"A {type(message).__name__} has no body.")
        if not 0 <= message.piece < len(self._elements):
            raise WireError(f"There are {len(self._elements)} pieces here, and no number {message.piece}.")
        dtype = message.dtype if isinstance(message, Push) else "float32"
        self._piece, elements = message.piece, self._elements[message.piece]
        try:
            expected = encoded_size(dtype, elements - self._unencoded[message.piece], self._unencoded[message.piece])
        except ValueError:
            known = f"{', '.join(WIDTH)}, {NAMES}"
            raise WireError(f"A gradient is sent as {known}, not as {dtype!r:.80}.") from None
        if size != expected:
            raise WireError(f"{elements} elements of {dtype} are {expected} bytes, not {size}.")
        if isinstance(message, Push) and not self._transfer:
            self._transfer = self._shard.receiving.enter()  # how long the push takes depends on this worker alone
        self._buffer = self._updates.take_buffer(message.piece)
        self._summed, self._squares = 0, 0.0 if dtype == "float32" else math.nan
        self._size, self._received = expected, 0
        if dtype == "float32":
            return self._buffer.numpy().data.cast("B")
        if self._encoded is None or len(self._encoded) < expected:
            self._encoded = memoryview(bytearray(expected))
        return self._encoded[:expected]

    def _buffer_for_state(self, size: int) -> memoryview:
        largest = WIDTH["float32"] * sum(self._elements) * (1 + MAX_STATES) + MAX_HEADER
        if size > largest:
            raise WireError(f"The state of this shard has at most {largest} bytes, not {size}.")
        self._part = bytearray(size)
        return memoryview(self._part)

    def _on_progress(self, received: int) -> None:
        """Sum the squares of elements while they are still in the cache. received: bytes of the body so far."""
        if self._relay:
            self._relay.arrived(received)
        if self._transfer:
            self._transfer.moved(received - self._received)
            self._received = received
            if self._size - received <= NEARLY_DONE and self._shard.push_admission:
                self._transfer.leave()
        there = received // WIDTH["float32"]
        if self._buffer is None or math.isnan(self._squares):
            return
        if there - self._summed >= SUM_ELEMENTS or there == self._buffer.numel():
            part = self._buffer[self._summed : there]
            self._squares += torch.dot(part, part).item()
            self._summed = there

    def _take_body(self, name: str) -> torch.Tensor:
        """Return the buffer of the body that was received. Raise WireError if the message had none."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            raise WireError(f"A message of type {name} must have a body.")
        return buffer

    def _decode(self, push: Push, buffer: torch.Tensor) -> None:
        """Decode the body of a push. Raise WireError if it is damaged."""
        assert self._encoded is not None
        try:
            body = self._encoded[: self._size]
            decode(body, push.dtype, buffer.numpy(), self._unencoded[push.piece])
            if self.followed:
                self.followed[push.piece].answer_to(body, push.dtype)
        except ValueError as error:
            self._updates.return_buffer(push.piece, buffer)
            raise WireError(f"A push is damaged: {error}.") from None

    def _on_push(self, push: Push) -> None:
        if self._shard.push_admission:
            self._end_transfer()
        buffer = self._take_body("Push")
        if push.dtype != "float32" and self._encoded is not None:
            self._decode(push, buffer)
        update = Identity(self.hello.worker, self.hello.incarnation, push.iteration)
        held = HeldUpdate(buffer, push.rates)
        self._updates.check(held, push.piece, is_checked=is_bounded(self._squares))
        self._finish_relay_of(held, push.piece)
        answer_now = self._shard.receive(update, push.piece, held, self._transfer)
        self._transfer = None
        if answer_now:
            self.send(PushReceived(push.iteration))


def _check_expected(expected: int | None) -> None:
    if expected is not None and not 0 <= expected <= MAX_STALENESS:
        raise WireError(f"An update may be expected to be 0 to {MAX_STALENESS} versions stale, not {expected}.")
