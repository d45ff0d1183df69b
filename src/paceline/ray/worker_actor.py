"""A worker of a job as a Ray actor: the process in which the user's training function runs."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.ray import dataset
from paceline.ray.coordinator_actor import CoordinatorAddress
from paceline.ray.dataset import BlockDataset
from paceline.serve.environment import CONNECT
from paceline.serve.worker import departure, uncaught


class LoopRefused(RuntimeError):
    """A worker ended with an error of paceline. The message says what to do.

    is_lasting: whether a new attempt would fail in the same way.
    """

    def __init__(self, message: str, is_lasting: bool) -> None:
        super().__init__(message, is_lasting)
        self.is_lasting = is_lasting

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class HasLeft:
    """The result of a function whose worker was asked to leave, and has left the job after its push."""


class WorkerActor:
    """Runs the training function once. It has two threads: one runs the function, and the other takes notices."""

    def leave(self) -> None:
        """Let the worker leave the job after its push, because its node will be taken away."""
        departure.ask_to_leave("The node is drained")

    def run(
        self,
        function: Callable[..., Any],
        config: Mapping[str, Any] | None,
        coordinator: CoordinatorAddress,
        variables: Mapping[str, str],
        datasets: Mapping[str, BlockDataset],
    ) -> Any:
        """Run the function, and return what it returns, or HasLeft.

        variables: with the coordinator's address, those of the environment by which `paceline.join` joins the job.
        Raise LoopRefused if the function ends with an error of paceline, and the function's own error otherwise.
        """
        os.environ.update({CONNECT: f"{coordinator.host}:{coordinator.port}", **coordinator.tls, **variables})
        _limit_threads()
        dataset.provide(datasets)
        try:
            return function(config or {}) if inspect.signature(function).parameters else function()
        except departure.Departed:
            return HasLeft()
        except Exception as error:
            if text := uncaught.sentence(error):
                raise LoopRefused(text, isinstance(error, ValueError)) from None
            raise


def _limit_threads() -> None:
    """Let torch use as many threads as Ray allows. A forked process has imported torch before Ray set the variable."""
    threads, torch = os.environ.get("OMP_NUM_THREADS", ""), sys.modules.get("torch")
    if torch and threads.isdecimal():
        torch.set_num_threads(int(threads))
