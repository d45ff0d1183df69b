"""The scripts of JAX and Keras before and after porting: two workers under BSP equal one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed; `make test-arrays` installs it")

from on_arrays.jobs import DIGITS, ROOT, output, served, start

#: Runs a script whose np.random.permutation is the order of the job: epoch e has the permutation of the seed e.
IN_ORDER = """
import itertools, runpy, sys
import numpy
from paceline.arrays.batches import order_of

epochs = itertools.count()
numpy.random.permutation = lambda size: order_of(size, 0)(next(epochs))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def weights(file: Path) -> list[Any]:
    with np.load(file) as saved:
        return [saved[name] for name in saved.files]


@pytest.mark.parametrize(("name", "needed"), [("jax", "optax"), ("keras", "tensorflow")])
def test_two_workers_equal_one_process_on_the_joint_batch(name: str, needed: str, tmp_path: Path) -> None:
    pytest.importorskip(needed)
    before, after = (ROOT / f"examples/port/{name}/{each}.py" for each in ("before", "after"))
    quick = ("--data", DIGITS, "--epochs", 2, "--samples", 640, "--save")
    one, alone, two = (tmp_path / f"{each}.npz" for each in ("one", "alone", "two"))
    output(start(sys.executable, "-c", IN_ORDER, before, "--batch-size", 64, *quick, one))
    output(start(sys.executable, after, "--batch-size", 64, *quick, alone))
    with served(tmp_path, "bsp", workers=2) as job:
        output(job.work(after, "--batch-size", 32, *quick, two, workers=2))
        job.events()
    for ours, theirs, expected in zip(weights(alone), weights(two), weights(one), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(theirs, expected, rtol=1e-5, atol=1e-5)
