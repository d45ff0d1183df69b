"""What was asked for: how long it may take, on which device, with which data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.reproduce.shared.rows import Where
from paceline.reproduce.shared.runs import Runs
from paceline.simulate.task import Precision
from paceline.workloads.data import DataError, load

SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Request:
    """Given to every figure's function."""

    runs: Runs
    quick: bool = False
    device: str = "cpu"
    folder: Path | None = None  # with data

    @property
    def seeds(self) -> tuple[int, ...]:
        return SEEDS[:1] if self.quick else SEEDS

    @property
    def where(self) -> Where:
        return "gpu" if self.device.startswith("cuda") else "simulated"

    @property
    def precision(self) -> Precision:
        """Of ResNets and transformers, which are twice as quick on a GPU in bfloat16."""
        return "bfloat16" if self.where == "gpu" else "float32"

    @cached_property
    def lacks_cifar(self) -> str:
        """Why CIFAR-10 cannot be trained on; empty if it can."""
        return self.lacks("cifar10")

    def lacks(self, data: str) -> str:
        """Why that set cannot be trained on; empty if it can."""
        try:
            load(data, self.folder)
        except DataError as error:
            return str(error)
        return ""
