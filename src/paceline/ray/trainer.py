"""`PacelineTrainer`: a job on Ray, in the conventions of Ray Train."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pandas
import pyarrow.fs
import ray
from ray.train import Checkpoint, Result, RunConfig, ScalingConfig

from paceline.ray import checks
from paceline.ray.controller import Controller, JobTask
from paceline.ray.dataset import BlockDataset
from paceline.ray.placement import Placement, Plan
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.job_options import JobOptions
from paceline.serve.restarts import RestartLimit

MADE_NAME = "ray_train_run-"  # the first part of the names that RunConfig gives to runs without a name
CHECKPOINTS = "paceline"  # the folder of the server's own checkpoints, within the folder of a run
TRACE = "trace.jsonl"
LAST = "checkpoint_last"  # the folder of the checkpoint that `fit` returns


class PacelineTrainer:
    """Trains a function on several Ray workers under a synchronization policy."""

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        policy: str = "r2sp",
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        servers: int = 1,
        colocate: bool = False,
        apply: str = "whole",
        lease: float = 30.0,
        checkpoint_every: float = 60.0,
        resources_per_server: Mapping[str, float] | None = None,
        insecure: bool = False,
        fork: bool = False,
        trace: bool = False,
    ) -> None:
        """train_loop_per_worker: calls `paceline.join` as under `paceline run`. It takes the config, or no argument.

        servers: the number of shards, spread over the nodes. colocate: one shard beside each worker instead.
        lease: seconds without a sign of life after which a worker is given up.
        checkpoint_every: seconds between two checkpoints of the server. resources_per_server: of the coordinator and of
            each shard; 64 MB of memory and no core by default.
        insecure: let the job's traffic cross the network without TLS.
        fork: fork the actors of a node from one process that has imported torch. They start sooner, and share memory.
            All nodes need Python and paceline at the same paths as here.
        trace: write the events of the job to trace.jsonl, as `paceline run --trace` does.

        Raise ValueError with a sentence if something cannot work on any cluster.
        """
        self._function, self._config = train_loop_per_worker, train_loop_config
        self._scaling, self._run = scaling_config or ScalingConfig(), run_config or RunConfig()
        # The names that Ray makes are times, and several trials may begin within one second.
        is_made = self._run.name.startswith(MADE_NAME)
        self._name = f"{self._run.name}-{secrets.token_hex(3)}" if is_made else self._run.name
        self._datasets, self._insecure = dict(datasets or {}), insecure
        self._trace = trace
        workers = self._scaling.min_workers
        checks.check_scaling(self._scaling, servers, colocate)
        checks.check_policy(policy, workers, apply)
        checks.check_run(self._run, fork)
        if not 0 < checkpoint_every < float("inf"):
            raise ValueError(f"checkpoint_every must be a number of seconds above 0, not {checkpoint_every}.")
        self._every = checkpoint_every
        self.controller: Controller | None = None  # of the last call of `fit`
        self._plan = Plan(
            shards=workers if colocate else servers,
            workers=workers,
            most_workers=self._scaling.max_workers,
            per_worker=dict(self._scaling._resources_per_worker_not_none),
            strategy=self._scaling.placement_strategy,
            colocate=colocate,
            server=resources_per_server,
            fork=fork,
        )
        self._options = JobOptions(
            policy=policy,
            shards=self._plan.shards,
            workers=workers,
            streamed=apply == "streamed",
            colocate=colocate,
            lease=lease,
            restarts=RestartLimit(1 << 30),  # the controller counts what is lost
        )

    def fit(self) -> Result:
        """Train to the end, and return the metrics and the last checkpoint, whose model.pt plain PyTorch loads.

        A run of the same storage_path and name that was interrupted is continued from its last checkpoint.
        Raise JobFailed, a TrainingFailedError of Ray Train, if the job fails, and ValueError if the cluster is too
        small or the storage cannot be written to.
        """
        if not ray.is_initialized():
            ray.init()
        checks.check_resources(
            self._plan.workers, self._plan.per_worker, [self._plan.per_server] * (1 + self._plan.shards)
        )
        folder = checks.job_folder(self._run.storage_path, self._name)
        saving = CheckpointPlan(folder / CHECKPOINTS, seconds=self._every)
        options = msgspec.structs.replace(self._options, saving=saving)
        task = JobTask(
            options,
            self._function,
            self._config,
            {name: BlockDataset.of(data) for name, data in self._datasets.items()},
            target=folder / LAST,
            insecure=self._insecure,
            trace=str(folder / TRACE) if self._trace else "",
            runtime_env=dict(self._run.worker_runtime_env or {}),
        )
        placement = Placement(self._plan)
        controller = self.controller = Controller(
            task, placement, self._plan, self._run.failure_config, self._run.callbacks or []
        )
        try:
            placement.wait()
            controller.run()
        finally:
            controller.stop()
            placement.remove()
        return _result(folder, controller)


def _result(folder: Path, controller: Controller) -> Result:
    files = pyarrow.fs.LocalFileSystem()
    last = Checkpoint(str(folder / LAST), files)
    metrics = controller.metrics
    return Result(
        metrics=metrics,
        checkpoint=last,
        error=None,
        path=str(folder),
        metrics_dataframe=pandas.DataFrame(controller.rows) if controller.rows else None,
        best_checkpoints=[(last, metrics)],
        return_value=controller.returned.get(0),
        _storage_filesystem=files,
    )
