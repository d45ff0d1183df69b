"""Rounds of local steps in a lab: small updates, computing during an exchange, and how links are used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pyroute2")

from typer.testing import CliRunner

from lab.labs import built
from paceline.cli import app
from paceline.lab import run
from paceline.lab.hosts import hosts
from paceline.lab.namespaces import Lab
from paceline.lab.plan import LabPlan, LabResult
from paceline.lab.round_use import computing_shares, rates
from paceline.lab.synthetic_worker import SyntheticTask, SyntheticWorker
from paceline.observe.trace import Arrived, Computed, Event, Granted
from paceline.serve.environment import address
from paceline.simulate.cluster_spec import ClusterSpec, WorkerSpec
from train.jobs import job

STEPS = 3
SIZE = 1e5


def cluster(updates: str = "", overlap: bool = False) -> ClusterSpec:
    """Return three workers that make 3 steps of 30 ms, and then exchange 100 kB in 20 ms."""
    worker = WorkerSpec(5e6, 8, 8 / 0.03)
    spec = ClusterSpec("small", SIZE, 1, 5e6, 0.0, 10e9, 30.0, (worker,) * 3)
    return replace(spec, local_steps=STEPS, updates=updates, overlap=overlap)


@pytest.mark.parametrize("local_steps", [1, STEPS])
def test_a_synthetic_worker_says_whether_it_makes_local_steps(local_steps: int) -> None:
    """So that the shards of a lab divide the steps of topk, as those of a real job do."""
    with job("r2sp", update_codec="topk:0.1") as running:

        def run(where: str) -> None:
            spec = cluster().workers[0]
            task = SyntheticTask(address(where), b"", 0, spec, SIZE, iterations=2, local_steps=local_steps)
            worker = SyntheticWorker(task)
            worker.train()
            worker.finish()

        running.work(run)
        assert running.coordinator.agreement.sparse == (local_steps > 1)


def measured(spec: ClusterSpec, policy: str) -> LabResult:
    """Run six rounds. The lab compares the last model with the updates that were applied."""
    with Lab(hosts(spec)) as lab:
        return run.run(lab, spec, LabPlan(policy, 6, exactly=True))


@built
@pytest.mark.slow
def test_small_updates_of_rounds_arrive_once_each() -> None:
    found = measured(cluster("int8"), "r2sp")
    sizes = [event.batch_size for event in found.events if isinstance(event, Arrived)]
    assert sizes == [STEPS * 8] * 18
    computed = [event.seconds for event in found.events if isinstance(event, Computed) and event.seconds]
    assert len(computed) == 18 and min(computed) >= 0.9 * STEPS * 0.03
    # Each worker pulls the first model and the last one in float32. The rest has 8 bits a number.
    in_float32 = 2 * 18 * SIZE / 1e9
    assert found.cost.gigabytes < 0.65 * in_float32


@built
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("policy", ["r2sp", "bsp"])
def test_a_worker_computes_its_next_round_during_an_exchange(policy: str) -> None:
    """A push takes 0.1 s here, so that a round begins long before its Grant."""
    worker = WorkerSpec(1e6, 8, 8 / 0.1)
    for overlap in (False, True):
        found = measured(replace(cluster(overlap=overlap), workers=(worker,) * 3), policy)
        ahead = [began < granted for began, granted in beginnings(found.events, worker=1)]
        assert len(ahead) == 5
        assert all(ahead) if overlap else not any(ahead)


def beginnings(events: list[Event], worker: int) -> list[tuple[float, float]]:
    """Return the times at which a worker began to compute and was granted each round but the first."""
    ours = [event for event in events if getattr(event, "worker", None) == worker]
    granted = [event.time for event in ours if isinstance(event, Granted)]
    began = [event.time - event.seconds for event in ours if isinstance(event, Computed) and event.seconds]
    return list(zip(began, granted, strict=False))[1:]


def test_the_share_of_computing_is_between_the_ends_of_computations() -> None:
    events: list[Event] = []
    for number, time in enumerate((9.0, 10.0, 13.0, 15.0)):
        events += [Computed(time, 0, 1.0), Computed(time + 0.5, 1, 0.5 * number)]
    events += [Granted(20.0, 0, None, 0), Computed(16.0, 2, 1.0)]
    assert computing_shares(events, 3, 1) == pytest.approx((3 / 6, 3 / 6, 0.0))
    assert computing_shares(events, 3, 2) == pytest.approx((2 / 5, 2.5 / 5, 0.0))
    assert computing_shares(events, 3, 9) == (0.0, 0.0, 0.0)


def test_rates_are_means_and_peaks_of_all_workers_together() -> None:
    # The first worker sends 10 bytes in its first second, and the other one in its third.
    first = [(0.0, 0, 0), (1.0, 0, 10), (2.0, 0, 10), (3.0, 4, 10), (4.0, 8, 10)]
    other = [(0.0, 0, 50), (1.0, 0, 50), (2.0, 0, 50), (3.0, 4, 60), (4.0, 8, 60)]
    means, peaks = rates({0: first, 1: other}, (1.0, 1.0))
    assert means == pytest.approx((20 / 4, 16 / 4))
    assert peaks == pytest.approx((10, 8))
    assert rates({0: first, 1: other}, (2.0, 1.0))[1] == pytest.approx((5, 8))
    assert rates({0: first, 1: other}, (9.0, 9.0)) == (means, means)


TOML = """
local_steps = 5
updates = "int4"
[model]
bytes = 100e3
[servers]
count = 1
link = "40Mbit"
[[workers]]
count = 2
link = "40Mbit"
batch = 8
samples_per_second = 400
"""


@built
@pytest.mark.slow
def test_the_json_has_the_fields_of_the_simulator(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TOML)
    arguments = [str(tmp_path / "two.toml"), "--policy", "r2sp", "--json", "--iterations", "8"]
    result = CliRunner().invoke(app, ["lab", *arguments, "--compare-simulation"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["policies"]
    (simulated,) = json.loads(CliRunner().invoke(app, ["simulate", *arguments]).stdout)["policies"]
    assert simulated.keys() - row.keys() <= {"events", "simulated_seconds"}
    assert list(row["idle_by_worker"]) == ["0", "1"]
    for direction in ("in", "out"):
        assert 0 < row["mean_rates"][direction] <= 1.1 * row["peak_rates"][direction] < 1.1 * 40e6 / 8


@pytest.mark.parametrize(
    ("keys", "arguments", "sentence"),
    [
        ("local_steps = 2", ["--ddp"], "--overlap and --ddp need workers that exchange a float32 gradient"),
        ('updates = "int8"', ["--overlap"], "--overlap and --ddp need workers that exchange a float32 gradient"),
        ("overlap = true", ["--script", __file__], "A script makes its own local steps"),
        ('updates = "int8"', ["--policy", "safa"], "safa"),
    ],
)
def test_options_that_do_not_go_with_rounds_are_refused(
    keys: str, arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    plain = TOML.replace('local_steps = 5\nupdates = "int4"\n', "")
    (tmp_path / "two.toml").write_text(f"{keys}\n{plain}")
    result = CliRunner().invoke(app, ["lab", str(tmp_path / "two.toml"), *arguments])
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())
