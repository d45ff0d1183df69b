"""Frozen dataclasses that are made quickly.

Every decision of a policy is one, and so is every event and every instruction of a job. The standard library's frozen
dataclass takes several times as long to make as one that can be changed, since it writes each field by
`object.__setattr__`. Here an instance is filled as an instance of a twin class that is not frozen. Then its class is
set. Both classes have the same slots, so Python allows that.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Make a frozen dataclass with slots of a class. Defaults must be plain values."""
    made: Any = dataclass(frozen=True, slots=True, init=False)(cls)
    names: dict[str, Any] = {"made": made, "Open": type(made.__name__, (), {"__slots__": made.__slots__})}
    parameters, lines = ["cls"], ["self = Open()"]
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
    """For pickle and copy: make it anew from its fields."""
    return type(self), tuple(getattr(self, each.name) for each in fields(self))
