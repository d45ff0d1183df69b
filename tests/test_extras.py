"""Libraries of extras: those that are missing, and versions outside the tested range."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from paceline.extras import FLOWER, LIGHTNING, RAY, TRANSFORMERS, InstalledLibrary

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


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
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    needed = next(each for each in extras[library.extra] if each.startswith(library.package))
    first, before = (".".join(map(str, each)) for each in (library.first, library.before))
    assert f">={first}" in needed
    assert f"<{before}" in needed
