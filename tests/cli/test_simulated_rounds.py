"""`paceline simulate` on clusters with local steps, small updates and overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shell as shell_of

LAB = """
local_steps = 500
updates = "int4"

[model]
bytes = "10MB"
[servers]
count = 1
link = "100Mbit"
[[workers]]
count = 8
link = "100Mbit"
batch = 32
samples_per_second = 800.0
"""
EXTRA = {"idle_by_worker", "waiting_share", "mean_rates", "peak_rates"}


class Shell(shell_of.Shell):
    """A shell in a folder with a cluster of eight workers that make rounds of local steps."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, capsys, monkeypatch, ("simulate",))
        (folder / "rounds.toml").write_text(LAB)
        (folder / "overlap.toml").write_text(f"overlap = true\n{LAB}")
        (folder / "steps.toml").write_text(LAB.partition("\n\n")[2])

    def runs(self, *args: str) -> list[dict[str, Any]]:
        outcome = self(*args, "--json")
        assert outcome.code == 0, outcome.err
        runs: list[dict[str, Any]] = json.loads(outcome.out)["policies"]
        return runs


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(tmp_path, capsys, monkeypatch)


def test_turns_have_an_eighth_of_the_peak_and_nobody_waits(shell: Shell) -> None:
    bsp, r2sp = shell.runs("rounds.toml", "--policy", "bsp,r2sp", "--iterations", "60")
    for way in ("in", "out"):
        assert bsp["peak_rates"][way] == pytest.approx(12.5e6, rel=0.01)
        assert r2sp["peak_rates"][way] == pytest.approx(12.5e6 / 8, rel=0.01)
        assert r2sp["mean_rates"][way] < r2sp["peak_rates"][way]
    assert r2sp["waiting_share"] < 0.02
    assert r2sp["idle_by_worker"].keys() == {str(worker) for worker in range(8)}
    assert max(r2sp["idle_by_worker"].values()) < 0.02 < min(bsp["idle_by_worker"].values())
    assert r2sp["batch_sizes"]["0"] == 500 * 32


def test_workers_that_compute_during_the_exchange_are_never_idle(shell: Shell) -> None:
    for run in shell.runs("overlap.toml", "--policy", "bsp,r2sp,asp", "--iterations", "60"):
        assert max(run["idle_by_worker"].values()) < 0.01
        assert run["waiting_share"] is None
        assert run["mean_iteration_seconds"] == pytest.approx(20.0, rel=0.02)


def test_without_the_keys_the_output_is_the_usual_one(shell: Shell) -> None:
    (run,) = shell.runs("steps.toml", "--policy", "bsp", "--iterations", "8")
    assert not run.keys() & EXTRA
    text = shell("steps.toml", "--policy", "bsp", "--iterations", "8").out
    assert "idle" not in text
    assert "local steps" not in text


def test_servers_beside_the_workers_have_no_link_of_their_own(shell: Shell) -> None:
    (run,) = shell.runs("rounds.toml", "--policy", "bsp", "--colocate", "--iterations", "8")
    assert run.keys() >= EXTRA
    assert run["peak_rates"] is run["mean_rates"] is None
    assert "Mbit/s" not in shell("rounds.toml", "--policy", "bsp", "--colocate", "--iterations", "8").out


def test_the_table_shows_idle_workers_and_the_peak(shell: Shell) -> None:
    text = shell("rounds.toml", "--policy", "bsp,r2sp", "--iterations", "40").out
    title = "rounds: 8 workers, 1 server, a model of 10 MB, 500 local steps, updates of 1.33 MB (int4)"
    assert title in " ".join(text.split())
    headings = next(line.split() for line in text.splitlines() if "idle" in line)
    assert headings == ["policy", "idle", "waits", "Mbit/s", "in", "peak", "Mbit/s", "out", "peak"]
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith(("bsp ", "r2sp "))}
    assert rows["bsp"][4] == rows["bsp"][6] == "100", "the last table has a line for each policy"
    assert rows["r2sp"][4] == rows["r2sp"][6] == "12.5"
    legend = " ".join(text.split())
    assert "waits: the part of it in which a worker waits for others." in legend
    assert "over any 850 ms. In that time they carry one update or model of each worker." in legend
    assert "waits:" not in shell("overlap.toml", "--policy", "bsp", "--iterations", "8").out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("rounds.toml", "--train", "mlp"),
            "--train pushes a float32 gradient in every step; leave local_steps, updates and overlap out.\n",
        ),
        (
            ("rounds.toml", "--policy", "bsp,safa"),
            "Workers push whole models under safa; leave updates out of the cluster's file.\n",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_sentence(
    shell: Shell, arguments: tuple[str, ...], sentence: str
) -> None:
    outcome = shell(*arguments)
    assert outcome.code == 2
    assert sentence in outcome.err
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""


def test_a_trace_and_a_plot_are_as_usual(shell: Shell) -> None:
    pytest.importorskip("matplotlib")
    outcome = shell("overlap.toml", "-p", "r2sp", "--iterations", "8", "--trace", "a.jsonl", "--plot", "a.png")
    assert outcome.code == 0
    events = [json.loads(line)["event"] for line in (shell.folder / "a.jsonl").read_text().splitlines()]
    assert events.count("arrived") >= 8 * 8
    assert {"granted", "pulled", "computed", "used"} <= set(events)
    assert (shell.folder / "a.png").stat().st_size > 1000
