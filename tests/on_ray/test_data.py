"""Ray Data and Ray Tune with `PacelineTrainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")

import numpy as np
import torch
from ray import tune
from ray.train import RunConfig, ScalingConfig

from on_ray import loops
from paceline.ray import PacelineTrainer
from paceline.ray.dataset import BlockDataset

pytestmark = pytest.mark.usefixtures("cluster")


def test_rows_of_a_ray_dataset_have_numbers() -> None:
    values = np.arange(10)
    data = ray.data.from_numpy([values[:3], values[3:7], values[7:]]).rename_columns(["number"])
    rows = BlockDataset.of(data)
    assert len(rows) == 10
    assert [int(row["number"]) for row in rows.__getitems__(range(10))] == list(range(10))
    with pytest.raises(IndexError):
        rows[10]


def test_each_row_of_a_ray_dataset_counts_once_an_epoch(tmp_path: Path) -> None:
    rows = 60
    result = PacelineTrainer(
        loops.count_rows,
        train_loop_config={"rows": rows, "epochs": 3},
        policy=loops.POLICY,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
        fork=True,
        datasets={"train": ray.data.range(rows, override_num_blocks=4)},
    ).fit()
    counts = torch.load(Path(result.checkpoint.path) / "model.pt")["counts"]
    assert counts.tolist() == [3.0] * rows


@pytest.mark.slow
def test_four_trials_over_policies_and_rates(tmp_path: Path) -> None:
    def trial(config: dict[str, Any]) -> None:
        result = PacelineTrainer(
            loops.classify,
            train_loop_config={"lr": config["lr"], "epochs": 3},
            policy=config["policy"],
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path / "jobs")),
            fork=True,
        ).fit()
        tune.report(result.metrics, checkpoint=result.checkpoint)

    space = {"policy": tune.grid_search(["bsp", "r2sp"]), "lr": tune.grid_search([1e-5, 0.1])}
    grid = tune.Tuner(
        tune.with_resources(trial, {"memory": 1 << 26}),
        param_space=space,
        run_config=tune.RunConfig(storage_path=str(tmp_path / "trials"), verbose=0),
    ).fit()
    assert [each.error for each in grid] == [None] * 4
    best = grid.get_best_result("accuracy", "max")
    assert best.config["lr"] == 0.1
    model = loops.classifier()
    with best.checkpoint.as_directory() as folder:
        model.load_state_dict(torch.load(Path(folder) / "model.pt"))
    assert loops.accuracy(model) == pytest.approx(best.metrics["accuracy"], abs=0.01)
