"""Save and restore a policy's whole state as plain JSON values: no pickle, and no code is run by reading one.

A policy's state is the tree of its attributes. Classes are named by `module:Class`. On reading, only classes of
`paceline.policies` and of modules that already define a policy in this process are accepted, and their
constructors are not called; so whoever writes a policy of their own imports it before restoring one.
"""

from __future__ import annotations

import importlib
import math
from collections import deque
from typing import Any

from paceline.policies.contract import Policy
from paceline.policies.options import PolicyError


def save(policy: Policy) -> dict[str, Any]:
    """The policy's state, ready for `json.dumps`."""
    return {"policy": _path(type(policy)), "state": _encode(policy, {})}


def load(saved: dict[str, Any]) -> Policy:
    """The policy that was saved. It goes on exactly as the saved one would have."""
    policy = _decode(saved["state"], _homes(Policy), {})
    if not isinstance(policy, Policy):
        raise PolicyError("What was saved is not a policy.")
    return policy


def _homes(cls: type) -> set[str]:
    """Modules that define a subclass of `cls`."""
    homes = {cls.__module__}
    for child in cls.__subclasses__():
        homes |= _homes(child)
    return homes


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _attributes(thing: Any) -> dict[str, Any]:
    slots = {name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())}
    found = {name: getattr(thing, name) for name in sorted(slots) if hasattr(thing, name)}
    return found | getattr(thing, "__dict__", {})


def _encode(value: Any, seen: dict[int, int]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [_encode(item, seen) for item in value]
    if type(value) is dict:
        return {"dict": [[_encode(key, seen), _encode(item, seen)] for key, item in value.items()]}
    if isinstance(value, deque):
        return {"deque": [_encode(item, seen) for item in value], "maxlen": value.maxlen}
    if type(value) in (tuple, set):
        items = sorted(value) if isinstance(value, set) else value
        return {type(value).__name__: [_encode(item, seen) for item in items]}
    if id(value) in seen:
        return {"again": seen[id(value)]}
    if isinstance(value, type) or callable(value) or not hasattr(type(value), "__module__"):
        raise PolicyError(f"A policy's state must be plain data; {value!r} cannot be saved.")
    seen[id(value)] = number = len(seen)
    state = {name: _encode(item, seen) for name, item in _attributes(value).items()}
    return {"object": _path(type(value)), "number": number, "state": state}


def _decode(value: Any, homes: set[str], seen: dict[int, Any]) -> Any:
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
    if "again" in value:
        return seen[value["again"]]
    module_name, _, class_name = str(value["object"]).partition(":")
    if module_name not in homes and not module_name.startswith("paceline.policies."):
        raise PolicyError(f"A saved policy may not name {value['object']!r}.")
    cls: Any = importlib.import_module(module_name)
    for part in class_name.split("."):
        cls = getattr(cls, part)
    if not isinstance(cls, type):
        raise PolicyError(f"A saved policy may not name {value['object']!r}.")
    thing = cls.__new__(cls)
    seen[value["number"]] = thing
    for name, item in value["state"].items():
        object.__setattr__(thing, name, _decode(item, homes, seen))
    return thing
