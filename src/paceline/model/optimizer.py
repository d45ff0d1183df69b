"""Convert a live torch.optim optimizer to its specification, and make an optimizer from a specification."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from paceline.model.optimizer_spec import REFUSED, OptimizerSpec, Setting

#: Settings that select an implementation of the step. Worker and server choose their own, for their own devices.
IMPLEMENTATION = frozenset(("foreach", "fused", "capturable", "differentiable"))


def names() -> list[str]:
    """Return the names of the optimizers that can run on a server."""
    found = (name for name, value in vars(torch.optim).items() if _is_optimizer(value))
    return sorted(name for name in found if name not in REFUSED)


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Return the specification of a live optimizer. Raise ValueError if a setting is not a plain value.

    The choice of implementation is left out, and so are entries that schedulers add to the groups (`initial_lr` etc.).
    """
    name = type(optimizer).__name__
    if type(optimizer) is not getattr(torch.optim, name, None):
        known = ", ".join(names())
        raise ValueError(f"{name} is not torch.optim's own, so a server cannot make it; use one of {known}")
    kept = [key for key in optimizer.defaults if key not in IMPLEMENTATION]
    groups = [{key: _plain(name, key, group[key]) for key in kept} for group in optimizer.param_groups]
    for settings in groups:
        # Adagrad reads this setting from its constructor only and ignores the group's value.
        if "initial_accumulator_value" in settings:
            key = "initial_accumulator_value"
            settings[key] = _plain(name, key, optimizer.defaults[key])
    return OptimizerSpec(name, tuple(groups))


def make(spec: OptimizerSpec, groups_of_tensors: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
    """Make an optimizer over these tensors, with one sequence of tensors per group. A group may be empty.

    Raise ValueError with one sentence if torch does not know the optimizer or does not accept its settings.
    """
    if len(groups_of_tensors) != (due := len(spec.settings_of_groups)):
        raise ValueError(f"{spec.name} has settings for {due} groups of tensors, not {len(groups_of_tensors)}")
    for settings in spec.settings_of_groups:
        _trial(spec.name, settings, (1, 1))  # two dimensions, because Muon accepts nothing else
    on = next((tensor.device.type for tensors in groups_of_tensors for tensor in tensors), "cpu")
    chosen = _implementation(spec.name, on)
    if spec.name == "SGD" and not any(settings.get("momentum") for settings in spec.settings_of_groups):
        chosen = {"fused": False, "foreach": False}  # as fast in large steps, and faster in small ones
    groups = [
        {"params": list(tensors), **_without_implementation(settings), **chosen}
        for tensors, settings in zip(groups_of_tensors, spec.settings_of_groups, strict=True)
    ]
    # The first group's settings are also the defaults, because Adagrad fills its state from the defaults.
    arguments = _arguments(spec.name, spec.settings_of_groups[0])
    optimizer: torch.optim.Optimizer = _class_of(spec.name)(groups, **arguments, **chosen)
    return optimizer


def bare_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """Return the optimizer's step function without torch's wrappers for profilers and compilers.

    The wrappers take most of the time of a small step, and they import torch's compiler. Call the function inside
    `torch.no_grad()`.
    """
    step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(kind.step)
    return step


def without_compiler() -> None:
    """Keep torch from importing its compiler into a process that only makes optimizer steps.

    The import takes 1.5 s and 70 MB. torch imports the compiler with the first optimizer, to mark two methods as not to
    be compiled. This function sets the marks beforehand, so torch skips the import. If a later torch looks for the
    marks elsewhere, this function has no effect.
    """
    for marked in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad):
        method = getattr(marked, "__wrapped__", None)
        if method is not None:
            method.__dynamo_disable = method


def trial(spec: OptimizerSpec, group: int, dimensions: int) -> dict[str, Any]:
    """Return the state that this optimizer keeps for a parameter after a step, from a trial with one element."""
    return _trial(spec.name, spec.settings_of_groups[group], (1,) * dimensions)


def _trial(name: str, settings: Mapping[str, Setting], shape: tuple[int, ...]) -> dict[str, Any]:
    """Make one step with these settings and return the state. Raise ValueError if torch rejects the settings.

    Without the trial, torch would reject some settings only during the run.
    """
    kind, chosen = _class_of(name), _implementation(name)
    parameter = _dummy(shape)
    try:
        optimizer = kind([parameter], **_arguments(name, settings), **chosen)
        unknown = sorted(settings.keys() - optimizer.defaults.keys())
        if unknown:
            raise ValueError(f"there is no setting {unknown[0]!r:.80}; there are {', '.join(optimizer.defaults)}")
        optimizer.param_groups[0].update(_without_implementation(settings))
        with torch.no_grad():
            bare_step(kind)(optimizer)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{name} does not accept its settings: {error}") from None
    return dict(optimizer.state[parameter])


@cache
def _implementation(name: str, device: str = "cpu") -> dict[str, bool]:
    """Return the settings of the fastest implementation on this kind of device: fused if it exists, or a plain loop.

    On a CPU, one step over 25M elements in one flat tensor (100 MB), in ms, fused / foreach / plain, best of 7:
                       1 thread              2 threads
        SGD            10.9 / 11.0 / 10.8    6.2 /  5.8 /  5.7
        SGD, momentum  16.2 / 27.1 / 27.0    9.2 / 14.2 / 14.3
        Adam           49.2 / 85.0 / 85.2   25.0 / 43.9 / 43.4
        AdamW          50.1 / 90.7 / 90.0   25.4 / 46.6 / 46.6
        Adagrad        33.2 / 58.7 / 51.9   16.8 / 30.4 / 26.7
        RMSprop           - / 57.3 / 57.1      - / 29.8 / 29.6
    Only plain SGD gains nothing from the fused implementation, and it hardly loses anything.
    """
    kind = _class_of(name)
    known = inspect.signature(kind).parameters
    plain = {"foreach": False} if "foreach" in known else {}
    if "fused" not in known:
        return plain
    try:  # the devices that have a fused kernel differ between versions of torch
        with torch.no_grad():
            bare_step(kind)(kind([_dummy((1,), device)], fused=True, lr=0.0))
    except RuntimeError:
        return plain
    return {"fused": True, **plain}


def _class_of(name: str) -> Any:
    kind = getattr(torch.optim, name, None)
    if not _is_optimizer(kind):
        raise ValueError(f"torch.optim has no optimizer {name!r:.80}; there are {', '.join(names())}")
    return kind


def _is_optimizer(value: object) -> bool:
    base = torch.optim.Optimizer
    return isinstance(value, type) and issubclass(value, base) and value is not base


def _dummy(shape: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    parameter = torch.zeros(shape, dtype=torch.float32, device=device)
    parameter.grad = torch.zeros_like(parameter)
    return parameter


def _without_implementation(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    return {key: value for key, value in settings.items() if key not in IMPLEMENTATION}


def _arguments(name: str, settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the settings that the constructor accepts. Some exist in the groups only (AdamW's decoupled decay)."""
    known = inspect.signature(_class_of(name)).parameters.keys() - IMPLEMENTATION - {"params"}
    return {key: value for key, value in settings.items() if key in known}


def _plain(name: str, key: str, value: object) -> Setting:
    if isinstance(value, list | tuple):
        return tuple(_number(name, key, each) for each in value)
    if isinstance(value, str):
        return value
    return _number(name, key, value)


def _number(name: str, key: str, value: object) -> bool | int | float | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):  # numpy's float32 among them
        return float(value)
    raise ValueError(f"{name}'s setting {key!r} is {value!r:.80}, which cannot be sent to the server as a plain value")
