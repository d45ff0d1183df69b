"""Which optimizer, as plain values that can be sent and stored: never code, never a pickle. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Number: TypeAlias = bool | int | float | None
Setting: TypeAlias = Number | str | tuple[Number, ...]

#: An element's update depends on that element alone (and on numbers that all share), so slices are cut anywhere.
ELEMENTWISE = frozenset(
    ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)
#: What cannot run on a server, and why.
REFUSED = {
    "LBFGS": "LBFGS cannot run on the server: its step calls back into the model (a closure); use SGD or Adam",
    "SparseAdam": "SparseAdam cannot run on the server: it needs sparse gradients, and those sent are dense; use Adam",
}


def is_elementwise(name: str) -> bool:
    """May a tensor be cut in two under this optimizer? False for those that look at a whole tensor, and if unknown."""
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

    def as_json(self) -> dict[str, object]:
        """As values that JSON knows; `from_json` reads them back."""
        return {
            "name": self.name,
            "groups": [
                {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
                for settings in self.settings_of_groups
            ],
        }

    @classmethod
    def from_json(cls, value: object) -> OptimizerSpec:
        """Read what `as_json` wrote. Whatever else it is given: ValueError with one sentence."""
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
    """None is one: Adafactor has it in a tuple. NaN and infinity are not: JSON has no word for them."""
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


#: What a server does with changes of a model: it adds them up.
SUMS = OptimizerSpec("SGD", ({"lr": 1.0},))
