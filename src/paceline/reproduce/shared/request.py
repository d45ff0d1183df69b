"""The request of a user: quick or full runs, on which device, with which data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.reproduce.shared.rows import Where
from paceline.reproduce.shared.runs import Runs
from paceline.simulate.task import Precision
from paceline.workloads.data import load
from paceline.workloads.errors import DataError

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Request:
    """The settings that every figure's function receives."""

    runs: Runs
    quick: bool = False
    device: str = "cpu"
    folder: Path | None = None  # the folder with data sets

    @property
    def seeds(self) -> tuple[int, ...]:
        return SEEDS[:1] if self.quick else SEEDS

    @property
    def where(self) -> Where:
        return "gpu" if self.device.startswith("cuda") else "simulated"

    @property
    def precision(self) -> Precision:
        """The precision of ResNets and transformers, which run twice as fast in bfloat16 on a GPU."""
        return "bfloat16" if self.where == "gpu" else "float32"

    @cached_property
    def lacks_cifar(self) -> str:
        """Why CIFAR-10 cannot be loaded; empty if it can."""
        return self.lacks("cifar10")

    def lacks(self, data: str) -> str:
        """Return why a data set cannot be loaded, without a final period; empty if it can be loaded."""
        try:
            load(data, self.folder)
        except DataError as error:
            return str(error).removesuffix(".")
        return ""
