"""Answers pulls. Each answer holds one version of the whole slice; several workers can pull at once.

A pull must not see half of an update. The weights are sent in pieces, each when the socket can take it. Before an
update is applied, every pull that is being answered continues from a copy of what it has not sent yet. So a slow reader
delays nobody.

Where staleness is corrected, a pull is answered with predicted weights (`prediction.py`). These are in a buffer of
their own. The worker's thread fills that buffer, and updates wait until it is filled.

A worker that wants encoded differences (`model.differences`) is answered from what its connection has read: the
difference of the weights to what the worker has. Updates wait while it reads them.

Where updates are streamed, `streamed_updates.py` answers pulls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from paceline.model.differences import EXACT
from paceline.serve.shard.admission import Admission, AdmittedTransfer
from paceline.serve.shard.prediction import PredictedWeights, Predictor
from paceline.serve.shard.store import WholeStore
from paceline.serve.wire.frames import ConnectionClosed, PiecedBody
from paceline.serve.wire.messages import Pull, Weights
from paceline.serve.wire.transfer_messages import NEARLY_DONE

if TYPE_CHECKING:
    from paceline.serve.shard.worker_connection import WorkerConnection


class _Copy:
    """A copy of the weights, and the pulls that are answered from it."""

    def __init__(self, buffer: torch.Tensor, pulls: set[PiecedBody]) -> None:
        self.buffer, self._pulls = buffer, pulls

    def release(self, pull: PiecedBody, store: WholeStore) -> None:
        """End a pull's use of the copy. After the last pull, reuse the buffer: new pages cost more than the copy."""
        self._pulls.discard(pull)
        if not self._pulls:
            store.return_buffer(0, self.buffer)


