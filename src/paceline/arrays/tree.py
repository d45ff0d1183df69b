"""Trees of arrays: dicts, lists and tuples in each other, with arrays as leaves. None is an empty tree, as in JAX.

A leaf is named by its path: the keys and positions on the way to it, with dots between them. So the leaves of
`{"dense": [w, b]}` are `dense.0` and `dense.1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf and of each None, in the order of the dicts and lists."""
    if isinstance(tree, Mapping | list | tuple):
        for key, value in _entries(tree):
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path or "array", tree


def by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves by their paths, without each None. Raise ValueError if two leaves have the same path."""
    found: dict[str, Any] = {}
    for path, leaf in leaves(tree):
        if leaf is None:
            continue
        if path in found:
            raise ValueError(f"Two arrays have the path {path!r:.80}; give one of them another key.")
        found[path] = leaf
    return found


def replaced(tree: Any, value_of: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a tree of the same structure, in which each leaf is the value for its path and its old value.

    A mapping that is not a dict (Flax's FrozenDict, say) becomes a dict.
    """
    if isinstance(tree, Mapping | list | tuple):
        entries = _entries(tree)
        values = [replaced(value, value_of, f"{path}.{key}" if path else str(key)) for key, value in entries]
        if isinstance(tree, Mapping):
            return dict(zip(tree, values, strict=True))
        if hasattr(tree, "_fields"):  # a namedtuple
            return type(tree)(*values)
        return tuple(values) if isinstance(tree, tuple) else values
    return None if tree is None else value_of(path or "array", tree)


def _entries(tree: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """Return the keys and values of one dict, list or tuple."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    return list(zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True))
