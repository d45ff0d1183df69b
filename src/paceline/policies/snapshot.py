"""Save and restore a policy's whole state as plain JSON values, without pickle. Loading a snapshot runs no code.

A policy's state is the tree of its attributes. Classes are named by `module:Class`. A snapshot may only name classes of
paceline's own policies and of modules that already define a policy in this process. Their constructors are not called.
So import your own policy before you restore one.

`encode` and `decode` do the same for an object that holds a policy, such as a job.
"""

from __future__ import annotations

import importlib
import math
from collections import deque
from enum import Enum
from typing import Any, NamedTuple

from paceline.policies.contract import Policy
from paceline.policies.options import PolicyError
from paceline.policies.registry import packages


def save(policy: Policy) -> dict[str, Any]:
    """Return a policy's state, ready for `json.dumps`."""
    return {"policy": _path(type(policy)), "state": encode(policy)}


def load(saved: dict[str, Any]) -> Policy:
    """Return the policy that was saved. It makes the same decisions as the saved one would."""
    policy = decode(saved.get("state"))
    if not isinstance(policy, Policy):
        raise PolicyError("The saved state is not that of a policy.")
    return policy


def encode(value: Any, also: tuple[str, ...] = ()) -> Any:
    """Return a value as plain JSON values. also: prefixes of further modules whose classes are accepted."""
    return _encode(value, _AllowedModules(_modules_of(Policy), packages() + also), {})


def decode(value: Any, also: tuple[str, ...] = ()) -> Any:
    """Return the value that was encoded. Raise PolicyError if it names a foreign class or cannot be read."""
    try:
        return _decode(value, _AllowedModules(_modules_of(Policy), packages() + also), {})
    except PolicyError:
        raise
    except (LookupError, TypeError, AttributeError, ImportError, ValueError) as error:
        raise PolicyError(f"The saved state cannot be read: {error!r}.") from None


def _modules_of(cls: type[Any]) -> set[str]:
    """Return the modules that define a subclass of `cls`."""
    modules = {cls.__module__}
    for child in cls.__subclasses__():
        modules |= _modules_of(child)
    return modules


class _AllowedModules(NamedTuple):
    """The modules whose classes a snapshot may name."""

    modules: set[str]
    prefixes: tuple[str, ...]  # of the names of further modules

    def contain(self, module_name: str) -> bool:
        return module_name in self.modules or module_name.startswith(self.prefixes)


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _attributes(thing: Any) -> dict[str, Any]:
    slots = {name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())}
    found = {name: getattr(thing, name) for name in sorted(slots) if hasattr(thing, name)}
    return found | getattr(thing, "__dict__", {})


def _encode(value: Any, allowed: _AllowedModules, seen: dict[int, int]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(value)}
    if type(value) is list:
        return [_encode(item, allowed, seen) for item in value]
    if type(value) is dict:
        return {"dict": [[_encode(key, allowed, seen), _encode(item, allowed, seen)] for key, item in value.items()]}
    if type(value) is deque:
        return {"deque": [_encode(item, allowed, seen) for item in value], "maxlen": value.maxlen}
    if type(value) in (tuple, set, frozenset):
        items = value if isinstance(value, tuple) else sorted(value)
        return {type(value).__name__: [_encode(item, allowed, seen) for item in items]}
    if not allowed.contain(type(value).__module__):
        raise PolicyError(f"A policy's state must be plain data; {value!r} cannot be saved.")
    if isinstance(value, Enum):
        return {"enum": _path(type(value)), "name": value.name}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named": _path(type(value)), "items": [_encode(item, allowed, seen) for item in value]}
    if id(value) in seen:
        return {"again": seen[id(value)]}
    if isinstance(value, type | list | dict | deque | tuple | set | frozenset) or callable(value):
        raise PolicyError(f"A policy's state must be plain data; {value!r} cannot be saved.")
    seen[id(value)] = number = len(seen)
    state = {name: _encode(item, allowed, seen) for name, item in _attributes(value).items()}
    return {"object": _path(type(value)), "number": number, "state": state}


def _decode(value: Any, allowed: _AllowedModules, seen: dict[int, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, allowed, seen) for item in value]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    if "dict" in value:
        return {_decode(key, allowed, seen): _decode(item, allowed, seen) for key, item in value["dict"]}
    if "deque" in value:
        return deque((_decode(item, allowed, seen) for item in value["deque"]), value["maxlen"])
    if "tuple" in value:
        return tuple(_decode(item, allowed, seen) for item in value["tuple"])
    if "set" in value:
        return {_decode(item, allowed, seen) for item in value["set"]}
    if "frozenset" in value:
        return frozenset(_decode(item, allowed, seen) for item in value["frozenset"])
    if "again" in value:
        return seen[value["again"]]
    if "enum" in value:
        return _class(value["enum"], allowed, Enum)[value["name"]]
    if "named" in value:
        return _class(value["named"], allowed, tuple)(*(_decode(item, allowed, seen) for item in value["items"]))
    thing: Any = object.__new__(_class(value["object"], allowed, object))
    seen[value["number"]] = thing
    for name, item in value["state"].items():
        object.__setattr__(thing, name, _decode(item, allowed, seen))
    return thing


def _class(path: str, allowed: _AllowedModules, kind: type) -> Any:
    """Return the class at `path`, a subclass of `kind`. Raise PolicyError if a snapshot may not name it."""
    module_name, _, class_name = str(path).partition(":")
    if allowed.contain(module_name):
        cls: Any = importlib.import_module(module_name)
        for part in class_name.split("."):
            cls = getattr(cls, part)
        # The module must define the class: one that it only imports has another path.
        if isinstance(cls, type) and _path(cls) == path and issubclass(cls, kind):
            return cls
    raise PolicyError(f"A saved policy may not name {path!r}.")
