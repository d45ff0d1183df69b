"""The versions of Ray that paceline is tested with."""

from __future__ import annotations

import re
from importlib import metadata

FIRST, BEFORE = (2, 60), (2, 61)  # the range that the extra `ray` of pyproject.toml installs
MISSING = "paceline.ray needs Ray: pip install 'paceline[ray]'."


def check() -> None:
    """Raise ImportError if Ray is not installed, or is of a version outside the tested range."""
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError(MISSING, name="ray") from None
    if not is_tested(version):
        first, before = (".".join(map(str, each)) for each in (FIRST, BEFORE))
        raise ImportError(
            f"paceline.ray is tested with Ray from {first} to below {before}, and {version} is installed: "
            "pip install 'paceline[ray]'."
        )


def is_tested(version: str) -> bool:
    """Return whether a version of Ray lies in the tested range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and FIRST <= (int(found[1]), int(found[2])) < BEFORE
