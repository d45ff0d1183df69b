"""The command `benchmarks/gpt.py`: its recorded runs, its tables, and its simulated time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import gpt
from benchmarks.local_steps.codecs import EXACT
from benchmarks.local_steps.model import elements
from benchmarks.local_steps.size import SIZES
from benchmarks.local_steps.tables import at_best_rates, loss_table, results
from benchmarks.local_steps.times import moments, seconds_to, time_table
from benchmarks.output import Output

REPOSITORY = Path(__file__).parents[2]
TINY = SIZES["tiny"]
SECOND = 4.0 * elements(TINY)  # bytes a second: a transfer of the model takes one second


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the command in this process, and returns its output."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["gpt.py", *arguments])
        gpt.main()
        return capsys.readouterr().out

    return run


def test_runs_are_recorded_once_and_printed(tmp_path: Path, run: Callable[..., str]) -> None:
    out, source = tmp_path / "runs.jsonl", str(REPOSITORY / "src")
    common = ("--size", "tiny", "--out", str(out), "--data", source, "--arms", "sync,turns@0.7", "--rates", "0.5,1")
    assert "stopped after" in run(*common, "--limit", "0")
    assert not out.exists()
    run(*common)
    first = [json.loads(each) for each in out.read_text().splitlines()]
    assert [(each["arm"], each["rate"]) for each in first] == [("sync", 0.5), ("sync", 1.0), ("turns", 0.7)]
    assert {each["size"] for each in first} == {"tiny"}
    run(*common, "--seeds", "0,1")
    lines = [json.loads(each) for each in out.read_text().splitlines()]
    assert lines[:3] == first
    best = min(first[:2], key=lambda each: each["loss"])["rate"]
    assert [(each["arm"], each["rate"], each["seed"]) for each in lines[3:]] == [("sync", best, 1), ("turns", 0.7, 1)]
    mean = sum(each["loss"] for each in lines if each["arm"] == "turns") / 2
    printed = run("--table", str(out), "--time", str(out))
    assert f"| turns | float32 | 0.7 | 2 | {mean:.4f} |" in printed
    assert "Simulated: a server's link of 100 Mbit/s" in printed


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (("--arms", "sync,turn"), "'turn' is no schedule"),
        (("--updates", "int9"), "'int9'"),
        (("--arms", "sync"), "--out needs a file"),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_run(
    wrong: tuple[str, str], reason: str, run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("--size", "tiny", *wrong)
    assert reason in capsys.readouterr().err


def test_it_needs_few_packages(tmp_path: Path) -> None:
    missing = ("msgspec", "typer", "rich", "safetensors", "matplotlib", "uvloop", "cryptography")
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({missing})); sys.argv[0] = 'benchmarks/gpt.py'; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    file = tmp_path / "runs.jsonl"
    file.write_text(json.dumps(line("turns", 1.25)))
    command = [sys.executable, "-c", code, "--table", str(file)]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert "| turns | float32 | 1 | 1 | 1.2500 |" in printed


def line(arm: str, loss: float | None, rate: float = 1.0, seed: int = 0, size: str = "tiny") -> dict[str, Any]:
    """Return a recorded line with a short curve, whose loss has fallen by one from step 8 on."""
    settings = {"arm": arm, "rate": rate, "seed": seed, "updates": EXACT, "size": size}
    curve = [] if loss is None else [[8, loss + 1], [32, loss]]
    model = 4 * elements(TINY)
    return (
        settings
        | {"loss": loss, "curve": curve, "steps": 32 * 8, "elements": elements(TINY)}
        | {
            "pushed": 32 * model,
            "pulled": 32 * model,
        }
    )


def test_a_result_has_the_best_rate_of_the_first_seed() -> None:
    lines = [line("sync", 2.0, 0.5), line("sync", 1.5, 1.0), line("sync", None, 2.0), line("sync", 1.7, 1.0, seed=1)]
    lines.append(line("sync", 0.1, 4.0, seed=1))
    found = results(lines)
    assert [each.rate for each in found] == [0.5, 1.0, 2.0, 4.0]
    (best,) = at_best_rates(found)
    assert (best.rate, best.losses) == (1.0, [1.5, 1.7])


def test_the_gap_is_that_of_the_seeds_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line("sync", 1.0), line("sync", 2.0, seed=1), line("turns", 1.25), line("turns", 2.25, seed=2)]
    lines += [line("turns+naive", None), line("sync+rounds:99", 0.5), line("sync", 1.1, 0.5)]
    loss_table(lines, Output(None))
    printed = capsys.readouterr().out
    assert "| sync | float32 | 1 | 2 | 1.5000 | 0.7071 | +0.0000 | 1/8 |" in printed
    assert "| turns | float32 | 1 | 2 | 1.7500 | 0.7071 | +0.2500 | 1/8 |" in printed
    assert "| turns+naive | float32 | 1 | 0 | diverged |  |  |  |" in printed


def test_a_table_has_runs_of_one_size() -> None:
    with pytest.raises(ValueError, match="several sizes"):
        results([line("sync", 1.0), line("turns", 1.0, size="small")])


def test_the_server_link_carries_one_push_and_one_pull_at_a_time() -> None:
    sync = moments("sync", EXACT, TINY, 0.0, SECOND)
    assert sync[8] == 8, "eight pushes"
    assert sync[16] == 8 + 8 + 1, "eight pulls, and the last worker's push: the others have pushed during the pulls"
    turns = moments("turns", EXACT, TINY, 0.0, SECOND)
    assert turns[8] == 1
    assert turns[15 + 24] == 4 * 8, "the link is never idle"
    slow = moments("turns", EXACT, TINY, 100.0, SECOND)
    assert slow[8] == 801
    assert slow[16] == 1603, "a worker waits for its own push and pull alone"
    assert slow[9] == 901


def test_times_are_no_whole_numbers() -> None:
    assert moments("turns", EXACT, TINY, 100, 4 * SECOND)[16] == 1600.75


def test_the_server_link_carries_one_pull_at_a_time_between_pushes() -> None:
    found = moments("groups:1+pulls:4", EXACT, TINY, 0.0, SECOND)
    assert found[8] == 3 * 8 + 1, "three pulls of each worker, and the last worker's push"


def test_a_worker_waits_for_its_pulls_between_pushes() -> None:
    slow = moments("turns+pulls:2", EXACT, TINY, 100.0, SECOND)
    assert slow[8] == 802, "one pull after four steps, and a push"
    assert slow[16] == 802 + 1 + 801 + 1


@pytest.mark.parametrize("arm", ["sync", "groups:2+final:1", "turns", "turns+pulls:4", "streaming:4", "parts:8"])
def test_only_steps_take_time_with_a_fast_link(arm: str) -> None:
    found = moments(arm, EXACT, TINY, 2, 1e15)
    assert len(found) > 4
    for at, seconds in found.items():
        assert 2 * at - 16 < seconds <= 2 * at + 1e-3
        if arm in ("sync", "turns", "streaming:4"):
            assert seconds == pytest.approx(2 * at, abs=1e-3)


def test_the_time_to_a_loss_is_interpolated() -> None:
    curve = [(10.0, 3.0), (20.0, 2.0), (30.0, 1.0)]
    assert seconds_to(curve, 1.5) == pytest.approx(25)
    assert seconds_to(curve, 0.5) is None


def test_the_time_is_that_to_the_loss_of_sync_on_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line("sync", 1.0), line("sync", 2.0, seed=1), line("groups:1", 0.5), line("groups:2", 1.5)]
    lines += [line("groups:4", 1.5), line("groups:4", 1.5, seed=1), line("turns+naive", None)]
    time_table(lines, [1.0], 1e9, Output(None))
    printed = capsys.readouterr().out
    assert "| sync | float32 | 32 | 32 |" in printed
    assert "| groups:1 | float32 | 20 | 32 |" in printed, "half of the way from step 8 to step 32"
    assert "| groups:2 | float32 | not reached | 32 |" in printed
    assert "| groups:4 | float32 | 20 (1 of 2 seeds) | 32 |" in printed
    assert "| turns+naive | float32 | not reached | diverged |" in printed
    time_table(lines, [1.0], 1e9, Output(None), target=1.5)
    assert "| groups:2 | float32 | 32 | 32 |" in capsys.readouterr().out
    with pytest.raises(ValueError, match="needs a run of `sync`"):
        time_table(lines[2:], [1.0], 1e9, Output(None))
