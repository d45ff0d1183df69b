"""A script whose steps are timed: the measured values, and that it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from paceline.advise.profile import ASSUMED, FIRST, ScriptProfile, disturbance, judged, timed
from paceline.launch.processes import JobError

Write = Callable[[str], Path]

LOOP = """
import torch, paceline, time, sys
from paceline.model.optimizer import without_compiler
without_compiler()  # importing torch's compiler takes two seconds in each process
model = torch.nn.Sequential(torch.nn.Linear(10, 5), torch.nn.BatchNorm1d(5))
optimizer = {optimizer}
while True:
    time.sleep(0.01)
    optimizer.zero_grad()
    def closure():
        loss = model(torch.ones(8, 10)).sum()
        loss.backward()
        return loss
    {step}
"""
WRAPPED = "paceline.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))"


def run(script: Path, steps: int = 12, seconds: float = 20.0, patience: float = 60.0) -> ScriptProfile:
    return asyncio.run(timed([str(script)], steps, seconds, patience))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.slow
@pytest.mark.parametrize("step", ["closure(); optimizer.step()", "optimizer.step(closure)"])
def test_a_loop_of_the_script_is_timed_and_ended(write: Write, step: str) -> None:
    timing = run(write(LOOP.format(optimizer=WRAPPED, step=step)))
    assert timing.seconds >= 0.01, "the time between two steps counts"
    assert timing.batch == 8, "samples are counted as they pass through the model"
    assert timing.model_bytes == 4 * (10 * 5 + 5 + 5 + 5 + 5 + 5 + 1), "parameters and statistics"
    assert 1 <= timing.steps <= 12
    assert timing.cpu_jitter is not None
    assert (timing.waited is not None) is sys.platform.startswith("linux")


@pytest.mark.slow
def test_a_time_limit_ends_the_script(write: Write) -> None:
    slow = LOOP.format(optimizer=WRAPPED, step="closure(); optimizer.step(); time.sleep(0.2)")
    assert run(write(slow), steps=1000, seconds=0.5).steps <= 5


@pytest.mark.slow
def test_a_script_that_ends_early_is_timed_up_to_its_end(write: Write) -> None:
    text = LOOP.format(optimizer=WRAPPED, step="closure(); optimizer.step()").replace("while True", "for _ in range(4)")
    assert run(write(text)).steps >= 2


@pytest.mark.slow
def test_a_script_that_cannot_be_timed_gives_one_sentence(write: Write) -> None:
    with pytest.raises(JobError, match=r"never called paceline.join or paceline.wrap"):
        run(write("print('hello')"))
    with pytest.raises(JobError, match=r"made no step"):
        run(write(LOOP.format(optimizer=WRAPPED, step="break")))
    with pytest.raises(JobError, match=r"exit code 1. Its last output:\n(.|\n)*ZeroDivisionError"):
        run(write("1 / 0"))
    with pytest.raises(JobError, match=r"did not make 12 steps within 1 s"):
        run(write("import time; time.sleep(60)"), patience=1.0)
    frozen = LOOP.format(optimizer="paceline.wrap(model, torch.optim.SGD([torch.ones(1)], lr=0.1))", step="pass")
    with pytest.raises(JobError, match=r"^The optimizer has no parameter to train"):
        run(write(frozen))


def test_first_steps_and_pauses_are_left_out() -> None:
    timing = judged([9.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.1, 0.9, 1.0, 30.0, 1.0], [32] * 10 + [7], 100, "cpu")
    assert timing.seconds == pytest.approx(1.0)
    assert 0.05 < timing.jitter < 0.1
    assert timing.batch == 32
    assert timing.steps == 5
    assert judged([2.0], [4], 100, "cpu").seconds == 2.0


# A busy machine


def varying(mean: float, spread: float) -> list[float]:
    """Forty step times with this relative spread, after the first ones that are left out."""
    return [mean * (1 + spread * (-1) ** number) for number in range(FIRST + 40)]


def timed_as(waited: float | None, wall: float, cpu: float, threads: int = 1, device: str = "cpu") -> ScriptProfile:
    return judged(varying(1.0, wall), [32], 100, device, varying(0.7, cpu), waited, threads)


def test_jitter_that_comes_from_the_load_of_the_machine_is_left_out() -> None:
    busy = timed_as(waited=0.4, wall=0.32, cpu=0.03, threads=2)
    assert busy.jitter == pytest.approx(0.03)
    assert (busy.wall_jitter, busy.cpu_jitter) == pytest.approx((0.32, 0.03))
    assert timed_as(waited=0.4, wall=0.04, cpu=0.01).jitter == pytest.approx(0.04), "a steady clock is believed"


def test_jitter_of_the_script_itself_stays() -> None:
    assert timed_as(waited=0.0, wall=0.32, cpu=0.03).jitter == pytest.approx(0.32), "it waits for data, not for a core"
    assert timed_as(waited=None, wall=0.32, cpu=0.03).jitter == pytest.approx(0.32), "the system does not say"
    assert timed_as(waited=0.4, wall=0.5, cpu=0.3).jitter == pytest.approx(0.3), "the batches differ in size"


def test_jitter_is_assumed_if_a_busy_machine_does_not_let_it_be_measured() -> None:
    several = timed_as(waited=0.4, wall=0.5, cpu=0.4, threads=2)  # threads that wait for each other use CPU time
    assert several.jitter == ASSUMED
    on_a_gpu = timed_as(waited=0.4, wall=0.5, cpu=0.01, device="cuda:0")
    assert on_a_gpu.jitter == ASSUMED
    assert on_a_gpu.cpu_jitter is None
    assert timed_as(waited=0.0, wall=0.5, cpu=0.01, device="cuda:0").jitter == pytest.approx(0.5)


def test_a_busy_machine_is_reported_with_what_to_do() -> None:
    assert disturbance(timed_as(waited=0.01, wall=0.32, cpu=0.03), None) is None
    said = disturbance(timed_as(waited=0.4, wall=0.32, cpu=0.03), None)
    assert said == (
        "This machine was busy: the script waited 40% of the time for a core, step times vary by ±32%, CPU time by "
        "±3%. The advice uses ±3%. Fix another value with --jitter 0.05. The 1 s of a step are too long as well: for a "
        "clean measurement, close other programs and run `paceline advise` again."
    )
    assert "so the advice assumes ±5%" in str(disturbance(timed_as(waited=0.4, wall=0.5, cpu=0.4, threads=2), None))
    assert "uses ±10%, as --jitter says" in str(disturbance(timed_as(waited=0.4, wall=0.32, cpu=0.03), 0.1))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts how long threads wait for a core")
def test_a_loaded_machine_is_noticed(write: Write) -> None:
    text = LOOP.format(optimizer=WRAPPED, step="closure(); optimizer.step()").replace(
        "    time.sleep(0.01)", "    sum(range(300_000))"
    )
    burning = [sys.executable, "-c", "while True: pass"]
    # In sessions of their own, since the system shares the cores among sessions first.
    load = [subprocess.Popen(burning, start_new_session=True) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        timing = run(write(text), steps=40)
    finally:
        for process in load:
            process.kill()
            process.wait()
    assert timing.is_disturbed
    assert timing.cpu_jitter is not None
    assert timing.jitter == min(timing.cpu_jitter, timing.wall_jitter), "the load is no jitter of the script"


@pytest.mark.slow
def test_the_digits_example_is_timed() -> None:
    timing = run(Path(__file__).parents[2] / "examples" / "digits.py", steps=10)
    assert timing.batch == 32
    assert timing.model_bytes > 30_000
    assert 0 < timing.seconds < 1
