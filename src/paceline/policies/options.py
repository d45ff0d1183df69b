"""Options of a policy: declared once, in the signature of its `__init__`, and checked whatever their source.

    def __init__(self, staleness: Annotated[int, Range(0), "iterations ahead of the slowest"] = 3) -> None: ...

The same declaration checks direct construction, parses `ssp:staleness=5` and documents `paceline policies`.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])


class PolicyError(ValueError):
    """A policy cannot be made as requested. The message is one sentence that says what to do."""


@dataclass(frozen=True)
class Range:
    """A range of allowed numbers. It includes both ends, except the low one if `open_low`."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False

    def allows(self, value: float) -> bool:
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        above = f"above {self.low:g}" if self.open_low else f"of at least {self.low:g}"
        if math.isinf(self.high):
            return above
        if math.isinf(self.low):
            return f"of at most {self.high:g}"
        return f"{above} and at most {self.high:g}" if self.open_low else f"from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Option:
    """One declared option of a policy."""

    name: str
    kinds: tuple[type, ...]  # bool, int, float, str, or classes that only direct construction accepts
    words: tuple[str, ...]  # the allowed words of a Literal
    range: Range
    default: Any
    help: str

    @property
    def expected(self) -> str:
        """Describe the accepted values."""
        parts = list(self.words)
        if bool in self.kinds:
            parts.append("true or false")
        if int in self.kinds or float in self.kinds:
            noun = "a number" if float in self.kinds else "a whole number"
            bounded = not (math.isinf(self.range.low) and math.isinf(self.range.high))
            parts.append(f"{noun} {self.range}" if bounded else noun)
        if self.kinds == (str,):
            parts.append("a file name")
        elif any(kind not in (bool, int, float) for kind in self.kinds):
            parts.append("a policy, in parentheses if it has options")
        return " or ".join(parts)

    def takes(self, base: type) -> bool:
        """Return whether the option accepts objects of a class, or of a subclass."""
        return any(isinstance(kind, type) and issubclass(kind, base) for kind in self.kinds)

    def parse(self, text: str) -> Any:
        """Return the value that `text` stands for. Raise ValueError if there is none."""
        if text in self.words:
            return text
        if bool in self.kinds and text.lower() in ("true", "false"):
            return text.lower() == "true"
        for kind in (int, float):
            if kind in self.kinds:
                try:
                    return kind(text)
                except ValueError:
                    pass
        if str in self.kinds:
            return text
        raise ValueError(text)

    def accepts(self, value: Any) -> bool:
        """Return whether a value has an accepted type and is within the range."""
        if isinstance(value, bool):
            return bool in self.kinds
        if isinstance(value, int | float):
            if not (float in self.kinds or (int in self.kinds and isinstance(value, int))):
                return False
            return math.isfinite(value) and self.range.allows(value)
        if isinstance(value, str):
            return value in self.words or str in self.kinds
        return any(isinstance(value, kind) for kind in self.kinds)


@functools.cache
def options_of(init: Callable[..., Any]) -> dict[str, Option]:
    """Return the options that a policy's `__init__` declares."""
    function = inspect.unwrap(init)
    hints = get_type_hints(function, include_extras=True)
    found = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue  # a policy without its own __init__ has that of object
        hint: Any = hints.get(parameter.name, str)
        notes: tuple[Any, ...] = ()
        if hasattr(hint, "__metadata__"):
            hint, notes = hint.__origin__, hint.__metadata__
        members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        found[parameter.name] = Option(
            name=parameter.name,
            kinds=tuple(kind for kind in members if get_origin(kind) is not Literal),
            words=tuple(word for kind in members if get_origin(kind) is Literal for word in get_args(kind)),
            range=next((note for note in notes if isinstance(note, Range)), Range()),
            default=parameter.default,
            help=next((note for note in notes if isinstance(note, str)), ""),
        )
    return found


def shown(value: Any) -> str:
    """Return a value as text, as it is written in an option."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def checked(init: F) -> F:
    """Wrap an `__init__` so that it refuses values that its declared options do not accept."""

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(init).bind(self, *args, **kwargs).arguments
        for name, option in options_of(init).items():
            if name in given and not option.accepts(given[name]):
                policy = type(self).__name__.lower()
                raise PolicyError(f"{policy}: {name} must be {option.expected}, not {shown(given[name])!r}.")
        init(self, *args, **kwargs)

    return wrapper  # type: ignore[return-value]
