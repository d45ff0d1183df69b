"""The classes of transformers that are used, after a check that a tested version is installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from paceline import extras

extras.TRANSFORMERS.check()

_transformers = import_module("transformers")

Trainer: Any = _transformers.Trainer
TrainerCallback: Any = _transformers.TrainerCallback
#: Schedules that depend on a metric of the evaluation.
METRIC_SCHEDULES: tuple[Any, ...] = (
    import_module("torch.optim.lr_scheduler").ReduceLROnPlateau,
    import_module("transformers.optimization").GreedyLR,
)
