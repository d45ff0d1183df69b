"""Steps of SGD, Adam and AdamW in numpy, for a script that trains alone, and for policies that mix models.

The formulas and the order of their operations are those of torch.optim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.model.optimizer_spec import OptimizerSpec

Floats = npt.NDArray[np.float32]


class LocalStep:
    """The optimizer of one process. It changes the flat weights in place."""

    def __init__(self, spec: OptimizerSpec) -> None:
        """Raise ValueError if there is no step for this optimizer in numpy."""
        if spec.name not in _STEPS:
            known = ", ".join(_STEPS)
            raise ValueError(
                f"Alone, and under a policy that mixes models, paceline.arrays itself makes the optimizer's steps, and "
                f"has {known}: use one of them, or {spec.name} in a job of `paceline run` under another policy."
            )
        self._step = _STEPS[spec.name]
        self._settings: dict[str, Any] = dict(spec.settings_of_groups[0])
        self._state: dict[str, Floats] = {}
        self._count = 0

    def apply(self, weights: Floats, gradient: Floats, rate: float) -> None:
        """Make one step. rate: the learning rate. The gradient may be changed."""
        self._count += 1
        if self._settings["maximize"]:
            np.negative(gradient, out=gradient)
        self._step(weights, gradient, {**self._settings, "lr": rate}, self._state, self._count)


def _sgd(weights: Floats, gradient: Floats, settings: dict[str, Any], state: dict[str, Floats], count: int) -> None:
    if settings["weight_decay"]:
        gradient += np.float32(settings["weight_decay"]) * weights
    if settings["momentum"]:
        momentum = np.float32(settings["momentum"])
        if count == 1:
            state["momentum"] = gradient.copy()
        else:
            state["momentum"] *= momentum
            state["momentum"] += np.float32(1 - settings["dampening"]) * gradient
        gradient = gradient + momentum * state["momentum"] if settings["nesterov"] else state["momentum"]
    weights -= np.float32(settings["lr"]) * gradient


def _adam(weights: Floats, gradient: Floats, settings: dict[str, Any], state: dict[str, Floats], count: int) -> None:
    if settings["weight_decay"]:
        gradient += np.float32(settings["weight_decay"]) * weights
    _adam_without_decay(weights, gradient, settings, state, count)


def _adamw(weights: Floats, gradient: Floats, settings: dict[str, Any], state: dict[str, Floats], count: int) -> None:
    weights *= np.float32(1 - settings["lr"] * settings["weight_decay"])
    _adam_without_decay(weights, gradient, settings, state, count)


def _adam_without_decay(
    weights: Floats, gradient: Floats, settings: dict[str, Any], state: dict[str, Floats], count: int
) -> None:
    first, second = settings["betas"]
    if count == 1:
        state.update({name: np.zeros_like(weights) for name in ("mean", "square", "largest")})
    mean, square = state["mean"], state["square"]
    mean += np.float32(1 - first) * (gradient - mean)
    square *= np.float32(second)
    square += np.float32(1 - second) * gradient * gradient
    if settings["amsgrad"]:
        square = np.maximum(state["largest"], square, out=state["largest"])
    root = np.sqrt(square) / np.float32(math.sqrt(1 - second**count)) + np.float32(settings["eps"])
    weights -= np.float32(settings["lr"] / (1 - first**count)) * mean / root


_STEPS: dict[str, Callable[..., None]] = {"SGD": _sgd, "Adam": _adam, "AdamW": _adamw}
