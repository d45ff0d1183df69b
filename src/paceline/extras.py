"""Libraries that an extra of paceline installs, and the versions of them that are tested."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class InstalledLibrary:
    """A library in the range of versions that the extra of pyproject.toml installs."""

    name: str  # as people write it
    package: str  # as pip knows it
    extra: str
    first: tuple[int, int]
    before: tuple[int, int]

    def check(self) -> None:
        """Raise ImportError if the library is not installed, or is of a version outside the tested range."""
        install = f"pip install 'paceline[{self.extra}]'."
        try:
            version = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            message = f"paceline.{self.extra} needs {self.name}: {install}"
            raise ModuleNotFoundError(message, name=self.package) from None
        if not self.is_tested(version):
            first, before = (".".join(map(str, each)) for each in (self.first, self.before))
            raise ImportError(
                f"paceline.{self.extra} is tested with {self.name} from {first} to below {before}, "
                f"and {version} is installed: {install}"
            )

    def is_tested(self, version: str) -> bool:
        """Return whether a version lies in the tested range."""
        found = re.match(r"(\d+)\.(\d+)", version)
        return found is not None and self.first <= (int(found[1]), int(found[2])) < self.before


RAY = InstalledLibrary("Ray", "ray", "ray", (2, 60), (2, 61))
FLOWER = InstalledLibrary("Flower", "flwr", "flower", (1, 41), (1, 43))
TRANSFORMERS = InstalledLibrary("transformers", "transformers", "huggingface", (5, 22), (5, 23))
LIGHTNING = InstalledLibrary("Lightning", "pytorch-lightning", "lightning", (2, 5), (2, 7))
UNIFIED_LIGHTNING = InstalledLibrary("Lightning", "lightning", "lightning", (2, 5), (2, 7))
