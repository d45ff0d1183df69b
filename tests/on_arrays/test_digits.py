"""JAX and Keras learn the digits where torch is not installed, also beside a torch worker, and after a worker died."""

from __future__ import annotations

import re
import site
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed; `make test-arrays` installs it")

from on_arrays.jobs import ENVIRONMENT, ROOT, SECONDS, TORCH_PYTHON, output, served
from paceline.observe.trace import Arrived, Event, Progressed

TRAINING_SAMPLES, EPOCHS, TARGET = 1437, 20, 95.0
KERAS = ROOT / "examples/keras_digits.py"
JAX = ROOT / "examples/jax_digits.py"
each_backend = pytest.mark.parametrize("backend", ["jax", "tensorflow"])
each_policy = pytest.mark.parametrize("policy", ["bsp", "r2sp"])

TORCH_WORKER = """
import torch, paceline
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from paceline.workloads import digits

torch.set_num_threads(1)
images, labels, test_images, test_labels = digits.load()
data = TensorDataset(torch.from_numpy(images).reshape(-1, 64) / 255, torch.from_numpy(labels.astype("int64")))
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
with paceline.join(model, optimizer) as session:
    for x, y in session.batches(data, batch_size=32, epochs=20):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        session.step(loss)
predicted = model(torch.from_numpy(test_images).reshape(-1, 64) / 255).argmax(1).numpy()
print(f"accuracy on the test set: {(predicted == test_labels).mean():.1%}")
"""


def accuracies(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"accuracy on the test set: ([\d.]+)%", printed)]


def check_samples(events: list[Event]) -> set[int]:
    """Check that each sample counted once an epoch. Return the workers whose updates arrived."""
    progress = [event for event in events if isinstance(event, Progressed)][-1]
    assert progress.done == progress.total == TRAINING_SAMPLES * EPOCHS
    return {event.worker for event in events if isinstance(event, Arrived)}


def test_torch_is_not_installed_here() -> None:
    assert find_spec("torch") is None


@each_policy
def test_two_jax_workers_and_one_of_torch_learn_the_digits_together(policy: str, tmp_path: Path) -> None:
    script = tmp_path / "torch_worker.py"
    script.write_text(TORCH_WORKER)
    with served(tmp_path, policy, workers=3) as job:
        jax, torch = job.work(JAX, "--epochs", EPOCHS, workers=2), job.work_with_torch(script)
        printed, by_torch = output(jax), output(torch)
        assert check_samples(job.events()) == {0, 1, 2}
    (accuracy,) = accuracies(by_torch)
    assert accuracy >= TARGET
    assert set(accuracies(printed)) <= {accuracy}  # the main worker prints, and that may be the one of torch


@each_policy
@each_backend
def test_two_keras_workers_learn_the_digits(policy: str, backend: str, tmp_path: Path) -> None:
    pytest.importorskip("keras")
    pytest.importorskip(backend)
    with served(tmp_path, policy, workers=2) as job:
        printed = output(job.work(KERAS, "--epochs", EPOCHS, workers=2, KERAS_BACKEND=backend))
        assert check_samples(job.events()) == {0, 1}
    (accuracy,) = accuracies(printed)
    assert accuracy >= TARGET


DIES = """
import os, pathlib, runpy, sys
import paceline.arrays as arrays

first = pathlib.Path(sys.argv.pop(1))
step, steps = arrays.ArraySession.step, []

def dying_step(session, *arguments, **options):
    steps.append(None)
    if len(steps) == 20 and session.worker == 1 and not first.exists():
        first.touch()
        os.kill(os.getpid(), 9)
    step(session, *arguments, **options)

arrays.ArraySession.step = dying_step
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_killed_jax_worker_comes_back(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    with served(tmp_path, "bsp", workers=2) as job:
        printed = output(job.work(script, tmp_path / "died", JAX, "--epochs", EPOCHS, workers=2))
        assert (tmp_path / "died").exists()
        assert "restarting it" in printed
        check_samples(job.events())
    (accuracy,) = accuracies(printed)
    assert accuracy >= TARGET


def test_paceline_run_starts_jax_workers_where_the_server_has_torch(tmp_path: Path) -> None:
    """The environment of the server sees the packages of this one too."""
    paths = ":".join([str(ROOT / "src"), *site.getsitepackages()])
    run = (TORCH_PYTHON, "-m", "paceline", "run", "--workers", "2", "-p", "r2sp", str(JAX))
    environment = ENVIRONMENT | {"PYTHONPATH": paths}
    ran = subprocess.run(run, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (accuracy,) = accuracies(ran.stdout + ran.stderr)
    assert accuracy >= TARGET


def test_paceline_run_says_that_the_server_needs_torch() -> None:
    run = (sys.executable, "-m", "paceline", "run", "--workers", "2", str(JAX))
    ran = subprocess.run(run, capture_output=True, text=True, timeout=SECONDS, check=False, env=ENVIRONMENT)
    assert ran.returncode == 2
    assert ran.stderr.strip() == 'Training needs torch: pip install "paceline[torch]".'
