"""A training task, its goal and its outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from paceline.model.correction import CorrectionOption, checked, chosen
from paceline.model.optimizer import make as make_optimizer
from paceline.model.optimizer_spec import OptimizerSpec, Setting
from paceline.observe.summary import Report
from paceline.workloads.data import Data, load
from paceline.workloads.networks import parameters_of

#: The number format in which networks compute. bfloat16 rounds, is up to twice as fast, and needs a GPU.
Precision = Literal["float32", "bfloat16"]


class TrainingError(ValueError):
    """A training that cannot be set up. The message is one sentence that says what to do."""


@dataclass(frozen=True)
class LocalSettings:
    """How a federated client trains by itself between two exchanges with the server."""

    steps: int  # τ
    batch: int
    proximal: float = 0.0  # FedProx's μ: how strongly a client is held to the weights it began with


@dataclass(frozen=True)
class Task:
    """A network, its data and its optimizer. Two runs of one Task with the same schedule are the same run."""

    network: str
    data: Data
    optimizer: OptimizerSpec
    seed: int = 0
    decay: tuple[tuple[float, float], ...] = ()  # (epoch from which on, factor of the learning rate)
    correct: CorrectionOption = "none"  # how to correct for staleness
    device: str = "cpu"
    together: bool = True  # compute gradients that are due at the same time together
    local: LocalSettings | None = None  # local training of clients with this optimizer; None: workers push gradients
    precision: Precision = "float32"  # of passes through the network; weights and their updates are always float32
    augment: bool = False  # crop and mirror the training images at random

    def rate(self, epochs: float) -> float:
        """Return the learning rate after this number of epochs."""
        (settings, *_) = self.optimizer.settings_of_groups
        rate = float(settings.get("lr") or 0.0)  # type: ignore[arg-type]
        return rate * math.prod(times for since, times in self.decay if epochs >= since)


@dataclass(frozen=True)
class Goal:
    """The loss or accuracy at which a run stops.

    loss: the mean training loss of a round's updates, as the workers computed it, was at most `value` for `hold`
    rounds. Under every policy a round is as many updates as there are workers.

    accuracy: the accuracy on the test set is at least `value`. It is tested every `every` rounds.
    """

    kind: Literal["loss", "accuracy"]
    value: float
    hold: int = 10
    every: int = 10

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g}"

    def nearer(self, best: float | None, value: float) -> float:
        """Return whichever of two losses or accuracies is nearer to the goal, or further beyond it."""
        if best is None:
            return value
        return max(best, value) if self.kind == "accuracy" else min(best, value)


@dataclass(frozen=True)
class CurvePoint:
    """The state of a run after a round."""

    seconds: float
    samples: int
    loss: float  # mean over the round's updates
    accuracy: float | None = None


@dataclass
class TrainingOutcome:
    """The outcome of a run.

    reached: the point at which the goal was reached, or None.

    best: the lowest loss or the highest accuracy, whichever the goal is about; None if neither was measured.
    """

    policy: str
    goal: Goal | None
    reached: CurvePoint | None = None
    best: float | None = None
    ended: Literal["goal", "rounds", "budget", "diverged", "interrupted"] = "rounds"
    curve: list[CurvePoint] = field(default_factory=list)
    updates: int = 0
    staleness: float = 0.0  # mean over the updates applied so far
    tested: tuple[float, float] | None = None  # loss and accuracy on the test set at the end
    report: Report | None = None


def task_of(
    network: str,
    dataset: str,
    folder: Path | None,
    samples: int,
    optimizer: str,
    settings: Mapping[str, Setting],
    correct: str,
    seed: int,
    device: str,
    precision: str = "float32",
) -> Task:
    """Return a Task from names. Raise ValueError, with one sentence, if one of them is wrong."""
    device_named(device)
    if precision not in get_args(Precision):
        raise TrainingError(f"There is no precision {precision!r}; choose {' or '.join(get_args(Precision))}.")
    if precision != "float32" and not device.startswith("cuda"):
        raise TrainingError(f"On {device} gradients are computed in float32; {precision} needs --device cuda.")
    spec = OptimizerSpec(optimizer, (settings,))
    make_optimizer(spec, [[]])
    data = load(dataset, folder)
    data = data.limited(samples) if samples else data
    parameters_of(network, data)
    task = Task(network, data, spec, seed, (), checked(correct), device, precision=cast(Precision, precision))
    chosen(task.correct, spec)
    return task


def device_named(name: str) -> torch.device:
    """Return a device by its name. Raise TrainingError if it is not available."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise TrainingError(f"There is no device {name!r}; choose cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainingError("There is no CUDA device here; use --device cpu.")
    if device.type not in ("cpu", "cuda"):
        raise TrainingError(f"Gradients can be computed on cpu or cuda, not on {name!r}.")
    return device
