"""The specification of an optimizer, in plain values that can be sent and stored without pickle. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Number: TypeAlias = bool | int | float | None
Setting: TypeAlias = Number | str | tuple[Number, ...]

MAX_SHOWN = 200  # letters of a specification as people read it
#: Optimizers that update each element from that element alone (and shared numbers). A tensor may be cut anywhere.
ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)
#: Optimizers that cannot run on a server, and why.
REFUSED = {
    "LBFGS": "LBFGS cannot run on the server: its step calls back into the model (a closure); use SGD or Adam",
    "SparseAdam": "SparseAdam cannot run on the server: it needs sparse gradients, and these are dense; use Adam",
}


def is_elementwise(name: str) -> bool:
    """Return True if a tensor may be cut in two under this optimizer. False also for an unknown optimizer."""
    return name in ELEMENTWISE


@dataclass(frozen=True)
class OptimizerSpec:
    """The name of a class in torch.optim, and the settings of each of its parameter groups."""

    name: str
    settings_of_groups: tuple[Mapping[str, Setting], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"an optimizer's name must be that of a class in torch.optim, not {self.name!r:.80}")
        if self.name in REFUSED:
            raise ValueError(REFUSED[self.name])
        if not self.settings_of_groups:
            raise ValueError(f"{self.name} needs at least one parameter group")
        for settings in self.settings_of_groups:
            for key, value in settings.items():
                if not isinstance(key, str) or not _is_setting(value):
                    raise ValueError(
                        f"{self.name}'s setting {key!r:.80} must be a finite number, a bool, None, a string or a tuple "
                        f"of numbers, not {value!r:.80}"
                    )

    def __str__(self) -> str:
        """Return the name and the settings of the first group, for people: "SGD(lr=0.1, momentum=0.9)"."""
        settings = self.settings_of_groups[0].items()
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in settings if value)})"[:MAX_SHOWN]

    def as_json(self) -> dict[str, object]:
        """Return the specification as JSON values."""
        return {
            "name": self.name,
            "groups": [
                {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
                for settings in self.settings_of_groups
            ],
        }

    @classmethod
    def from_json(cls, value: object) -> OptimizerSpec:
        """Return the specification that `as_json` wrote. Raise ValueError with one sentence if it is not one."""
        match value:
            case {"name": str(name), "groups": list(groups), **rest} if not rest:
                if all(isinstance(settings, dict) for settings in groups):
                    return cls(name, tuple({key: _tupled(each) for key, each in group.items()} for group in groups))
        raise ValueError('an optimizer must be an object with "name", a string, and "groups", a list of objects')


def _tupled(value: Setting | list[Number]) -> Setting:
    return tuple(value) if isinstance(value, list) else value


def _is_setting(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_number(each) for each in value)
    return isinstance(value, str) or _is_number(value)


def _is_number(value: object) -> bool:
    """Return True for a finite number or None. Adafactor has None in a tuple; JSON has no NaN or infinity."""
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


#: The optimizer of a server that adds up the changes that workers push.
SUMS = OptimizerSpec("SGD", ({"lr": 1.0},))
