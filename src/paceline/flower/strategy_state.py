"""The state of a Flower strategy, such as the moments of FedAdam, for a checkpoint.

Flower's strategies have no method that saves their state. They keep it in attributes: arrays, lists of arrays and
arrays by name. An attribute that is a number is saved if it has changed since the run began, as the clipping norm of
adaptive differential privacy does; all other numbers are settings, and a restarted ServerApp may have new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from paceline.flower.global_model import Arrays

WRAPPED = "strategy"  # the attribute in which a strategy keeps the one that it wraps
TRANSIENT = ("current_arrays",)  # the model of this round: configure_train sets it anew


class StrategyState:
    """Reads and restores the state of a strategy, and of those that it wraps."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategies = list(_chain(strategy))
        self._settings = [_numbers(each) for each in self._strategies]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as arrays by name: the depth of the strategy, the attribute, and its part."""
        found: dict[str, NDArray[Any]] = {}
        for depth, (strategy, settings) in enumerate(zip(self._strategies, self._settings, strict=True)):
            for name, value in vars(strategy).items():
                where = f"{depth}/{name}"
                if name in TRANSIENT:
                    continue
                if isinstance(value, np.ndarray):
                    found[f"{where}/array"] = value
                elif isinstance(value, dict) and value and _are_arrays(value.values()):
                    found |= {f"{where}/dict/{key}": array for key, array in value.items()}
                elif isinstance(value, list) and value and _are_arrays(value):
                    found |= {f"{where}/list/{at}": array for at, array in enumerate(value)}
                elif name in settings and value != settings[name]:
                    found[f"{where}/number"] = np.array(value)
        return found

    def recall(self, arrays: Arrays) -> None:
        """Restore a state. Attributes that the strategy does not have are left out: it may be another one now."""
        grouped: dict[tuple[int, str, str], dict[str, NDArray[Any]]] = {}
        for path, array in arrays.items():
            number, name, kind, *key = path.split("/", 3)
            grouped.setdefault((int(number), name, kind), {})["".join(key)] = array
        for (depth, name, kind), parts in grouped.items():
            if depth < len(self._strategies) and name in vars(self._strategies[depth]):
                setattr(self._strategies[depth], name, _as_value(kind, parts))


def _chain(strategy: Strategy) -> Iterator[Strategy]:
    """Yield a strategy, the one that it wraps, and so on."""
    yield strategy
    if isinstance(inner := vars(strategy).get(WRAPPED), Strategy):
        yield from _chain(inner)


def _numbers(strategy: Strategy) -> dict[str, Any]:
    """Return the attributes that are numbers."""
    numbers = {name: value for name, value in vars(strategy).items() if isinstance(value, int | float | np.number)}
    return {name: value for name, value in numbers.items() if not isinstance(value, bool)}


def _are_arrays(values: Any) -> bool:
    return all(isinstance(value, np.ndarray) for value in values)


def _as_value(kind: str, parts: Mapping[str, NDArray[Any]]) -> Any:
    """Return the value of an attribute from its parts."""
    match kind:
        case "dict":
            return dict(parts)
        case "list":
            return [parts[str(at)] for at in range(len(parts))]
        case "number":
            return parts[""].item()
        case _:
            return parts[""]
