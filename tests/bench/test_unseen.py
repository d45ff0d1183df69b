"""The recorded times of RLP on unseen instances can be printed, and are compared with fixed policies alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("hundreds", "fixed"),
    [pytest.param(hundreds, 7, marks=pytest.mark.slow) for hundreds in ("1", "2 3", "3")] + [("drawn", 31)],
)
def test_every_recorded_set_of_instances_is_printed(hundreds: str, fixed: int) -> None:
    command = [sys.executable, "benchmarks/unseen.py", "--hundred", *hundreds.split()]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert f"\n{fixed} fixed policies\n" in printed
    best = [int(count) for count in re.findall(r"the best fixed policy on (\d+)", printed)]
    assert len(best) == fixed, "networks are no yardstick"
    assert sum(best) == 100 * len(hundreds.split())
