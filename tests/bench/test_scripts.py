"""Every benchmark can be run by its path, from any folder, without an installed `benchmarks` package."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_finds_its_own_package(script: Path) -> None:
    text = script.read_text()
    if "from benchmarks" in text and '__name__ == "__main__"' in text:
        assert "sys.path.insert" in text.partition("from benchmarks")[0]
