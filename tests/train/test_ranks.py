"""Several processes as one worker train like one process on all their samples."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.observe.trace import Arrived, Measured
from paceline.train.backend import AssignedSamples
from paceline.train.ranks import RankedBackend, _part, from_environment
from train import ranked
from train.generations import served
from train.jobs import job

HERE = Path(__file__)


@pytest.mark.parametrize("count", range(1, 12))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_split_their_samples_and_none_is_left_without(count: int, ranks: int) -> None:
    whole = AssignedSamples(1, 1, 0, 20, 20 + count, count)
    parts = [_part(whole, rank, ranks) for rank in range(ranks)]
    assert all(part is not None and part.stop > part.start for part in parts)
    counted = [position for part in parts if part and part.size for position in range(part.start, part.stop)]
    assert counted == list(range(20, 20 + count))
    sizes = [part.size for part in parts if part]
    assert max(sizes) - min(sizes) <= 1
    assert _part(AssignedSamples(1, 1, 0, 0, 0, 0), 0, ranks) is None


def test_wrong_environment_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment() == (0, 1)
    for rank, ranks in (("2", "2"), ("-1", "2"), ("x", "2"), ("0", "0")):
        monkeypatch.setenv("PACELINE_RANK", rank)
        monkeypatch.setenv("PACELINE_RANKS", ranks)
        with pytest.raises(ValueError, match="PACELINE_RANK must be at least 0 and below PACELINE_RANKS"):
            from_environment()


def run(
    server: str, folder: Path, case: str, ranks: int = 2, reduce: str = "", worker: int = 0
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run a worker of several ranks, and return the result and the standard error of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PACELINE_CONNECT": server,
        "PACELINE_WORKER": str(worker),
        "PACELINE_RANKS": str(ranks),
        "PACELINE_RANKS_REDUCE": reduce,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, str(HERE.with_name("ranked.py")), str(folder), case]
    process = subprocess.Popen(command, env=shared, start_new_session=True)
    try:
        process.wait(120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    errors = [(folder / f"{rank}.errors").read_text() for rank in range(ranks)]
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files if file.exists()], errors


@pytest.mark.slow
def test_ranks_train_like_one_process_on_all_their_samples(tmp_path: Path) -> None:
    """The script has its own process group at the same address and port."""
    with job("bsp:weights=mean") as running:
        results, errors = run(running.address, tmp_path, "own group", ranks=3)
        running.finish()
    assert len(results) == 3, errors
    alone = ranked.model()
    order, is_main = ranked.train(alone, ranked.BATCH)
    assert is_main, "plain python"
    expected = torch.cat([parameter.detach().flatten() for parameter in alone.parameters()])
    for result in results:
        torch.testing.assert_close(torch.tensor(result["weights"]), expected, rtol=1e-4, atol=1e-5)
    # An epoch ends with two samples for three ranks. The third rank trains on one of them, and it does not count.
    seen = Counter(number for result in results for number in result["seen"])
    assert sum(seen.values()) == sum(Counter(order).values()) + ranked.EPOCHS
    assert not Counter(order) - seen
    batches = [event.batch_size for event in running.events if isinstance(event, Arrived)]
    assert batches == [6, 6, 6, 6, 6, 6, 2] * ranked.EPOCHS


@pytest.mark.slow
def test_the_main_process_is_rank_0_of_worker_0_and_rank_0_of_each_worker_reports_metrics(tmp_path: Path) -> None:
    folders = [tmp_path / str(worker) for worker in range(2)]
    for folder in folders:
        folder.mkdir()
    with job("bsp:weights=mean", workers=2) as running:
        outcomes = running.work(
            *(lambda address, n=n: run(address, folders[n], "logs", worker=n) for n in range(2)), seconds=120.0
        )
        running.finish()
    assert [len(results) for results, _ in outcomes] == [2, 2], outcomes
    assert [[result["is_main"] for result in results] for results, _ in outcomes] == [[True, False], [False, False]]
    seen = [len(results[0]["seen"]) for results, _ in outcomes]
    reported = {(event.worker, event.kind): event.value for event in running.events if isinstance(event, Measured)}
    assert reported == {(0, "rank"): 0, (0, "samples"): seen[0], (1, "rank"): 0, (1, "samples"): seen[1]}
    assert sum(isinstance(event, Measured) for event in running.events) == 4, "other ranks report nothing"


@pytest.mark.slow
def test_ranks_with_unequal_parts_of_a_stream_make_the_same_number_of_steps(tmp_path: Path) -> None:
    """The parts have 19 and 18 samples. The second rank repeats its last batch, which does not count."""
    with job("bsp:weights=mean") as running:
        results, errors = run(running.address, tmp_path, "stream")
        running.finish()
    assert len(results) == 2, errors
    assert results[0]["weights"] == results[1]["weights"]
    batches = [event.batch_size for event in running.events if isinstance(event, Arrived)]
    assert batches == [6, 6, 6, 6, 6, 6, 1] * ranked.EPOCHS
    seen = Counter(number for result in results for number in result["seen"])
    assert set(seen) == set(range(37)) and sum(seen.values()) == (37 + 3) * ranked.EPOCHS


@pytest.mark.slow
def test_weights_that_ranks_load_after_joining_are_trained_on(tmp_path: Path) -> None:
    with served("bsp:weights=mean") as running:
        results, errors = run(running.address, tmp_path, "loads")
    assert len(results) == 2, errors
    alone = ranked.model()
    ranked.train(alone, ranked.BATCH, "loads")
    expected = torch.cat([parameter.detach().flatten() for parameter in alone.parameters()])
    for result in results:
        torch.testing.assert_close(torch.tensor(result["weights"]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_ranks_can_sum_gradients_by_a_named_collective(tmp_path: Path) -> None:
    """The policy sees no difference."""
    with job("bsp:weights=mean") as running:
        results, errors = run(running.address, tmp_path, "", ranks=4, reduce="bcube:n=2,levels=2,stages=ring/mesh")
        running.finish()
    assert len(results) == 4, errors
    alone = ranked.model()
    ranked.train(alone, ranked.BATCH // 4 * 4)
    expected = torch.cat([parameter.detach().flatten() for parameter in alone.parameters()])
    for result in results:
        torch.testing.assert_close(torch.tensor(result["weights"]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_collective_for_another_number_of_ranks_is_refused_before_connecting(tmp_path: Path) -> None:
    results, errors = run("127.0.0.1:1", tmp_path, "", reduce="bcube:n=3,levels=1")
    assert not results
    assert "BCube(3, 0) has 3 servers, but there are 2 ranks; the two numbers must be equal." in errors[1]


@pytest.mark.matrix
@pytest.mark.slow
def test_a_rank_that_dies_during_a_named_collective_is_noticed(tmp_path: Path) -> None:
    with job("bsp:weights=mean") as running:
        results, errors = run(running.address, tmp_path, "dies", reduce="torus:n=2,levels=1")
    assert not results
    assert "Another rank of this worker is gone" in errors[0].strip().splitlines()[-1]


@pytest.mark.slow
def test_all_ranks_skip_a_step_that_overflows_in_one(tmp_path: Path) -> None:
    with job("bsp:weights=mean") as running:
        results, errors = run(running.address, tmp_path, "scaled")
        running.finish()
        assert running.coordinator.samples is not None and running.coordinator.samples.all_done
    assert len(results) == 2, errors
    assert results[0]["weights"] == results[1]["weights"]
    batches = [event.batch_size for event in running.events if isinstance(event, Arrived)]
    assert batches == ([6, 6, 6, 6, 6, 6, 2] * ranked.EPOCHS)[:4] + [6, 2] + [6, 6, 6, 6, 6, 6, 2] * 2


@pytest.mark.slow
def test_if_a_rank_dies_the_others_end_with_an_error(tmp_path: Path) -> None:
    with job("bsp:weights=mean") as running:
        results, errors = run(running.address, tmp_path, "dies")
    assert not results
    assert "Another rank of this worker is gone" in errors[0].strip().splitlines()[-1]


@pytest.mark.parametrize("granted", [1, 2, 7, 8, 33])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_divide_the_batch_that_the_policy_grants(granted: int, ranks: int) -> None:
    backends = [object.__new__(RankedBackend) for _ in range(ranks)]
    for rank, backend in enumerate(backends):
        backend.rank, backend.ranks, backend._granted = rank, ranks, granted
    sizes = [backend.granted_batch or 0 for backend in backends]
    assert sum(sizes) == max(granted, ranks)
    assert max(sizes) - min(sizes) <= 1
