"""Run a job on a Ray cluster: `PacelineTrainer`, in the conventions of Ray Train.

The coordinator, the shards and the workers are Ray actors. Weights and gradients cross paceline's own sockets, never
Ray's object store. This package needs the extra: pip install 'paceline[ray]'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline import extras

if TYPE_CHECKING:
    from paceline.ray.dataset import get_dataset_shard
    from paceline.ray.failures import JobFailed
    from paceline.ray.trainer import PacelineTrainer

__all__ = ["JobFailed", "PacelineTrainer", "get_dataset_shard"]

extras.RAY.check()


def __getattr__(name: str) -> Any:
    """The trainer needs Ray Train, and the actors do not: it is imported when it is asked for, since there are many."""
    if name == "PacelineTrainer":
        from paceline.ray import trainer

        return trainer.PacelineTrainer
    if name == "JobFailed":
        from paceline.ray import failures

        return failures.JobFailed
    if name == "get_dataset_shard":
        from paceline.ray import dataset

        return dataset.get_dataset_shard
    raise AttributeError(f"module 'paceline.ray' has no attribute {name!r}")
