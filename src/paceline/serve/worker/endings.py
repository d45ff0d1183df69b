"""The ends of a worker's incarnation, and the pauses before it tries to connect again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from paceline.serve.wire.messages import Expelled, Refused

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between attempts to connect


class Refusal(ConnectionError):
    """The server refuses this worker. The message is the server's reason."""


class IncarnationOver(ConnectionError):
    """This incarnation of the worker is over. The worker may join again."""


def raise_if_over(message: Any) -> None:
    """Raise the matching error if the server's answer is Refused or Expelled."""
    if isinstance(message, Refused):
        raise Refusal(message.reason)
    if isinstance(message, Expelled):
        raise IncarnationOver(message.reason)


def retry_pauses(seconds: float) -> Iterator[float]:
    """Yield increasing pauses between attempts, until `seconds` have passed in all."""
    end, pause = time.monotonic() + seconds, FIRST_PAUSE
    while (left := end - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(2 * pause, LONGEST_PAUSE)


class Ending:
    """Whether an incarnation has ended, and why."""

    def __init__(self) -> None:
        self.error: ConnectionError | None = None
        self.over = threading.Event()  # set when the incarnation ends or is about to end

    def check(self) -> None:
        """Raise the error with which the incarnation has ended, if it has ended."""
        if self.error:
            raise self.error
