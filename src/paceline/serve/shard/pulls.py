"""A shard's answers to pulls: the whole slice, of one version, to as many workers at a time as ask.

A pull must not see half of an update. Weights are sent in pieces, each only when the socket can take it. Before an
update is applied, pulls under way are given a copy of what they have not sent yet. So a slow reader delays nobody.

Where staleness is corrected for, a pull is sent weights as they will be (`foresight.py`). That is a copy anyway; the
worker's thread makes it, and an update waits until it is made.

Streamed, pieces go back to workers one by one, and `flow.py` answers pulls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from paceline.serve.shard.admission import NEARLY, Admission, AdmittedTransfer
from paceline.serve.shard.prediction import PredictedWeights, Predictor
from paceline.serve.shard.store import WholeStore
from paceline.serve.wire.frames import Channel, ConnectionClosed, PiecedBody
from paceline.serve.wire.messages import Weights


class _Copy:
    """A copy of weights, and the pulls that it is for."""

    def __init__(self, buffer: torch.Tensor, pulls: set[PiecedBody]) -> None:
        self.buffer, self._pulls = buffer, pulls

    def given_up(self, pull: PiecedBody, store: WholeStore) -> None:
        """A pull is done with it. After the last, the buffer may be used again: new pages cost more than the copy."""
        self._pulls.discard(pull)
        if not self._pulls:
            store.free(0, self.buffer)


class PullServer:
    """Sends a shard's weights to workers, each from its own thread, between the updates that the shard applies."""

    def __init__(
        self, store: WholeStore, state: threading.Condition, over: threading.Event, link: Admission | None, threads: int
    ) -> None:
        """state: guards the store. over: is the shard closing? link: where pulls take turns on it.

        threads: that may make a prediction together, which is as much work as a step.
        """
        self.store = store
        self._state, self._over, self._link, self._threads = state, over, link, threads
        self._predictor = Predictor(store)
        self._foreseeing = 0  # predictions that are being made
        self._paused = False  # is an update being applied?
        self._pulls: set[PiecedBody] = set()  # under way, of the weights themselves
        self._copies: dict[PiecedBody, _Copy] = {}  # under way, of a copy

    def send(self, channel: Channel, version: int, expected: int | None = None) -> None:
        """Send the weights when they are of this version or newer.

        expected: as they will be so many versions after this one. What has become of those versions by then is known.
        """
        entered: AdmittedTransfer | None = None
        pull: PiecedBody | None = None
        foreseen = self._foresee(version, expected)  # before it is let onto the link, which would be idle meanwhile
        try:
            if self._link:
                entered = self._link.enter()
            if foreseen and foreseen.version != self.store.version:  # others were before it on the link: this is old
                old, foreseen = foreseen, None
                self._forget(old)
                foreseen = self._foresee(version, expected)
            with self._state:
                if foreseen:
                    newest, pull = foreseen.version, PiecedBody(foreseen.bytes)
                else:
                    self._await(version)
                    newest, pull = self.store.version, PiecedBody(self.store.slice.buffer)
                    self._pulls.add(pull)
            channel.send_pieces(Weights(newest), pull, _hand_on(entered, pull) if entered else None)
        finally:
            if entered:
                entered.leave()
            if foreseen:
                self._forget(foreseen)
            if pull:
                self._sent(pull)

    def pause(self) -> None:
        """From now on the weights may change: no pull begins, and those under way go on from copies."""
        with self._state:
            self._paused = True
            while self._foreseeing:
                self._state.wait()
            self._part_from_pulls()

    def resume(self) -> None:
        """The weights have changed, and stay as they are until the next `pause`."""
        with self._state:
            self._paused = False
            self._state.notify_all()

    def _await(self, version: int) -> None:
        """Until the weights are of this version or newer, and no update is being applied. The state is held."""
        while self.store.version < version or self._paused:
            if self._over.is_set():
                raise ConnectionClosed("The shard is closing.")
            self._state.wait(1.0)

    def _foresee(self, version: int, expected: int | None) -> PredictedWeights | None:
        """The weights as they will be, when they are of this version or newer. None: they are to be sent as they are.

        It is waited for in any case.
        """
        with self._state:
            self._await(version)
            steps = self.store.steps_ahead(expected, self.store.version - version)
            if not steps:
                return None
            foreseen = self._predictor.take(steps)
            self._foreseeing += 1
        try:
            torch.set_num_threads(self._threads)  # of this thread
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

    def _forget(self, foreseen: PredictedWeights) -> None:
        """It has been sent, or is not wanted."""
        with self._state:
            self._predictor.give_back(foreseen)

    def _part_from_pulls(self) -> None:
        """Give pulls under way a copy of what they have not sent of the weights, so that these may change."""
        if not self._pulls:
            return
        weights = self.store.slice.weights
        copy = _Copy(self.store.room(), set(self._pulls))
        sent = self.store.slice.buffer.nbytes - max(len(pull.rest) for pull in self._pulls)  # it can only become more
        start = sent // weights.element_size()
        copy.buffer[start:].copy_(weights[start:])
        copied = copy.buffer.numpy().data.cast("B")
        for pull in self._pulls:
            with pull.lock:
                pull.rest = copied[len(copied) - len(pull.rest) :]
            self._copies[pull] = copy
        self._pulls.clear()

    def _sent(self, pull: PiecedBody) -> None:
        """A pull is over, all of it sent or not."""
        with self._state:
            self._pulls.discard(pull)
            if copy := self._copies.pop(pull, None):
                copy.given_up(pull, self.store)


def _hand_on(entered: AdmittedTransfer, pull: PiecedBody) -> Callable[[int], None]:
    """Told how many bytes are out as they go, it lets the next one onto the link when nearly all of them are."""

    def sent(size: int) -> None:
        entered.moved(size)
        if len(pull.rest) <= NEARLY:
            entered.leave()

    return sent
