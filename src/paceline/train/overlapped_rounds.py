"""Local steps that go on while the exchange of the last round is on its way.

At the end of a round a thread pushes how far the worker has moved the model, and pulls. Meanwhile the worker makes the
steps of the next round, on what it has. When the model is there, the worker adds its new steps to it. So a worker waits
only if an exchange takes longer than a round.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from paceline.train.backend import AssignedSamples, SampleSource, exchange
from paceline.train.local_steps import LocalStepsBackend


class OverlappedRoundsBackend(LocalStepsBackend):
    """A worker of a job that makes the next local steps while an exchange is on its way."""

    def __init__(self, *arguments: Any) -> None:
        self._thread: threading.Thread | None = None  # that exchanges the last round
        self._error: BaseException | None = None  # with which that thread has ended
        self._granted_before: int | None = None  # the samples of a round, as granted before that thread began
        super().__init__(*arguments)
        self._client.asks_ahead = False  # samples are taken while the thread waits for its Grant

    def _granted_round(self) -> int | None:
        # While the other thread joins again, the client has no Grant.
        return self._granted_before if self._thread else super()._granted_round()

    def _may_have_loaded(self) -> bool:
        return self._thread is None and super()._may_have_loaded()

    def sample_source(self) -> SampleSource:
        assign = super().sample_source()

        def take(batch_size: int, size: int, epochs: int, planned: int | None) -> AssignedSamples | None:
            if self._thread:
                wanted = self.granted_batch or batch_size
                found = self._client.take_meanwhile(self.joins, wanted, size, epochs, planned)
                if found is not None and found.start < found.stop:
                    count = found.stop - found.start
                    return AssignedSamples(found.number, self.joins, found.epoch, found.start, found.stop, count)
                self._receive()  # the worker joins again, or the exchange may bring samples back
            return assign(batch_size, size, epochs, planned)

        return take

    def end_samples(self, size: int) -> None:
        self._receive()  # only one thread at a time may join again
        super().end_samples(size)

    def _end_round(self) -> None:
        """Wait for the exchange of the round before, and begin that of this one."""
        self._receive()
        if not self._made:
            return  # the worker was given up, so these steps are lost
        computed, pulled_at = self._gather_round(), self._pulled_at
        self._flat.keep_parameters()
        self._made, self._pulled_at = [], time.perf_counter()

        def run() -> None:
            try:
                exchange(self._client, self._flat, computed, pulled_at)
            except BaseException as error:
                self._error = error

        self._granted_before = self._client.granted.batch_size
        self._thread = threading.Thread(target=run, daemon=True, name="paceline exchange")
        self._thread.start()

    def _push(self) -> None:
        self._end_round()
        self._receive()

    def _after_step(self) -> None:
        if self._thread and not self._thread.is_alive():
            self._receive()

    def _receive(self) -> None:
        """Wait for the exchange that is on its way, if there is one, and go on from the model that it has pulled."""
        if not self._join_thread():
            return
        if self._made and self.joins == self._client.joins:
            if self._start:
                self._start.begin(kept=True)
            self._flat.add_received()
            self._loading.has_stepped = True
        else:  # no step was made meanwhile, or others repeat the steps, because this worker was given up
            self._use_pulled_weights()

    def _join_thread(self) -> bool:
        """Wait for the exchange that is on its way. Return False if there is none. Raise its error if it has failed."""
        if self._thread is None:
            return False
        began = time.perf_counter()
        self._thread.join()
        self._thread = None
        self._pulled_at += time.perf_counter() - began  # this was no computing
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def load_weights(self) -> None:
        self._join_thread()  # the script has loaded other weights into the model, so what was pulled is not used
        super().load_weights()

    def finish(self) -> None:
        self._receive()
        super().finish()

    def close(self) -> None:
        super().close()
        if self._thread:
            self._thread.join()
