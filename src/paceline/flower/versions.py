"""The versions of Flower that paceline is tested with."""

from __future__ import annotations

import re
from importlib import metadata

FIRST, BEFORE = (1, 41), (1, 43)  # the range that the extra `flower` of pyproject.toml installs
MISSING = "paceline.flower needs Flower: pip install 'paceline[flower]'."


def check() -> None:
    """Raise ImportError if Flower is not installed, or is of a version outside the tested range."""
    try:
        version = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError(MISSING, name="flwr") from None
    if not is_tested(version):
        first, before = (".".join(map(str, each)) for each in (FIRST, BEFORE))
        raise ImportError(
            f"paceline.flower is tested with Flower from {first} to below {before}, and {version} is installed: "
            "pip install 'paceline[flower]'."
        )


def is_tested(version: str) -> bool:
    """Return whether a version of Flower lies in the tested range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and FIRST <= (int(found[1]), int(found[2])) < BEFORE
