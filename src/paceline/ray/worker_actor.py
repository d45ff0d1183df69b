"""A worker of a job as a Ray actor: the process in which the user's training function runs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from paceline.ray import dataset
from paceline.ray.dataset import BlockDataset
from paceline.serve.worker import uncaught


class LoopRefused(RuntimeError):
    """A worker ended with an error of paceline. The message says what to do.

    is_lasting: whether a new attempt would fail in the same way.
    """

    def __init__(self, message: str, is_lasting: bool) -> None:
        super().__init__(message, is_lasting)
        self.is_lasting = is_lasting

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerActor:
    """Runs the training function once."""

    def run(
        self,
        function: Callable[..., Any],
        config: Mapping[str, Any] | None,
        variables: Mapping[str, str],
        datasets: Mapping[str, BlockDataset],
    ) -> Any:
        """Run the function, and return what it returns. variables: of the environment, by which `paceline.join` joins.

        Raise LoopRefused if the function ends with an error of paceline, and the function's own error otherwise.
        """
        os.environ.update(variables)
        dataset.provide(datasets)
        try:
            return function(config or {}) if inspect.signature(function).parameters else function()
        except Exception as error:
            if text := uncaught.sentence(error):
                raise LoopRefused(text, isinstance(error, ValueError)) from None
            raise
