"""A learned network as a file: its weights, the state it sees, and the rules it chooses among."""

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
from paceline.rlp.rules import Rule, last_a_round, parse_rules

Array = NDArray[np.float32]
UNITS = (64, 32)  # of the hidden layers, as in the paper
SLOPE = 0.01  # of the leaky rectifiers
SHIPPED = "shipped"  # the network that comes with paceline
MAKE_IT = "make a new one with `paceline policies learn`"


@dataclass(frozen=True, eq=False)
class NetworkWeights:
    """The weights and biases of the three layers, the state that they see, and the rules that they choose among."""

    state: StateFeatures
    rules: tuple[Rule, ...]
    layers: tuple[tuple[Array, Array], ...]

    @property
    def lasts(self) -> bool:
        """Whether a choice lasts a round."""
        return last_a_round(self.rules)

    @property
    def averages(self) -> bool:
        """Whether Q is a mean over recent rounds. Networks that do not see links were learned without it."""
        return self.lasts and self.state.links

    def values(self, state: Array) -> Array:
        """Return Q of every rule in a state."""
        (a, b), (c, d), (e, f) = self.layers
        hidden = state @ a + b
        hidden = np.maximum(hidden, SLOPE * hidden) @ c + d
        values: Array = np.maximum(hidden, SLOPE * hidden) @ e + f
        return values


def save(weights: NetworkWeights, path: Path, about: Mapping[str, str] | None = None) -> None:
    """Write weights to a file. about: further metadata, such as the settings of the learner."""
    state = weights.state
    metadata = {
        "history": str(state.history),
        "scene": str(int(state.scene)),
        "validated": str(int(state.validated)),
        "links": str(int(state.links)),
        "rules": ",".join(map(str, weights.rules)),
    }
    pairs = enumerate(weights.layers)
    tensors = {f"{kind}{at}": each for at, pair in pairs for kind, each in zip("wb", pair, strict=True)}
    save_file(tensors, path, {**(about or {}), **metadata})


@functools.lru_cache
def load(name: str) -> NetworkWeights:
    """Return the weights in a file, or the shipped ones. Raise PolicyError if the file does not hold a network."""
    path = resources.files("paceline.rlp") / "rlp.safetensors" if name == SHIPPED else Path(name)
    try:
        with safe_open(str(path), "np") as file:
            metadata = file.metadata() or {}
            layers = tuple((file.get_tensor(f"w{at}"), file.get_tensor(f"b{at}")) for at in range(len(UNITS) + 1))
    except FileNotFoundError:
        raise PolicyError(f"rlp: there is no file {name!r}; `paceline policies learn --out FILE` makes one.") from None
    except (SafetensorError, OSError, ValueError):
        raise PolicyError(f"rlp: {name!r} does not hold weights of a network; {MAKE_IT}.") from None
    try:
        flags = (metadata["scene"] == "1", metadata["validated"] == "1", metadata.get("links") == "1")
        state = StateFeatures(int(metadata["history"]), *flags)  # older files have no features of the network
        rules = parse_rules(metadata["rules"])
    except (KeyError, ValueError):
        raise PolicyError(f"rlp: {name!r} does not say what its weights are for; {MAKE_IT}.") from None
    if rules is None:
        raise PolicyError(f"rlp: {name!r} chooses among rules that this version does not know; {MAKE_IT}.")
    sizes = (state.size, *UNITS, len(rules))
    expected = [shape for at in range(len(UNITS) + 1) for shape in ((sizes[at], sizes[at + 1]), (sizes[at + 1],))]
    if [each.shape for pair in layers for each in pair] != expected:
        raise PolicyError(f"rlp: the weights in {name!r} do not have the shape that the file states; {MAKE_IT}.")
    if not all(np.isfinite(each).all() for pair in layers for each in pair):
        raise PolicyError(f"rlp: the weights in {name!r} are not all finite numbers; {MAKE_IT}.")
    return NetworkWeights(state, rules, layers)
