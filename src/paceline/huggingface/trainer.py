"""`PacedTrainer`: the Trainer of transformers as a worker of a job.

The Trainer's optimizer takes part in the job, and its batches come from the job. Schedules, accumulation, clipping,
mixed precision and callbacks are the Trainer's own. The main worker alone evaluates and saves.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

import paceline
from paceline.huggingface import checks
from paceline.huggingface.flow import JobFlow
from paceline.huggingface.library import METRIC_SCHEDULES, Trainer
from paceline.train.job_epochs import JobEpochs, skipped_samples
from paceline.train.job_schedule import JobSchedule
from paceline.train.processes import AGAIN, expected_rank, will_join
from paceline.train.session import Session
from paceline.train.stream import settings


class MetricsElsewhere(dict[str, float]):
    """The metrics of an evaluation that the main worker makes. In the other workers each of them is NaN."""

    def __missing__(self, name: str) -> float:
        return math.nan


class PacedTrainer(Trainer):
    """A Trainer that takes part in a job. Under plain `python` it is a Trainer.

    It also works as a mixin of another Trainer: `class PacedSFTTrainer(PacedTrainer, SFTTrainer): pass`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        #: This worker's part in the job, from the beginning of train().
        self.session: Session | None = None
        self._globalstep_last_logged = 0
        #: The batches of the job, from the beginning of train().
        self.epochs: JobEpochs | None = None
        self._in_job = will_join()
        super().__init__(*arguments, **options)
        if self._in_job:
            checks.check(self)
            self.add_callback(JobFlow(self))

    # The place of this process

    def is_world_process_zero(self) -> bool:
        """Return whether this process evaluates, saves and logs. In a job it is one process of the main worker."""
        if not self._in_job:
            return super().is_world_process_zero()
        return self.session.is_main if self.session else expected_rank() == 0

    def is_local_process_zero(self) -> bool:
        """Return whether this process shows its progress: the main one alone."""
        return self.is_world_process_zero() if self._in_job else super().is_local_process_zero()

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples in a step of all workers."""
        processes = self.session.optimizer.world_size if self._in_job and self.session else 1
        return processes * super().get_total_train_batch_size(args)

    # Joining

    def train(self, *arguments: Any, **options: Any) -> Any:
        if self._in_job and self.session:
            raise ValueError(AGAIN)
        return super().train(*arguments, **options)

    def hyperparameter_search(self, *arguments: Any, **options: Any) -> Any:
        if self._in_job:
            raise ValueError(checks.SEARCH)
        return super().hyperparameter_search(*arguments, **options)

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the Trainer's optimizer, and join the job with it. Its step is that of the job from then on."""
        optimizer = super().create_optimizer(model)
        if self.session is None:
            self.session = paceline.join(self.model, optimizer)
        return optimizer

    def get_train_dataloader(self) -> Any:
        """Return the batches that the job assigns to this worker."""
        loader = super().get_train_dataloader()
        if not self._in_job:
            return loader
        self.create_optimizer()
        assert self.session is not None
        self.epochs = self.session.epochs(_plain(loader), self._data_seed())
        return self.epochs

    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    # Planning

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        values = super().set_initial_training_values(args, dataloader)
        if self.epochs is not None:
            whole_epochs, self._steps_per_epoch, self.planned_steps = values[0], values[1], values[-1]
            self.epochs.plan(whole_epochs if args.max_steps > 0 else args.num_train_epochs)
        return values

    def _init_training_state(self, max_steps: int, steps: int, epochs: int, resumed: str | None, trial: Any) -> Any:
        """Begin where the job is: at its start, at that of the checkpoint, or in the midst of it."""
        begun, batches = super()._init_training_state(max_steps, steps, epochs, resumed, trial)
        if self.epochs is None or self.session is None:
            return begun, batches
        size = self.epochs.size
        if size is not None:
            unit = self.args.train_batch_size * self.session.optimizer.world_size
            position = begun * size + min(size, batches * unit)
            skipped = skipped_samples(
                Path(self.args.output_dir), position, self.session.has_trained, self.session.is_main
            )
            self.epochs.plan(epochs if self.args.max_steps > 0 else self.args.num_train_epochs, skipped)
            if self.session.has_trained:
                begun = self._join_in_the_midst(self.epochs, max_steps, epochs)
        return begun, 0

    def _join_in_the_midst(self, loader: JobEpochs, max_steps: int, epochs: int) -> int:
        """Take the job's place as this worker's own. Return the epoch that the job is in."""
        samples = loader.peek()
        if samples is None:
            self.state.global_step = max_steps
            return epochs
        accumulated = self.args.gradient_accumulation_steps
        self.state.global_step = loader.steps_before(samples, self._steps_per_epoch, accumulated)
        return loader.epoch_of(samples)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.session is None or not self.session.has_trained:  # else the job goes on with its own state
            super()._load_optimizer_and_scheduler(checkpoint)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the Trainer's schedule. It follows the job, and not the steps of this worker."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        follows = self.epochs is not None and not isinstance(scheduler, (*METRIC_SCHEDULES, JobSchedule))
        if follows and hasattr(scheduler, "last_epoch"):
            self.lr_scheduler = scheduler = JobSchedule(scheduler, self._steps_done)
        return scheduler

    def _steps_done(self) -> int | None:
        if self.epochs is None:
            return None
        return self.epochs.steps_done(self._steps_per_epoch, self.args.gradient_accumulation_steps)

    def _prepare_for_training(self, *arguments: Any, **options: Any) -> Any:
        prepared = super()._prepare_for_training(*arguments, **options)
        if isinstance(self.lr_scheduler, JobSchedule):
            self.lr_scheduler.catch_up(self.state.global_step)
        return prepared

    # Training

    def _run_epoch(self, **options: Any) -> None:
        """Train this worker's part of an epoch. It may be larger or smaller than that of the others, or empty."""
        if self.epochs is not None:
            samples = self.epochs.peek()
            if samples is None:
                self.control.should_training_stop = True
                return
            if self.epochs.epoch_of(samples) > options["epoch"]:
                return  # other workers have trained it
            options["num_update_steps_per_epoch"] = sys.maxsize
        super()._run_epoch(**options)

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        found = super().get_batch_samples(*arguments, **options)
        if self.epochs is not None and not found[0]:
            self.control.should_epoch_stop = True
        return found

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **options)
        if self.epochs is not None and self.session is not None:
            optimizer = self.session.optimizer
            optimizer.loss = loss if optimizer.loss is None else optimizer.loss + loss
        return loss

    def step_with_the_rest(self) -> None:
        """Make a step with the gradients that were accumulated at the end of an epoch: fewer than usual."""
        if self.session is None or not self.session.optimizer.pending:
            return
        if self.args.max_grad_norm > 0:
            self._clip_grad_norm(self.model)
        self.accelerator.gradient_state._set_sync_gradients(True)
        self.optimizer.step()
        if isinstance(self.lr_scheduler, JobSchedule):
            self.lr_scheduler.step()
        self.model.zero_grad()
        self.state.global_step += 1

    def align_with_epoch(self) -> None:
        """At the end of an epoch, count the steps that were planned up to here, and not those of this worker.

        So checkpoints have the same names in each run, and resuming from one begins with the next epoch.
        """
        if self.epochs is not None and self.epochs.last is not None and self.epochs.is_over:
            epochs = min(self.epochs.epoch + 1, self.args.num_train_epochs)
            self.set_step(min(self.planned_steps, math.ceil(epochs * self._steps_per_epoch)))
            self.state.epoch = epochs

    def set_step(self, step: int) -> None:
        """Continue to count from this step."""
        self.state.global_step = step
        self._globalstep_last_logged = min(self._globalstep_last_logged, max(0, step - 1))

    def _finalize_training(self, *arguments: Any, **options: Any) -> Any:
        """Wait for the other workers, and pull the final model, before the Trainer loads the best one."""
        if self._in_job and self.session is not None:
            self.session.finish()
        return super()._finalize_training(*arguments, **options)

    # Evaluating and saving

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Evaluate in the main worker. In the others, return NaN for each metric.

        While a schedule depends on the metric (reduce_lr_on_plateau), every worker evaluates.
        """
        follows_metric = self.is_in_train and isinstance(self.lr_scheduler, METRIC_SCHEDULES)
        if self._in_job and not self.is_world_process_zero() and not follows_metric:
            return MetricsElsewhere()
        return super().evaluate(*arguments, **options)

    def save_model(self, *arguments: Any, **options: Any) -> None:
        """Save the model in the main worker."""
        if not self._in_job or self.is_world_process_zero():
            super().save_model(*arguments, **options)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        if not self._in_job or self.is_world_process_zero():
            super()._save_checkpoint(*arguments, **options)


def _plain(loader: Any) -> DataLoader[Any]:
    """Return the DataLoader that Accelerate has prepared, as it was before."""
    own = settings(loader)
    if isinstance(loader.dataset, IterableDataset):
        return DataLoader(loader.dataset, loader.batch_size, drop_last=loader.drop_last, **own)
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return DataLoader(loader.dataset, batch_sampler=batches, **own)
    shuffles = isinstance(batches.sampler, RandomSampler) and not batches.sampler.replacement
    sampler = RandomSampler(loader.dataset) if shuffles else batches.sampler
    return DataLoader(loader.dataset, batches.batch_size, sampler=sampler, drop_last=batches.drop_last, **own)
