"""Learning-rate schedules that follow the job."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class JobSchedule:
    """A scheduler of torch that is stepped after each batch, and that keeps the pace of the job.

    A worker that takes over the samples of a lost one makes more steps than were planned, and one that returns makes
    fewer. The learning rate depends on how far the job is, and not on the steps of this worker. Other attributes are
    those of the scheduler.
    """

    def __init__(self, scheduler: Any, steps: Callable[[], int | None]) -> None:
        """steps: returns how many steps the job has made at the end of this one, or None if it is not known."""
        self.scheduler, self._steps = scheduler, steps

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet, for example while the object is being copied
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *arguments: Any) -> None:
        """Step the scheduler until it is where the job is."""
        steps = self._steps()
        if steps is None or arguments:
            self.scheduler.step(*arguments)
        else:
            self.catch_up(steps)

    def catch_up(self, steps: int) -> None:
        """Step the scheduler until it has made this number of steps."""
        with quiet_steps():
            while self.scheduler.last_epoch < steps:
                self.scheduler.step()


@contextmanager
def quiet_steps() -> Iterator[None]:
    """Let schedulers step without torch's warning that no step of the optimizer precedes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        yield
