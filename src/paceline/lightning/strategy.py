"""`Trainer(strategy="paceline")`: a Trainer of Lightning as a worker of a job.

The module's optimizer takes part in the job, and the training batches come from the job. Precision plugins,
accumulation, clipping, callbacks and loggers are Lightning's own. The main worker alone validates, tests and saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import paceline
from paceline.lightning import checks, main_worker
from paceline.lightning.loaders import Unsized, length_of
from paceline.lightning.package import RANK_ZERO_FUNCTIONS, SingleDeviceStrategy, StrategyRegistry
from paceline.train.job_epochs import JobEpochs, skipped_samples
from paceline.train.job_schedule import JobSchedule, quiet_steps
from paceline.train.processes import AGAIN, expected_rank, expected_world_size, will_join
from paceline.train.session import Session

NAME = "paceline"


class PacelineStrategy(SingleDeviceStrategy):
    """One process of a worker, on one device. Without a job it is Lightning's strategy for a single device."""

    strategy_name = NAME

    def __init__(self, validate: str = "main", **options: Any) -> None:
        """validate: "main": the main worker alone validates and tests; "all": every worker does."""
        checks.check_choice(validate)
        super().__init__(**options)
        #: This worker's part in the job, from the beginning of fit().
        self.session: Session | None = None
        #: The batches of the job, from the beginning of fit().
        self.epochs: JobEpochs | None = None
        self.num_nodes = 1  # the Trainer sets it, as it sets `parallel_devices`
        self._devices: list[torch.device] | None = None
        self._validates_in_all = validate == "all"
        self._in_job = will_join()
        self._is_counted = True  # does the current batch belong to this worker?
        self._planned_length = 0  # batches of an epoch
        self.global_rank, self.world_size = expected_rank(), expected_world_size()
        self._number_process()

    # The place of this process

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices that the Trainer has chosen. This process uses one of them."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._devices = devices
        if devices:
            self._root_device = checks.device_of(devices)

    @property
    def is_global_zero(self) -> bool:
        """Whether this process validates, saves and logs. In a job it is one process of the main worker."""
        return self.global_rank == 0

    def _number_process(self) -> None:
        if self._in_job:
            for function in RANK_ZERO_FUNCTIONS:
                function.rank = self.global_rank

    # Joining

    def setup(self, trainer: Any) -> None:
        if self._in_job:
            checks.check(trainer)
        super().setup(trainer)
        if self._in_job and not (self.is_global_zero or self._validates_in_all):
            main_worker.leave_to_it(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the module's optimizer, and join the job with it. Its step is that of the job from then on."""
        if self._in_job and self.session is not None:
            raise ValueError(AGAIN)
        super().setup_optimizers(trainer)
        checks.check_optimizers(self.optimizers, self._in_job)
        if not self.optimizers:
            return
        assert self.lightning_module is not None
        self.session = paceline.join(self.lightning_module, self.optimizers[0])
        if not self._in_job:
            return
        self.global_rank, self.world_size = self.session.rank, self.session.world_size
        self._number_process()
        trainer.fit_loop._combined_loader = None  # configure_optimizers may have asked for its length
        for config in self.lr_scheduler_configs:
            if config.reduce_on_plateau:
                checks.check_plateau(config, self._validates_in_all)
            elif config.interval == "step" and config.frequency == 1 and hasattr(config.scheduler, "last_epoch"):
                config.scheduler = JobSchedule(config.scheduler, self._steps_done)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the batches that the job assigns to this worker, in place of a loader for training."""
        module = self.lightning_module
        if not self._in_job or module is None or not module.trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader):
            raise ValueError(checks.NOT_A_LOADER.format(type(dataloader).__name__))
        if self.session is None:  # configure_optimizers asks for the number of steps
            return length_of(dataloader, self.world_size)
        if self.epochs is not None:
            raise ValueError(checks.LOADERS)
        self.epochs = self.session.epochs(dataloader, fetches_ahead=True)
        self._planned_length = len(self.epochs)
        self._plan(module.trainer)
        return Unsized(self.epochs)

    # Planning

    def _plan(self, trainer: Any) -> None:
        """Begin where the job is: at its start, or behind what the checkpoint's training has used."""
        assert self.epochs is not None and self.session is not None
        loop, size = trainer.fit_loop, self.epochs.size
        planned = None if loop.max_epochs in (None, -1) else loop.max_epochs
        if size is None:
            self.epochs.plan(planned)
            return
        epoch = loop.epoch_progress.current
        position = epoch.processed * size
        if epoch.ready != epoch.processed:  # the checkpoint was written in mid-epoch
            batches = loop.epoch_loop.batch_progress.current.completed
            position += min(size, batches * (self.epochs.batch_size or 1) * self.world_size)
        folder, session = Path(trainer.default_root_dir), self.session
        self.epochs.plan(planned, skipped_samples(folder, position, session.has_trained, session.is_main))

    def on_train_start(self) -> None:
        """Continue where the job is, if it had trained before this worker joined."""
        super().on_train_start()
        if self.epochs is None or self.session is None or self.lightning_module is None:
            return
        trainer = self.lightning_module.trainer
        loop = trainer.fit_loop
        if loop.max_batches == math.inf:
            loop.max_batches = self._planned_length
        loop._data_fetcher.prefetch_batches = 0  # `_look_ahead` fetches one at the right time
        iter(loop._data_fetcher)
        samples = self.epochs.peek_fetched()
        if samples is None:
            loop.max_epochs = loop.epoch_progress.current.processed
        elif self.session.has_trained:
            epoch = self.epochs.epoch_of(samples)
            progress = loop.epoch_progress.current
            skipped = epoch - progress.processed
            progress.ready = progress.started = progress.processed = progress.completed = epoch
            for config in self.lr_scheduler_configs:
                if isinstance(config.scheduler, JobSchedule):
                    config.scheduler.catch_up(self.epochs.steps_before(samples, *self._steps_of_epoch))
                elif config.interval == "epoch" and not config.reduce_on_plateau:
                    with quiet_steps():
                        for _ in range(skipped // config.frequency):
                            config.scheduler.step()

    @property
    def _steps_of_epoch(self) -> tuple[int, int]:
        assert self.lightning_module is not None
        accumulated = self.lightning_module.trainer.accumulate_grad_batches
        return math.ceil(self._planned_length / accumulated), accumulated

    def _steps_done(self) -> int | None:
        return self.epochs.steps_done(*self._steps_of_epoch) if self.epochs is not None else None

    # Training

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count the batch. If no step follows it, find out whether it is the last one of the epoch."""
        super().on_train_batch_start(batch, batch_idx)
        if self.epochs is None or self.lightning_module is None:
            return
        self._is_counted = self.epochs.use()
        trainer = self.lightning_module.trainer
        if self.lightning_module.automatic_optimization and (batch_idx + 1) % trainer.accumulate_grad_batches:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Tell the Trainer whether another batch of this epoch follows: this worker may get more or fewer than planned.

        This requests the next batch, so it comes after a step: all workers request their first batches first.
        """
        assert self.epochs is not None and self.lightning_module is not None
        if self.epochs.last is None:
            return
        trainer = self.lightning_module.trainer
        loop = trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        progress.is_last_batch = self.epochs.is_over
        if self.epochs.peek() is None:
            loop.max_epochs = loop.epoch_progress.current.processed + 1
        has_limit = isinstance(trainer.limit_train_batches, int)
        if not (progress.is_last_batch or has_limit) and progress.current.ready >= loop.max_batches:
            loop.max_batches = progress.current.ready + 1

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        result = super().training_step(*arguments, **options)
        if self.epochs is not None and not self.lightning_module.automatic_optimization:
            self._look_ahead()  # the module has made its steps
        return result

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any) -> Any:
        """Make a step, unless other workers train on its samples because this worker was given up meanwhile."""
        if self._is_counted:
            result = super().optimizer_step(optimizer, closure, model, **options)
        else:
            result = closure()
            optimizer.zero_grad()
        if self.epochs is not None and self.lightning_module.automatic_optimization:
            self._look_ahead()
        return result

    def on_train_end(self) -> None:
        """Wait for the other workers, and pull the final model. A main worker that stops early ends their training."""
        if self._in_job and self.session is not None and self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            if self.is_global_zero and trainer.should_stop and self.epochs is not None:
                self.epochs.end()
            self.session.finish()
        super().on_train_end()

    # Saving

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer's state in the process that saves it."""
        return super().optimizer_state(optimizer) if self.is_global_zero else {}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if self.session is None or not self.session.has_trained:  # else the job goes on with its own state
            super().load_optimizer_state_dict(checkpoint)


StrategyRegistry.register(NAME, PacelineStrategy, description="workers of a paceline job", override=True)
