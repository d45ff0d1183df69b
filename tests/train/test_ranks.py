"""Several processes as one worker: the same as one process on all their samples."""

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

from paceline.observe.trace import Arrived
from paceline.train.backend import AssignedSamples
from paceline.train.ranks import _part, from_environment
from train import ranked
from train.jobs import job

HERE = Path(__file__)


@pytest.mark.parametrize("count", range(1, 12))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_split_what_they_are_given_and_none_is_without(count: int, ranks: int) -> None:
    whole = AssignedSamples(1, 1, 0, 20, 20 + count, count)
    parts = [_part(whole, rank, ranks) for rank in range(ranks)]
    assert all(part is not None and part.stop > part.start for part in parts)
    counted = [position for part in parts if part and part.size for position in range(part.start, part.stop)]
    assert counted == list(range(20, 20 + count))
    sizes = [part.size for part in parts if part]
    assert max(sizes) - min(sizes) <= 1
    assert _part(AssignedSamples(1, 1, 0, 0, 0, 0), 0, ranks) is None


def test_variables_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment() == (0, 1)
    for rank, ranks in (("2", "2"), ("-1", "2"), ("x", "2"), ("0", "0")):
        monkeypatch.setenv("PACELINE_RANK", rank)
        monkeypatch.setenv("PACELINE_RANKS", ranks)
        with pytest.raises(ValueError, match="PACELINE_RANK must be a number from 0 up to PACELINE_RANKS"):
            from_environment()


def run(
    server: str, folder: Path, how: str, ranks: int = 2, reduce: str = ""
) -> tuple[list[dict[str, Any]], list[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PACELINE_CONNECT": server,
        "PACELINE_WORKER": "0",
        "PACELINE_RANKS": str(ranks),
        "PACELINE_RANKS_REDUCE": reduce,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, str(HERE.with_name("ranked.py")), str(folder), how]
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
def test_ranks_train_as_one_process_would_on_all_their_samples(tmp_path: Path) -> None:
    """Beside a process group of the script's own, at the same address and port."""
    with job("bsp:weights=mean") as running:
        results, errors = run(running.address, tmp_path, "own group", ranks=3)
        running.finish()
    assert len(results) == 3, errors
    alone = ranked.model()
    order = ranked.train(alone, ranked.BATCH)
    expected = torch.cat([parameter.detach().flatten() for parameter in alone.parameters()])
    for result in results:
        torch.testing.assert_close(torch.tensor(result["weights"]), expected, rtol=1e-4, atol=1e-5)
    # Of the last two samples of an epoch the third rank had one, too, that did not count.
    seen = Counter(number for result in results for number in result["seen"])
    assert sum(seen.values()) == sum(Counter(order).values()) + ranked.EPOCHS
    assert not Counter(order) - seen
    batches = [event.batch_size for event in running.events if isinstance(event, Arrived)]
    assert batches == [6, 6, 6, 6, 6, 6, 2] * ranked.EPOCHS


@pytest.mark.slow
def test_ranks_may_add_up_as_a_network_has_it(tmp_path: Path) -> None:
    """The policy does not notice."""
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
def test_a_network_of_another_size_is_refused(tmp_path: Path) -> None:
    """Before any server is called."""
    results, errors = run("127.0.0.1:1", tmp_path, "", reduce="bcube:n=3,levels=1")
    assert not results
    assert "BCube(3, 0) has 3 servers, and there are 2 ranks; they must be as many." in errors[1]


@pytest.mark.matrix
@pytest.mark.slow
def test_who_dies_while_ranks_add_up_so_is_noticed(tmp_path: Path) -> None:
    with job("bsp:weights=mean") as running:
        results, errors = run(running.address, tmp_path, "dies", reduce="torus:n=2,levels=1")
    assert not results
    assert "ConnectionError: Another rank of this worker is gone" in errors[0].strip().splitlines()[-1]


@pytest.mark.slow
def test_an_overflow_in_one_rank_is_skipped_by_all(tmp_path: Path) -> None:
    with job("bsp:weights=mean") as running:
        results, errors = run(running.address, tmp_path, "scaled")
        running.finish()
        assert running.coordinator.samples is not None and running.coordinator.samples.all_done
    assert len(results) == 2, errors
    assert results[0]["weights"] == results[1]["weights"]
    batches = [event.batch_size for event in running.events if isinstance(event, Arrived)]
    assert batches == ([6, 6, 6, 6, 6, 6, 2] * ranked.EPOCHS)[:4] + [6, 2] + [6, 6, 6, 6, 6, 6, 2] * 2


@pytest.mark.slow
def test_if_a_rank_dies_the_others_say_so_and_end(tmp_path: Path) -> None:
    with job("bsp:weights=mean") as running:
        results, errors = run(running.address, tmp_path, "dies")
    assert not results
    assert "ConnectionError: Another rank of this worker is gone" in errors[0].strip().splitlines()[-1]
