"""Frozen dataclasses that are fast to create.

Every decision of a policy, every event and every instruction of a job is one. A frozen dataclass of the standard
library takes several times as long to create as a mutable one, because it sets each field by `object.__setattr__`. A
record is created as an instance of a mutable twin class, and its class is changed when its fields are set. Python
allows this because both classes have the same slots.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Turn a class into a frozen dataclass with slots. Defaults must be plain values."""
    made: Any = dataclass(frozen=True, slots=True, init=False)(cls)
    names: dict[str, Any] = {"made": made, "Mutable": type(made.__name__, (), {"__slots__": made.__slots__})}
    parameters, lines = ["cls"], ["self = Mutable()"]
    for each in fields(made):
        lines.append(f"self.{each.name} = {each.name}")
        if each.default is MISSING:
            parameters.append(each.name)
        else:
            names[f"default_{each.name}"] = each.default
            parameters.append(f"{each.name}=default_{each.name}")
    lines += ["self.__class__ = made", "return self"]
    exec(f"def __new__({', '.join(parameters)}):\n " + "\n ".join(lines), names)
    made.__new__ = names["__new__"]
    made.__reduce__ = _reduce
    return made  # type: ignore[no-any-return]


def _reduce(self: Any) -> tuple[type, tuple[Any, ...]]:
    """Let pickle and copy create a record from its fields."""
    return type(self), tuple(getattr(self, each.name) for each in fields(self))
