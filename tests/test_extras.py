"""Libraries of extras: those that are missing, and versions outside the tested range."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paceline.extras import FLOWER, LIGHTNING, RAY, TRANSFORMERS, InstalledLibrary

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS: dict[str, list[str]] = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
#: Extras that no part of the library needs: those of tests and examples.
OF_DEVELOPERS = {"browser", "dev", "recipes"}
COMMAND = "from paceline.cli import main; sys.argv = ['paceline', {}]; main()"
#: For each extra: what it installs, as pip and as Python name it, and code that needs it.
NEEDS: list[tuple[str, set[str], str]] = [
    ("flower", {"flwr"}, "import paceline.flower"),
    ("huggingface", {"transformers"}, "import paceline.huggingface"),
    ("lab", {"pyroute2"}, "from paceline.lab.namespaces import check; check()"),
    ("lightning", {"pytorch-lightning", "pytorch_lightning"}, "import paceline.lightning"),
    ("mlflow", {"mlflow"}, COMMAND.format("'run', '--log', 'mlflow:runs', 'train.py'")),
    ("page", {"starlette"}, COMMAND.format("'run', '--page', '0', 'train.py'")),
    ("page", {"uvicorn"}, COMMAND.format("'run', '--page', '0', 'train.py'")),
    ("plot", {"matplotlib"}, COMMAND.format("'run', '--plot', 'curve.png', 'train.py'")),
    ("prometheus", {"prometheus_client"}, COMMAND.format("'run', '--metrics', '0', 'train.py'")),
    ("ray", {"ray"}, "import paceline.ray"),
    ("rlp", {"gymnasium"}, "import paceline.rlp.environment"),
    ("tensorboard", {"tensorboardX"}, COMMAND.format("'run', '--log', 'tensorboard:runs', 'train.py'")),
    ("torch", {"torch"}, "import paceline; paceline.join"),
    ("torch", {"torch"}, "import paceline.federated"),
    ("torch", {"torch"}, COMMAND.format("'run', 'train.py'")),
    ("transformers", {"transformers"}, "from paceline.workloads.language import _transformers; _transformers('bert')"),
    ("wandb", {"wandb"}, COMMAND.format("'run', '--log', 'wandb:project', 'train.py'")),
]
MISSING = """
import sys
from importlib import metadata

missing, version = {missing!r}, metadata.version
sys.modules.update(dict.fromkeys(missing))  # an import of them fails from now on

def version_unless_missing(name):
    if name in missing:
        raise metadata.PackageNotFoundError(name)
    return version(name)

metadata.version = version_unless_missing
"""


def test_each_extra_has_a_case() -> None:
    assert {extra for extra, *_ in NEEDS} == EXTRAS.keys() - OF_DEVELOPERS


@pytest.mark.parametrize(
    ("extra", "missing", "code"),
    [
        pytest.param(*each, id=f"{each[0]}-{number}", marks=pytest.mark.slow if each[0] == "transformers" else ())
        for number, each in enumerate(NEEDS)
    ],
)
def test_what_needs_a_missing_library_names_the_extra(extra: str, missing: set[str], code: str, tmp_path: Path) -> None:
    if extra != "torch" and ("main()" in code or extra == "transformers"):
        pytest.importorskip("torch")  # it is looked for first
    (tmp_path / "train.py").touch()
    script = MISSING.format(missing=missing) + code
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    *before, said = run.stderr.splitlines()
    assert f"paceline[{extra}]" in said
    assert " needs " in said
    if "main()" in code:
        assert (run.returncode, before) == (2, [])


@pytest.mark.parametrize(
    ("version", "tested"),
    [("2.60.0", True), ("2.60.1rc1", True), ("2.59.1", False), ("2.61.0", False), ("3.0", False), ("2", False)],
)
def test_the_range_of_versions(version: str, tested: bool) -> None:
    assert RAY.is_tested(version) == tested


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.9.3")
    with pytest.raises(ImportError, match=r"tested with Ray from 2\.60 to below 2\.61, and 2\.9\.3 is installed: pip"):
        RAY.check()


def test_a_library_that_is_not_installed() -> None:
    library = InstalledLibrary("Sunflower", "no-such-package", "flower", (1, 0), (2, 0))
    with pytest.raises(ModuleNotFoundError, match=r"needs Sunflower: pip install 'paceline\[flower\]'\.$"):
        library.check()


@pytest.mark.parametrize("library", [RAY, FLOWER, LIGHTNING, TRANSFORMERS], ids=lambda library: library.extra)
def test_the_extra_installs_the_tested_range(library: InstalledLibrary) -> None:
    needed = next(each for each in EXTRAS[library.extra] if each.startswith(library.package))
    first, before = (".".join(map(str, each)) for each in (library.first, library.before))
    assert f">={first}" in needed
    assert f"<{before}" in needed
