"""Leave validating, testing and saving to the main worker."""

from __future__ import annotations

import warnings
from typing import Any

from paceline.lightning.package import Checkpoint, EarlyStopping


def leave_to_it(trainer: Any) -> None:
    """Let this Trainer train only. Its validate() and test() return an empty list at once.

    EarlyStopping and ModelCheckpoint are removed, because they read metrics of the validation.
    """
    trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, (EarlyStopping, Checkpoint))]
    trainer.validate = trainer.test = _nothing


def _nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def step_quietly(scheduler: Any, steps: int) -> None:
    """Step a scheduler this often, without torch's warning that no step of the optimizer precedes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(steps):
            scheduler.step()
