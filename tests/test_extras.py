"""Ray and Flower are extras: without one, the error names it. `test_architecture.py` checks the imports of all."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = (
    "import importlib.metadata as metadata, sys\n"
    "sys.modules[{package!r}] = None\n"
    "found = metadata.version\n"
    "def version(name):\n"
    "    if name == {package!r}:\n"
    "        raise metadata.PackageNotFoundError(name)\n"
    "    return {version!r} or found(name)\n"
    "metadata.version = version\n"
)
EXTRAS = [("ray", "ray", "Ray"), ("flower", "flwr", "Flower")]


def last_line_of(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    return run.stderr.splitlines()[-1]


@pytest.mark.parametrize(("extra", "package", "name"), EXTRAS)
def test_without_the_package_the_error_names_the_extra(extra: str, package: str, name: str) -> None:
    found = last_line_of(f"{WITHOUT.format(package=package, version='')}import paceline.{extra}")
    assert found == f"ModuleNotFoundError: paceline.{extra} needs {name}: pip install 'paceline[{extra}]'."


@pytest.mark.parametrize(("extra", "package", "name"), EXTRAS)
def test_a_version_outside_the_tested_range_is_refused(extra: str, package: str, name: str) -> None:
    found = last_line_of(f"{WITHOUT.format(package='', version='9.99.0')}import paceline.{extra}")
    assert f"is tested with {name} from" in found
    assert "9.99.0 is installed" in found
