"""A callback that lets a Trainer train for as long as the job has samples for it, and ends the job with it."""

from __future__ import annotations

import math
from typing import Any

from paceline.huggingface.library import TrainerCallback
from paceline.serve.worker.metrics import MAX_METRIC_NAME


class JobFlow(TrainerCallback):
    """Adjusts the Trainer's plan to the job: this worker may get more or fewer batches than its share."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the Trainer compares its steps with the last one: is this the last step?"""
        if args.max_steps > 0:
            return
        after = state.global_step + 1
        if self._trainer.epochs.peek() is None:
            self._trainer.set_step(self._trainer.planned_steps - 1)
            state.max_steps = self._trainer.planned_steps
        elif after >= state.max_steps:
            state.max_steps = after + 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_training_stop and state.global_step < state.max_steps:
            self._end()
        self._trainer.step_with_the_rest()
        if args.max_steps <= 0:
            self._trainer.align_with_epoch()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Report the metrics to the job, and end it if another callback has decided to stop."""
        session = self._trainer.session
        if session is not None and not session.optimizer.closed:
            session.log(**{name: value for name, value in (metrics or {}).items() if _is_metric(name, value)})
        if self._trainer.is_in_train and control.should_training_stop and state.global_step < state.max_steps:
            self._end()

    def _end(self) -> None:
        """End training in all workers, if this is the main one."""
        trainer = self._trainer
        if trainer.is_world_process_zero():
            trainer.epochs.end()


def _is_metric(name: str, value: Any) -> bool:
    """Return whether this is a metric of the model, and not a measurement of the evaluation itself."""
    if name == "epoch" or name.endswith(("_runtime", "_per_second", "_time")):
        return False
    is_name = name.isidentifier() and len(name) <= MAX_METRIC_NAME  # session.log refuses any other name
    return is_name and isinstance(value, int | float) and math.isfinite(value)
