"""What is trained, how, and until when; and what a training comes to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from paceline.model.correction import Asked, checked, chosen
from paceline.model.optimizer import OptimizerSpec
from paceline.model.optimizer import make as make_optimizer
from paceline.model.optimizer_spec import Setting
from paceline.observe.summary import Report
from paceline.workloads.data import Data, load
from paceline.workloads.networks import parameters_of

#: What networks compute in. bfloat16 rounds, and is up to twice as quick on a GPU; it is for those alone.
Precision = Literal["float32", "bfloat16"]


class TrainingError(ValueError):
    """One sentence that says what to do."""


@dataclass(frozen=True)
class LocalSettings:
    """How a federated client trains by itself, between two exchanges with the server."""

    steps: int  # τ
    batch: int
    proximal: float = 0.0  # FedProx's μ: how much it is held to where it began


@dataclass(frozen=True)
class Task:
    """What is trained, and how. Two runs of one Task under one schedule are the same run."""

    network: str
    data: Data
    optimizer: OptimizerSpec
    seed: int = 0
    decay: tuple[tuple[float, float], ...] = ()  # from which epoch on the learning rate is times what
    correct: Asked = "none"  # how staleness is corrected for
    device: str = "cpu"
    together: bool = True  # compute what is due at the same time together
    local: LocalSettings | None = (
        None  # how clients train by themselves, with this optimizer; None: they push gradients
    )
    precision: Precision = "float32"  # of passes through the network; weights and their updates are float32 always

    def rate(self, epochs: float) -> float:
        """The learning rate after so many epochs."""
        (settings, *_) = self.optimizer.settings_of_groups
        rate = float(settings.get("lr") or 0.0)  # type: ignore[arg-type]
        return rate * math.prod(times for since, times in self.decay if epochs >= since)


@dataclass(frozen=True)
class Goal:
    """When a run has learned enough.

    loss: the mean training loss of a round's updates, as workers saw it, has been at most `value` for `hold` rounds. A
    round is as many updates as there are workers, under every policy.
    accuracy: on the test set, at least `value`, once every `every` rounds.
    """

    kind: Literal["loss", "accuracy"]
    value: float
    hold: int = 10
    every: int = 10

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g}"

    def nearer(self, best: float | None, value: float) -> float:
        """Of two losses or accuracies the one that is nearer to the goal, or beyond it."""
        if best is None:
            return value
        return max(best, value) if self.kind == "accuracy" else min(best, value)


@dataclass(frozen=True)
class CurvePoint:
    """Where a run was after a round."""

    seconds: float
    samples: int
    loss: float  # mean of the round's updates
    accuracy: float | None = None


@dataclass
class TrainingOutcome:
    """What a run came to. `reached` is None where its goal was not reached: then `best` says how near it came.

    best: the lowest loss or the highest accuracy, whichever the goal asks for; None if there was neither.
    """

    policy: str
    goal: Goal | None
    reached: CurvePoint | None = None
    best: float | None = None
    ended: Literal["goal", "rounds", "budget", "diverged", "interrupted"] = "rounds"
    curve: list[CurvePoint] = field(default_factory=list)
    updates: int = 0
    staleness: float = 0.0  # mean of the updates applied so far
    tested: tuple[float, float] | None = None  # loss and accuracy on the test set, at the end
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
    """A Task from names. What is wrong with any of them: ValueError with one sentence, before anything runs."""
    device_named(device)
    if precision not in get_args(Precision):
        raise TrainingError(f"There is no precision {precision!r}; say {' or '.join(get_args(Precision))}.")
    if precision != "float32" and not device.startswith("cuda"):
        raise TrainingError(f"On {device} gradients are computed in float32; {precision} is for --device cuda.")
    spec = OptimizerSpec(optimizer, (settings,))
    make_optimizer(spec, [[]])
    data = load(dataset, folder)
    data = data.limited(samples) if samples else data
    parameters_of(network, data)
    task = Task(network, data, spec, seed, (), checked(correct), device, precision=cast(Precision, precision))
    chosen(task.correct, spec)
    return task


def device_named(name: str) -> torch.device:
    """The device, if it is there. Else: one sentence."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise TrainingError(f"There is no device {name!r}; say cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainingError("There is no CUDA device here; say --device cpu.")
    if device.type not in ("cpu", "cuda"):
        raise TrainingError(f"Training is simulated on cpu or cuda, not on {name!r}.")
    return device
