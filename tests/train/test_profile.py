"""A script whose steps are timed: the measured values, and that it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from paceline.advise.profile import ScriptProfile, judged, timed
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


@pytest.mark.parametrize("step", ["closure(); optimizer.step()", "optimizer.step(closure)"])
def test_a_loop_of_the_script_is_timed_and_ended(write: Write, step: str) -> None:
    timing = run(write(LOOP.format(optimizer=WRAPPED, step=step)))
    assert timing.seconds >= 0.01, "the time between two steps counts"
    assert timing.batch == 8, "samples are counted as they pass through the model"
    assert timing.model_bytes == 4 * (10 * 5 + 5 + 5 + 5 + 5 + 5 + 1), "parameters and statistics"
    assert 1 <= timing.steps <= 12


def test_a_time_limit_ends_the_script(write: Write) -> None:
    slow = LOOP.format(optimizer=WRAPPED, step="closure(); optimizer.step(); time.sleep(0.2)")
    assert run(write(slow), steps=1000, seconds=0.5).steps <= 5


def test_a_script_that_ends_early_is_timed_up_to_its_end(write: Write) -> None:
    text = LOOP.format(optimizer=WRAPPED, step="closure(); optimizer.step()").replace("while True", "for _ in range(4)")
    assert run(write(text)).steps >= 2


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


@pytest.mark.slow
def test_the_digits_example_is_timed() -> None:
    timing = run(Path(__file__).parents[2] / "examples" / "digits.py", steps=10)
    assert timing.batch == 32
    assert timing.model_bytes == 39980
    assert 0 < timing.seconds < 1
