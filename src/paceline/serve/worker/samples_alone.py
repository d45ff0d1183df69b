"""Samples for a script that trains without a job."""

from __future__ import annotations

from paceline.serve.wire.messages import SampleRange


class SamplesAlone:
    """Hands out all samples of each epoch, in order. `take` is that of a Client."""

    def __init__(self) -> None:
        self._number = self._epoch = self._position = 0

    def take(self, count: int, size: int, epochs: int, planned: int | None = None) -> SampleRange:
        """Return the next samples; an empty range if the first `epochs` epochs have no more."""
        if self._position >= size:
            self._epoch, self._position = self._epoch + 1, 0
        if self._epoch >= epochs:
            self._position = size  # stay at the end of the last epoch: a later call may allow more epochs
            self._epoch -= 1
            return SampleRange(self._number)
        start, self._position = self._position, min(size, self._position + count)
        self._number += 1
        return SampleRange(self._number, self._epoch, start, self._position)
