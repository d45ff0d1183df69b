"""Save and restore a policy's whole state as plain JSON values: no pickle, and no code is run by reading one.

A policy's state is the tree of its attributes. Classes are named by `module:Class`. On reading, only classes of
paceline's own policies and of modules that already define a policy in this process are accepted, and their
constructors are not called; so whoever writes a policy of their own imports it before restoring one.

`encode` and `decode` do the same for whatever holds a policy, such as a job.
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
    """The policy's state, ready for `json.dumps`."""
    return {"policy": _path(type(policy)), "state": encode(policy)}


def load(saved: dict[str, Any]) -> Policy:
    """The policy that was saved. It goes on exactly as the saved one would have."""
    policy = decode(saved.get("state"))
    if not isinstance(policy, Policy):
        raise PolicyError("What was saved is not a policy.")
    return policy


def encode(value: Any, also: tuple[str, ...] = ()) -> Any:
    """A value as plain JSON values. also: classes of modules whose names begin so are accepted too."""
    return _encode(value, _Homes(_homes(Policy), packages() + also), {})


def decode(value: Any, also: tuple[str, ...] = ()) -> Any:
    """The value that was encoded. PolicyError if it names another class, or cannot be read."""
    try:
        return _decode(value, _Homes(_homes(Policy), packages() + also), {})
    except PolicyError:
        raise
    except (LookupError, TypeError, AttributeError, ImportError, ValueError) as error:
        raise PolicyError(f"What was saved cannot be read: {error!r}.") from None


def _homes(cls: type[Any]) -> set[str]:
    """Modules that define a subclass of `cls`."""
    homes = {cls.__module__}
    for child in cls.__subclasses__():
        homes |= _homes(child)
    return homes


class _Homes(NamedTuple):
    """Where classes may come from: these modules, and those whose names begin so."""

    modules: set[str]
    prefixes: tuple[str, ...]

    def hold(self, module_name: str) -> bool:
        return module_name in self.modules or module_name.startswith(self.prefixes)


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _attributes(thing: Any) -> dict[str, Any]:
    slots = {name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())}
    found = {name: getattr(thing, name) for name in sorted(slots) if hasattr(thing, name)}
    return found | getattr(thing, "__dict__", {})


def _encode(value: Any, homes: _Homes, seen: dict[int, int]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(value)}
    if type(value) is list:
        return [_encode(item, homes, seen) for item in value]
    if type(value) is dict:
        return {"dict": [[_encode(key, homes, seen), _encode(item, homes, seen)] for key, item in value.items()]}
    if type(value) is deque:
        return {"deque": [_encode(item, homes, seen) for item in value], "maxlen": value.maxlen}
    if type(value) in (tuple, set, frozenset):
        items = value if isinstance(value, tuple) else sorted(value)
        return {type(value).__name__: [_encode(item, homes, seen) for item in items]}
    if not homes.hold(type(value).__module__):
        raise PolicyError(f"A policy's state must be plain data; {value!r} cannot be saved.")
    if isinstance(value, Enum):
        return {"enum": _path(type(value)), "name": value.name}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named": _path(type(value)), "items": [_encode(item, homes, seen) for item in value]}
    if id(value) in seen:
        return {"again": seen[id(value)]}
    if isinstance(value, type | list | dict | deque | tuple | set | frozenset) or callable(value):
        raise PolicyError(f"A policy's state must be plain data; {value!r} cannot be saved.")
    seen[id(value)] = number = len(seen)
    state = {name: _encode(item, homes, seen) for name, item in _attributes(value).items()}
    return {"object": _path(type(value)), "number": number, "state": state}


def _decode(value: Any, homes: _Homes, seen: dict[int, Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, homes, seen) for item in value]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    if "dict" in value:
        return {_decode(key, homes, seen): _decode(item, homes, seen) for key, item in value["dict"]}
    if "deque" in value:
        return deque((_decode(item, homes, seen) for item in value["deque"]), value["maxlen"])
    if "tuple" in value:
        return tuple(_decode(item, homes, seen) for item in value["tuple"])
    if "set" in value:
        return {_decode(item, homes, seen) for item in value["set"]}
    if "frozenset" in value:
        return frozenset(_decode(item, homes, seen) for item in value["frozenset"])
    if "again" in value:
        return seen[value["again"]]
    if "enum" in value:
        return _class(value["enum"], homes, Enum)[value["name"]]
    if "named" in value:
        return _class(value["named"], homes, tuple)(*(_decode(item, homes, seen) for item in value["items"]))
    thing: Any = object.__new__(_class(value["object"], homes, object))
    seen[value["number"]] = thing
    for name, item in value["state"].items():
        object.__setattr__(thing, name, _decode(item, homes, seen))
    return thing


def _class(path: str, homes: _Homes, kind: type) -> Any:
    """The class of this path, of this kind; PolicyError if it may not be named."""
    module_name, _, class_name = str(path).partition(":")
    if homes.hold(module_name):
        cls: Any = importlib.import_module(module_name)
        for part in class_name.split("."):
            cls = getattr(cls, part)
        if isinstance(cls, type) and _path(cls) == path and issubclass(cls, kind):  # not one that it only imports
            return cls
    raise PolicyError(f"A saved policy may not name {path!r}.")
