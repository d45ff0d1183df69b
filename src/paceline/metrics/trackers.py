"""The trackers: TensorBoard, MLflow, and Weights & Biases. Each loads its library when a run begins."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from paceline.metrics.job_scalars import ScalarRow

EXPERIMENT = "paceline"  # in MLflow
MAX_VALUE = 500  # letters of a parameter in MLflow


class TensorBoardTracker:
    """Writes event files, in a folder of its own for each run."""

    name = "TensorBoard"

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._parameters: dict[str, object] = {}

    def begin(self, run: str, parameters: dict[str, object]) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(_new_folder(self._folder, run)), flush_secs=5)
        self.describe(parameters)

    def describe(self, parameters: dict[str, object]) -> None:
        self._parameters |= parameters
        lines = "\n".join(f"| {key} | {_in_cell(value)} |" for key, value in self._parameters.items())
        self._writer.add_text("parameters", f"| parameter | value |\n|---|---|\n{lines}", 0)

    def write(self, row: ScalarRow) -> None:
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.version)

    def end(self, failed: bool) -> None:
        self._writer.close()


class MlflowTracker:
    """Writes a run of the experiment "paceline" to a tracking server, or to a database."""

    name = "MLflow"

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def begin(self, run: str, parameters: dict[str, object]) -> None:
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # otherwise a new database logs each step
        self._client = MlflowClient(tracking_uri=self._uri)
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
        self._run = self._client.create_run(experiment, run_name=run).info.run_id
        self.describe(parameters)

    def describe(self, parameters: dict[str, object]) -> None:
        """Log parameters. MLflow refuses to change one, so a parameter that is known already stays as it is."""
        from mlflow.entities import Param

        known = self._client.get_run(self._run).data.params
        new = [Param(key, str(value)[:MAX_VALUE]) for key, value in parameters.items() if key not in known]
        self._client.log_batch(self._run, params=new)

    def write(self, row: ScalarRow) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        metrics = [Metric(_mlflow_name(name), value, now, row.version) for name, value in row.values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


class WandbTracker:
    """Writes a run to Weights & Biases. The curves are drawn over the version of the model."""

    name = "Weights & Biases"

    def __init__(self, project: str) -> None:
        """project: its name, or ENTITY/PROJECT."""
        self._entity, _, self._project = project.rpartition("/")

    def begin(self, run: str, parameters: dict[str, object]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=self._project,
            entity=self._entity or None,
            name=run,
            config=parameters,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, init_timeout=60),
        )
        self._run.define_metric("*", step_metric="version")  # the version falls if a job goes back to a checkpoint

    def describe(self, parameters: dict[str, object]) -> None:
        self._run.config.update(parameters, allow_val_change=True)

    def write(self, row: ScalarRow) -> None:
        self._run.log({**row.values, "version": row.version, "seconds": row.seconds})

    def end(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _new_folder(folder: Path, run: str) -> Path:
    """Return a folder for a run that does not exist yet."""
    number, free = 1, folder / run
    while free.exists():
        number += 1
        free = folder / f"{run}-{number}"
    return free


def _in_cell(value: object) -> str:
    """Return a value as text for a cell of a Markdown table."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def _mlflow_name(name: str) -> str:
    """Return a metric's name with those letters alone that MLflow accepts."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name) or "_"
