"""Runs of a strategy on virtual nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Result, Strategy

from on_flower.virtual import Train, VirtualClock, VirtualGrid, VirtualNode
from paceline.flower import PolicyStrategy
from paceline.flower.run import RunOptions
from paceline.observe.observer import Recorder
from paceline.observe.trace import Event

ROUNDS = 5

#: The policies that a federation is likely to use. They are tested in every run, and the others by samples.
FEDERATED = ("bsp", "bsp:fraction=0.6", "fl-r2sp", "fl-r2sp:groups=2", "fedbuff", "safa", "filtered")


def sampled(*cases: Any, always: Callable[[Any], bool]) -> list[Any]:
    """Return cases of a test. Those that need not run always belong to the matrix."""
    return [pytest.param(*case, marks=() if always(case) else pytest.mark.matrix) for case in cases]


def policies(specs: Iterable[str]) -> list[Any]:
    """Return policies as cases of a test."""
    return sampled(*((spec,) for spec in specs), always=lambda case: case[0] in FEDERATED)


def towards(*target: float) -> Train:
    """Return a training that moves the model a tenth of the way to a target."""

    def train(arrays: dict[str, Any], trained: int) -> dict[str, Any]:
        return {"w": arrays["w"] + 0.1 * (np.asarray(target, np.float32) - arrays["w"])}

    return train


def nodes_of(count: int = 8, seconds: float = 10.0) -> list[VirtualNode]:
    """Return nodes of unequal speed. Each has a target of its own."""
    return [
        VirtualNode(seconds * (1 + 0.1 * number), towards(5.0, number / 7, 0.0), examples=10 + number)
        for number in range(count)
    ]


class VirtualRun:
    """A PolicyStrategy on virtual nodes, and the trace of its run."""

    def __init__(
        self,
        policy: str,
        nodes: list[VirtualNode],
        wraps: Strategy | None = None,
        checkpoint: Path | None = None,
        grid: VirtualGrid | None = None,
        interval: float = 0.5,
        threads: int = 0,
    ) -> None:
        self.events: list[Event] = []
        self.strategy = PolicyStrategy(policy, wraps)
        self.grid = grid or VirtualGrid(VirtualClock(), nodes)
        self.strategy.options = RunOptions(interval, checkpoint, Recorder(self.events.append), self.grid.clock, threads)

    def start(self, rounds: int = ROUNDS, **options: Any) -> Result:
        return started(self.strategy, self.grid, rounds, **options)


def started(strategy: Strategy, grid: VirtualGrid, rounds: int = ROUNDS, **options: Any) -> Result:
    """Return the result of a strategy on these nodes, from a model of three zeros."""
    return strategy.start(grid, ArrayRecord({"w": Array(np.zeros(3, np.float32))}), rounds, **options)


def weights(result: Result) -> Any:
    """Return the model of a result."""
    return result.arrays["w"].numpy()
