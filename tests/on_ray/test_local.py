"""Jobs on a Ray cluster of one node: results, and workers, shards and coordinators that are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed; `make test-ray` installs it")

import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError

from on_ray import loops
from on_ray.jobs import CountingJob
from paceline.ray import JobFailed, PacelineTrainer

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.parametrize("policy", [pytest.param("bsp", marks=pytest.mark.slow), "r2sp"])
def test_a_job_has_metrics_and_a_checkpoint_for_plain_pytorch(policy: str, tmp_path: Path) -> None:
    result = PacelineTrainer(
        loops.classify,
        train_loop_config={"lr": 0.1, "epochs": 8},
        policy=policy,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path), name="digits"),
    ).fit()
    assert result.metrics["accuracy"] > 0.85
    assert result.metrics["version"] > 0
    assert list(result.metrics_dataframe["accuracy"]) == [result.metrics["accuracy"]]
    assert result.path == str(tmp_path / "digits")
    assert isinstance(result.checkpoint, Checkpoint)
    model = loops.classifier()
    with result.checkpoint.as_directory() as folder:
        model.load_state_dict(torch.load(Path(folder) / "model.pt"))
    assert loops.accuracy(model) == pytest.approx(result.metrics["accuracy"], abs=0.01)


def test_a_killed_worker_is_replaced_alone(tmp_path: Path) -> None:
    job = CountingJob(tmp_path)
    job.start()
    job.until_saved(workers=3)
    os.kill(job.processes(1)[0], signal.SIGKILL)
    job.until_back(1)
    result = job.end()
    assert len(job.processes(1)) == 2  # it was started again
    assert [len(job.processes(number)) for number in (0, 2)] == [1, 1]  # the others went on
    assert result.metrics["lost"] == 1


@pytest.mark.slow
def test_workers_are_not_replaced_more_often_than_the_failure_config_allows(tmp_path: Path) -> None:
    job = CountingJob(tmp_path, failures=FailureConfig(max_failures=0))
    job.start()
    job.until_saved(workers=3)
    os.kill(job.processes(1)[0], signal.SIGKILL)
    with pytest.raises(TrainingFailedError, match=r"Worker 1 was lost.*FailureConfig\(max_failures=…\), more than 0"):
        job.end()


@pytest.mark.slow
def test_a_killed_shard_goes_back_to_the_last_checkpoint(tmp_path: Path) -> None:
    job = CountingJob(tmp_path, servers=2)
    job.start()
    job.until_saved(workers=3)
    ray.kill(job.controller.shard_actors[1])
    job.end()
    assert [len(job.processes(number)) for number in range(3)] == [1, 1, 1]  # workers reconnect by themselves


@pytest.mark.slow
def test_a_killed_coordinator_is_resumed_from_the_last_checkpoint(tmp_path: Path) -> None:
    job = CountingJob(tmp_path)
    job.start()
    job.until_saved(workers=3)
    ray.kill(job.controller.coordinator_actor)
    for number in range(3):
        job.until_back(number)  # before the others have trained the rest
    job.end()
    assert [len(job.processes(number)) for number in range(3)] == [2, 2, 2]


@pytest.mark.slow
def test_a_run_of_the_same_name_is_continued(tmp_path: Path) -> None:
    first = CountingJob(tmp_path, failures=FailureConfig(max_failures=0))
    first.start()
    first.until_saved(workers=3)
    os.kill(first.processes(0)[0], signal.SIGKILL)
    with pytest.raises(JobFailed):
        first.end()
    saved = first.saved()
    (tmp_path / "notes").rename(tmp_path / "earlier")
    second = CountingJob(tmp_path)
    second.start()
    second.end()
    batches = second.epochs * -(-len(loops.numbered_digits()) // second.batch)
    assert sum(second.steps().values()) <= batches - saved  # the rest


@pytest.mark.slow
def test_shards_beside_workers(tmp_path: Path) -> None:
    job = CountingJob(tmp_path, colocate=True)
    job.start()
    job.until_saved(workers=3)
    os.kill(job.processes(2)[0], signal.SIGKILL)
    job.until_back(2)
    assert len(job.controller.shard_actors) == 3
    job.end()


@pytest.mark.slow
def test_an_error_before_the_first_update_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"Worker \d failed: RuntimeError: the data is missing"):
        _trainer(loops.fail_first, tmp_path).fit()


@pytest.mark.slow
def test_a_function_that_never_joins_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"never called paceline\.join"):
        _trainer(loops.never_join, tmp_path).fit()


@pytest.mark.slow
def test_a_session_that_is_left_open_ends_with_its_worker(tmp_path: Path) -> None:
    result = _trainer(loops.never_close, tmp_path, {"samples": 40}).fit()
    assert result.metrics["updates"] == 10
    assert result.metrics["lost"] == 0


def _trainer(function: Any, folder: Path, config: dict[str, Any] | None = None) -> PacelineTrainer:
    return PacelineTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=3)),
        fork=True,
    )
