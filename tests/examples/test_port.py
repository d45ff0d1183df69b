"""A typical training script before and after porting: the size of the change, and that both versions train."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")
pytestmark = pytest.mark.skipif(not find_spec("sklearn"), reason="the example takes its digits from scikit-learn")

ROOT = Path(__file__).parents[2]
BEFORE, AFTER = ROOT / "examples/port/before.py", ROOT / "examples/port/after.py"
QUICK = ["--epochs", "1", "--log-interval", "1000"]


def difference() -> list[str]:
    """Return the output of `diff -U1` without line numbers."""
    lines = difflib.unified_diff(BEFORE.read_text().splitlines(), AFTER.read_text().splitlines(), n=1, lineterm="")
    return ["@@" if line.startswith("@@") else line for line in list(lines)[2:]]


def test_no_more_than_six_lines_change() -> None:
    """Removed and added lines both count."""
    changed = [line for line in difference() if line[0] in "+-"]
    assert 0 < len(changed) <= 6
    assert "paceline" not in BEFORE.read_text()


def test_the_guide_shows_the_current_difference() -> None:
    shown = re.search(r"```diff\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    assert shown is not None
    assert [line.rstrip() for line in shown[1].splitlines()] == [line.rstrip() for line in difference()]


def trained(command: list[str], saved: Path) -> float:
    """Run a script, check that it has saved its model, and return the best accuracy that it printed."""
    command = [*command, *QUICK, "--save-model", str(saved)]
    run = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == 0, run.stderr
    assert "training on the small digits" in run.stdout
    assert set(torch.load(saved, weights_only=True)) == {
        f"{layer}.{kind}" for layer in ("conv1", "conv2", "fc1", "fc2") for kind in ("weight", "bias")
    }
    return max(float(found) for found in re.findall(r"accuracy ([0-9.]+)%", run.stdout))


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("script", [AFTER, BEFORE], ids=["after", "before"])
def test_both_versions_train_alone(script: Path, tmp_path: Path) -> None:
    assert trained([str(script)], tmp_path / "model.pt") > 70


@pytest.mark.slow
def test_the_ported_version_trains_with_several_workers(tmp_path: Path) -> None:
    command = ["-m", "paceline", "run", "--workers", "2", "--policy", "r2sp:weights=mean", str(AFTER)]
    assert trained(command, tmp_path / "together.pt") > 50
