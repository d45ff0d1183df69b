"""Benchmarks. Run each script by its path: `python benchmarks/wire.py`."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """Return the environment for a process that imports this package."""
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *([known] if known else [])])}
