"""The last checkpoint of a job. If it cannot be written, the model stays in memory, and the server tries again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from paceline.serve.coordinator.coordinator import Coordinator

log = logging.getLogger(__name__)

RETRY_SECONDS = 3.0  # between two attempts
UNSAVED = 3  # the exit code of a job whose last checkpoint could not be written


class LastSave:
    """Writes the last checkpoint, with patience."""

    def __init__(self, patience: float) -> None:
        """patience: seconds in which a checkpoint that fails is tried again."""
        self._patience = patience
        self._given_up = asyncio.Event()
        self._said = ""  # the reason that the user has read; empty: no attempt has failed

    async def run(self, coordinator: Coordinator) -> bool:
        """Write the checkpoint if the model has changed since the last one. Return False if that is impossible.

        If an attempt fails, another one follows every few seconds, until the time is over or the model is given up.
        """
        end = 0.0
        while not await coordinator.save():
            now = time.monotonic()
            end = end or now + self._patience
            checkpoints = coordinator.state.checkpoints
            error = checkpoints.error if checkpoints else ""
            if checkpoints and checkpoints.is_spoiled:  # the model will not change any more
                return False
            if coordinator.failed.is_set() or self._given_up.is_set() or now >= end:
                return False
            if error != self._said:
                log.warning(
                    "The last checkpoint could not be written: %s. The model is only in memory. Free space or repair "
                    "the folder within %.0f s, or press Ctrl-C to give the model up.",
                    error,
                    end - now,
                )
                self._said = error
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._given_up.wait(), min(RETRY_SECONDS, end - now))
        self._said = ""
        return True

    def give_up(self, ahead: bool = False) -> bool:
        """Try no more. Return False if no attempt has failed so far, and change nothing then.

        ahead: do not try again after the first attempt, even if it is still to come.
        """
        if self._said or ahead:
            self._given_up.set()
        return bool(self._said)
