"""The errors of a job on Ray, as sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.exceptions import RayTaskError

from paceline.ray.worker_actor import LoopRefused

if TYPE_CHECKING:

    class TrainingFailedError(Exception):
        """The error of Ray Train, which has no types."""
else:
    from ray.train import TrainingFailedError


class JobFailed(TrainingFailedError):
    """A job that failed. The message says what to do. Code that catches Ray Train's own error catches it too."""


def cause_of(error: BaseException) -> BaseException:
    """Return the error that was raised inside an actor, without Ray's wrapping."""
    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, BaseException) else error
    return error


def described(error: BaseException) -> str:
    """Return an error in one line: its type, and its message without Ray's traceback."""
    cause = cause_of(error)
    lines = str(cause).strip().splitlines()
    text = " ".join((lines[-1] if "Traceback" in str(cause) else str(cause)).split())
    return text if isinstance(cause, LoopRefused) else f"{type(cause).__name__}: {text}" if text else repr(cause)