class PullServer:
    """Sends a shard's weights to workers, each from its own thread, between the updates that the shard applies."""

    def __init__(
        self,
        store: WholeStore,
        state: threading.Condition,
        stopping: threading.Event,
        admission: Admission | None,
        threads: int,
    ) -> None:
        """state: guards the store. stopping: is set when the shard stops. admission: if pulls take turns on the link.

        threads: that compute a prediction together, which takes as much work as a step.
        """
        self.store = store
        self._state, self._stopping, self._admission, self._threads = state, stopping, admission, threads
        self._predictor = Predictor(store)
        self._reading = 0  # predictions and differences that are being computed from the weights
        self._paused = False  # is an update being applied?
        self._pulls: set[PiecedBody] = set()  # that are being answered from the weights themselves
        self._copies: dict[PiecedBody, _Copy] = {}  # pull → the copy that it is being answered from

    def send(self, connection: WorkerConnection, request: Pull) -> None:
        """Send a worker the weights that it requests, as soon as they are of that version or a newer one.

        If it expects updates to be applied before its own, send them as predicted. Versions that have been applied by
        then need no prediction.
        """
        if connection.followed:
            self._send_encoded(connection, request)
            return
        version, expected = request.version, request.expected
        transfer: AdmittedTransfer | None = None
        pull: PiecedBody | None = None
        predicted = self._predict(version, expected)  # before the transfer is admitted, or the link would be idle
        try:
            if self._admission:
                transfer = self._admission.enter()
            if predicted and predicted.version != self.store.version:  # it became old while other pulls were sent
                old, predicted = predicted, None
                self._release(old)
                predicted = self._predict(version, expected)
            with self._state:
                if predicted:
                    newest, pull = predicted.version, PiecedBody(predicted.bytes)
                else:
                    self._await_version(version)
                    newest, pull = self.store.version, PiecedBody(self.store.slice.buffer)
                    self._pulls.add(pull)
                    self.store.note_pull(connection.hello.worker, connection.hello.incarnation)
            connection.channel.send_pieces(Weights(newest), pull, _progress(transfer, pull) if transfer else None)
        finally:
            if transfer:
                transfer.leave()
            if predicted:
                self._release(predicted)
            if pull:
                self._end(pull)

    def _send_encoded(self, connection: WorkerConnection, request: Pull) -> None:
        """Send the weights to a worker as an encoded difference to what it has, or in float32 if that must be."""
        assert connection.followed
        (model,) = connection.followed
        is_exact = request.exact or model.next_type == EXACT
        predicted = self._predict(request.version, request.expected)
        if predicted is None:
            with self._state:
                self._await_version(request.version)
                self.store.note_pull(connection.hello.worker, connection.hello.incarnation)
                self._reading += 1
        newest = predicted.version if predicted else self.store.version
        try:
            values = (predicted.buffer if predicted else self.store.slice.weights).numpy()
            if is_exact:
                model.set(values)
            else:
                difference = model.subtract_from(values)
        finally:
            if predicted:
                self._release(predicted)
            else:
                self._end_reading()
        answer = Weights(newest) if is_exact else Weights(newest, dtype=model.next_type)
        body = PiecedBody(model.values.data.cast("B") if is_exact else model.encode(difference))
        transfer = self._admission.enter() if self._admission else None
        try:
            connection.channel.send_pieces(answer, body, _progress(transfer, body) if transfer else None)
        finally:
            if transfer:
                transfer.leave()

    @property
    def is_paused(self) -> bool:
        """Whether an update is being applied."""
        return self._paused

    def pause(self) -> None:
        """Let the weights change: no new pull is answered, and pulls that are being answered continue from a copy."""
        with self._state:
            self._paused = True
            while self._reading:
                self._state.wait()
            self._detach_pulls()
            self.store.keep_base()

    def resume(self) -> None:
        """Answer pulls again. The weights do not change until the next `pause`."""
        with self._state:
            self._paused = False
            self._state.notify_all()

    def _await_version(self, version: int) -> None:
        """Wait until the weights are of this version or newer, and no update is being applied. The state is held."""
        while self.store.version < version or self._paused:
            if self._stopping.is_set():
                raise ConnectionClosed("The shard is closing.")
            self._state.wait(1.0)

    def _predict(self, version: int, expected: int | None) -> PredictedWeights | None:
        """Wait for this version or a newer one. Return its prediction, or None if the weights are sent as they are."""
        with self._state:
            self._await_version(version)
            steps = self.store.steps_ahead(expected, self.store.version - version)
            if not steps:
                return None
            predicted = self._predictor.take(steps)
            self._reading += 1
        try:
            torch.set_num_threads(self._threads)  # of this thread only
            predicted.compute()
        except BaseException:
            self._release(predicted)
            raise
        finally:
            torch.set_num_threads(1)
            self._end_reading()
        return predicted

    def _end_reading(self) -> None:
        """Let updates be applied again, unless other threads read the weights."""
        with self._state:
            self._reading -= 1
            self._state.notify_all()

    def _release(self, predicted: PredictedWeights) -> None:
        """Release a prediction that has been sent or became old."""
        with self._state:
            self._predictor.release(predicted)

    def _detach_pulls(self) -> None:
        """Copy what the pulls that are being answered have not sent yet, so that the weights may change."""
        if not self._pulls:
            return
        weights = self.store.slice.weights
        copy = _Copy(self.store.take_buffer(), set(self._pulls))
        # Every pull has sent at least this many bytes, and may meanwhile send more.
        sent = self.store.slice.buffer.nbytes - max(len(pull.rest) for pull in self._pulls)
        start = sent // weights.element_size()
        copy.buffer[start:].copy_(weights[start:])
        copied = copy.buffer.numpy().data.cast("B")
        for pull in self._pulls:
            with pull.lock:
                pull.rest = copied[len(copied) - len(pull.rest) :]
            self._copies[pull] = copy
        self._pulls.clear()

    def _end(self, pull: PiecedBody) -> None:
        """Forget a pull that was answered, or whose connection was lost."""
        with self._state:
            self._pulls.discard(pull)
            if copy := self._copies.pop(pull, None):
                copy.release(pull, self.store)


def _progress(transfer: AdmittedTransfer, pull: PiecedBody) -> Callable[[int], None]:
    """Return a callback for the bytes that are sent. It admits the next transfer when nearly all of them are."""

    def sent(size: int) -> None:
        transfer.moved(size)
        if len(pull.rest) <= NEARLY_DONE:
            transfer.leave()

    return sent
