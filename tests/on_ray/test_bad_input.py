"""What `PacelineTrainer` cannot do is refused at once, in one sentence."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")

from ray.train import CheckpointConfig, RunConfig, ScalingConfig

from on_ray import loops
from paceline.ray import PacelineTrainer, get_dataset_shard

CLUSTER_CPUS = 2


def trainer(folder: Path | str, workers: Any = 2, run: dict[str, Any] | None = None, **options: Any) -> PacelineTrainer:
    scaling = options.pop("scaling", None) or ScalingConfig(num_workers=workers)
    run_config = RunConfig(storage_path=str(folder), **(run or {}))
    return PacelineTrainer(loops.never_join, scaling_config=scaling, run_config=run_config, **options)


def refusal(make: Any) -> str:
    """Return the message with which something is refused within a few seconds. It is one line."""
    began = time.monotonic()
    with pytest.raises(ValueError) as caught:
        make()
    assert time.monotonic() - began < 5.0
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    return text


def test_more_workers_than_cpus(cluster: None, tmp_path: Path) -> None:
    text = refusal(lambda: trainer(tmp_path, workers=5).fit())
    assert "short of 3 CPUs: 5 workers need 5 CPUs, and it has 2 CPUs" in text


def test_more_workers_than_gpus(cluster: None, tmp_path: Path) -> None:
    text = refusal(lambda: trainer(tmp_path, scaling=ScalingConfig(num_workers=2, use_gpu=True)).fit())
    assert "short of 2 GPUs" in text


def test_a_worker_that_no_node_can_hold(cluster: None, tmp_path: Path) -> None:
    scaling = ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1, "memory": 1e15})
    assert "short of" in refusal(lambda: trainer(tmp_path, scaling=scaling).fit())


def test_a_storage_path_that_cannot_be_written(cluster: None, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert "cannot be written to" in refusal(lambda: trainer(blocked).fit())
    assert "cannot be written to" in refusal(lambda: trainer("/proc/paceline").fit())


def test_storage_that_is_no_folder(tmp_path: Path) -> None:
    assert "must be a folder that all nodes share" in refusal(lambda: trainer("s3://bucket/runs"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": "r3sp"}, "r3sp"),
        ({"policy": "ssp:stale=3"}, "ssp has no option 'stale'"),
        ({"policy": "bsp:backup=5"}, "needs at least"),
        ({"apply": "sometimes"}, "apply must be 'whole' or 'streamed'"),
        ({"servers": 0}, "at least 1 server"),
        ({"workers": 0}, "at least 1 worker"),
        ({"workers": (2, 4), "colocate": True}, "each worker has a shard"),
        ({"fork": True, "run": {"worker_runtime_env": {"pip": ["x"]}}}, "leave fork=True or 'pip' out"),
        ({"checkpoint_every": 0.0}, "checkpoint_every must be"),
        ({"run": {"checkpoint_config": CheckpointConfig(checkpoint_score_attribute="x")}}, "not the best"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(lambda: trainer(tmp_path, **options))


def test_a_dataset_that_was_not_given() -> None:
    assert "There is no dataset 'train'" in refusal(lambda: get_dataset_shard("train"))
