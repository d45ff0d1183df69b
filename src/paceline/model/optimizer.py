"""From a live torch.optim optimizer to its spec, and from a spec to an optimizer over the server's own tensors."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from paceline.model.optimizer_spec import REFUSED, OptimizerSpec, Setting, is_elementwise

__all__ = ["OptimizerSpec", "bare_step", "is_elementwise", "make", "names", "spec_of", "trial", "without_compiler"]

#: Settings that say how a step is computed, not what it is. The worker's device decides them there, we here.
IMPLEMENTATION = frozenset(("foreach", "fused", "capturable", "differentiable"))


def names() -> list[str]:
    """The optimizers that can run on a server."""
    found = (name for name, value in vars(torch.optim).items() if _is_optimizer(value))
    return sorted(name for name in found if name not in REFUSED)


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Read the spec from a live optimizer. What cannot be said in plain values: ValueError with one sentence.

    Left out are the choice of implementation and what schedulers leave in the groups (`initial_lr` and the like).
    """
    name = type(optimizer).__name__
    if type(optimizer) is not getattr(torch.optim, name, None):
        there = ", ".join(names())
        raise ValueError(f"{name} is not torch.optim's own, so a server cannot make it; there are {there}")
    kept = [key for key in optimizer.defaults if key not in IMPLEMENTATION]
    groups = [{key: _plain(name, key, group[key]) for key in kept} for group in optimizer.param_groups]
    for settings in groups:
        # Adagrad takes this one from its constructor alone, whatever a group says.
        if "initial_accumulator_value" in settings:
            key = "initial_accumulator_value"
            settings[key] = _plain(name, key, optimizer.defaults[key])
    return OptimizerSpec(name, tuple(groups))


def make(spec: OptimizerSpec, groups_of_tensors: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
    """The optimizer over these tensors, one sequence a group; a group may be empty.

    A spec that torch does not know, or whose settings it does not accept: ValueError with one sentence.
    """
    if len(groups_of_tensors) != (due := len(spec.settings_of_groups)):
        raise ValueError(f"{spec.name} has settings for {due} groups of tensors, not {len(groups_of_tensors)}")
    for settings in spec.settings_of_groups:
        _trial(spec.name, settings, (1, 1))  # Two dimensions: Muon takes nothing else.
    on = next((tensor.device.type for tensors in groups_of_tensors for tensor in tensors), "cpu")
    chosen = _implementation(spec.name, on)
    if spec.name == "SGD" and not any(settings.get("momentum") for settings in spec.settings_of_groups):
        chosen = {"fused": False, "foreach": False}  # as quick in large steps, and less ado in small ones
    groups = [
        {"params": list(tensors), **_without_implementation(settings), **chosen}
        for tensors, settings in zip(groups_of_tensors, spec.settings_of_groups, strict=True)
    ]
    # The first group's settings are the defaults too: Adagrad fills its state from those.
    arguments = _arguments(spec.name, spec.settings_of_groups[0])
    optimizer: torch.optim.Optimizer = _class_of(spec.name)(groups, **arguments, **chosen)
    return optimizer


def bare_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """Makes a step without what torch wraps it in for profilers and compilers; to be called without gradients on.

    Of a small step those wraps are the most, and they bring torch's compiler along.
    """
    step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(kind.step)
    return step


def without_compiler() -> None:
    """Spare this process torch's compiler, if it only makes steps: to import it takes 1.5 s and 70 MB.

    torch imports it with the first optimizer, to mark methods as not to be compiled. Where the mark is there, it does
    not. Should a later torch look for it elsewhere, this does nothing.
    """
    for marked in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad):
        method = getattr(marked, "__wrapped__", None)
        if method is not None:
            method.__dynamo_disable = method


def trial(spec: OptimizerSpec, group: int, dimensions: int) -> dict[str, Any]:
    """What this optimizer remembers of a parameter once it has made a step, tried on a parameter of one element."""
    return _trial(spec.name, spec.settings_of_groups[group], (1,) * dimensions)


def _trial(name: str, settings: Mapping[str, Setting], shape: tuple[int, ...]) -> dict[str, Any]:
    """One step with these settings, so that what torch minds in them comes out here and not in the midst of a run."""
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
    """The quickest implementation that there is on this kind of device: fused, else the plain loop.

    On a CPU, one step over 25M elements in one flat tensor (100 MB), in ms, fused / foreach / plain, best of 7:
                       1 thread              2 threads
        SGD            10.9 / 11.0 / 10.8    6.2 /  5.8 /  5.7
        SGD, momentum  16.2 / 27.1 / 27.0    9.2 / 14.2 / 14.3
        Adam           49.2 / 85.0 / 85.2   25.0 / 43.9 / 43.4
        AdamW          50.1 / 90.7 / 90.0   25.4 / 46.6 / 46.6
        Adagrad        33.2 / 58.7 / 51.9   16.8 / 30.4 / 26.7
        RMSprop           - / 57.3 / 57.1      - / 29.8 / 29.6
    Plain SGD alone gains nothing from it, and loses nothing that counts.
    """
    kind = _class_of(name)
    known = inspect.signature(kind).parameters
    plain = {"foreach": False} if "foreach" in known else {}
    if "fused" not in known:
        return plain
    try:  # Which devices have a fused kernel differs from one torch to the next: ask by trying.
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
    """Those of the settings that the constructor takes. Some live in the groups alone (AdamW's decoupled decay)."""
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
