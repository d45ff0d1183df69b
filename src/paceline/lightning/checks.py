"""Refuse mistakes of a Trainer of Lightning in a job, each with one sentence that says what to do."""

from __future__ import annotations

from typing import Any

import torch

from paceline.train.processes import check_one_rank

DEVICES = (
    "Trainer(devices={}) asks for {} devices, and each process of a job has one: write devices=1, and start a worker "
    "for each device: `paceline run --workers {}`."
)
NODES = "Trainer(num_nodes={}) is for Lightning's own launcher: leave it out, and start the job with `paceline run`."
OPTIMIZERS = (
    "configure_optimizers returns {} optimizers, and a job has one: put the parameters into groups of one optimizer, "
    "if one step for all of them will do."
)
LOADERS = (
    "The batches of a job come from one loader: leave out reload_dataloaders_every_n_epochs, and return a single "
    "DataLoader from train_dataloader."
)
NOT_A_LOADER = "train_dataloader must return a DataLoader; got {}, whose samples the job cannot assign."
PLATEAU = (
    "ReduceLROnPlateau needs its metric in every worker: "
    "Trainer(strategy=paceline.lightning.PacelineStrategy(validate='all'))."
)


def check_choice(validate: str) -> None:
    """Raise ValueError if nobody knows such workers."""
    if validate not in ("main", "all"):
        raise ValueError(f"validate is 'main' or 'all', the workers that validate; got {validate!r:.40}.")


def device_of(devices: list[torch.device]) -> torch.device:
    """Return this process's device. Raise ValueError if there are several."""
    if len(devices) > 1:
        raise ValueError(DEVICES.format(len(devices), len(devices), len(devices)))
    return devices[0]


def check(trainer: Any) -> None:
    """Raise ValueError if this Trainer cannot take part in a job."""
    check_one_rank()
    if trainer.num_nodes > 1:
        raise ValueError(NODES.format(trainer.num_nodes))
    if trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(LOADERS)


def check_optimizers(optimizers: list[Any], in_job: bool) -> None:
    """Raise ValueError if there is more than one optimizer in a job."""
    if in_job and len(optimizers) > 1:
        raise ValueError(OPTIMIZERS.format(len(optimizers)))


def check_plateau(config: Any, validates_in_all: bool) -> None:
    """Raise ValueError if a schedule depends on a metric that this worker does not compute."""
    if not validates_in_all and not str(config.monitor).startswith("train"):
        raise ValueError(PLATEAU)
