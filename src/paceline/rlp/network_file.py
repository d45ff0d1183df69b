"""A learned network as a file: small, plain numbers, and what they are for."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from paceline.policies import PolicyError
from paceline.rlp.features import StateFeatures
from paceline.rlp.rules import Rule, last, named

Array = NDArray[np.float32]
UNITS = (64, 32)  # of the hidden layers, as in the paper
SLOPE = 0.01  # of the leaky rectifiers
SHIPPED = "shipped"  # the file that comes with paceline
ANEW = "make it anew with `paceline rlp learn`"


@dataclass(frozen=True, eq=False)
class NetworkWeights:
    """Three layers, with their biases; what they look at, and what they choose among."""

    state: StateFeatures
    rules: tuple[Rule, ...]
    layers: tuple[tuple[Array, Array], ...]

    @property
    def lasts(self) -> bool:
        """Is a choice kept to for a round?"""
        return last(self.rules)

    def values(self, state: Array) -> Array:
        """Q of every rule."""
        (a, b), (c, d), (e, f) = self.layers
        hidden = state @ a + b
        hidden = np.maximum(hidden, SLOPE * hidden) @ c + d
        values: Array = np.maximum(hidden, SLOPE * hidden) @ e + f
        return values


def save(weights: NetworkWeights, path: Path, about: Mapping[str, str] | None = None) -> None:
    """Write them, with notes of how they were come by."""
    state = weights.state
    notes = {
        "history": str(state.history),
        "scene": str(int(state.scene)),
        "validated": str(int(state.validated)),
        "rules": ",".join(map(str, weights.rules)),
    }
    pairs = enumerate(weights.layers)
    tensors = {f"{kind}{at}": each for at, pair in pairs for kind, each in zip("wb", pair, strict=True)}
    save_file(tensors, path, {**(about or {}), **notes})


@functools.lru_cache
def load(name: str) -> NetworkWeights:
    """The weights in a file, or those that come with paceline. What is wrong with it: one sentence."""
    path = resources.files("paceline.rlp") / "rlp.safetensors" if name == SHIPPED else Path(name)
    try:
        with safe_open(str(path), "np") as file:
            notes = file.metadata() or {}
            layers = tuple((file.get_tensor(f"w{at}"), file.get_tensor(f"b{at}")) for at in range(len(UNITS) + 1))
    except FileNotFoundError:
        raise PolicyError(f"rlp: there is no file {name!r}; `paceline rlp learn --out FILE` makes one.") from None
    except (SafetensorError, OSError, ValueError):
        raise PolicyError(f"rlp: {name!r} does not hold weights of a network; {ANEW}.") from None
    try:
        state = StateFeatures(int(notes["history"]), notes["scene"] == "1", notes["validated"] == "1")
        rules = named(notes["rules"])
    except (KeyError, ValueError):
        raise PolicyError(f"rlp: {name!r} does not say what its weights are for; {ANEW}.") from None
    if rules is None:
        raise PolicyError(f"rlp: {name!r} chooses among rules that this version does not know; {ANEW}.")
    sizes = (state.size, *UNITS, len(rules))
    wanted = [shape for at in range(len(UNITS) + 1) for shape in ((sizes[at], sizes[at + 1]), (sizes[at + 1],))]
    if [each.shape for pair in layers for each in pair] != wanted:
        raise PolicyError(f"rlp: the weights in {name!r} are not of the shape that they say they are; {ANEW}.")
    if not all(np.isfinite(each).all() for pair in layers for each in pair):
        raise PolicyError(f"rlp: the weights in {name!r} are not all numbers; {ANEW}.")
    return NetworkWeights(state, rules, layers)
