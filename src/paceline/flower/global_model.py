"""The global model of a federation, as arrays by name, and the replies that the policy has not decided on.

An Apply is carried out by a Flower strategy (FedAvg, FedAdam and so on). A strategy averages whole models, so it is
given models that its average makes the right one: if n replies move the model by Σ wᵢ·(xᵢ − bᵢ), where xᵢ is a reply
and bᵢ the model that it began from, then the strategy is given g + W·(xᵢ − bᵢ), with the weights wᵢ/W and W = Σ wᵢ. A
reply that began from g itself is given as it is if W is 1, which is FedAvg.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.model.similarity import Products
from paceline.policies import Apply, Update

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
Origin = TypeVar("Origin")  # of a reply, such as a message

#: The last parts of the names of PyTorch's running statistics. They are not compared, because they are no parameters.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Reply(Generic[Origin]):
    """A model that a member has trained."""

    arrays: Arrays
    origin: Origin


@dataclass(frozen=True)
class WeighedModel(Generic[Origin]):
    """A model for a strategy to average, and its weight."""

    arrays: Arrays
    weight: float
    origin: Origin


#: Averages models. Returns the new model, or None if the strategy makes none.
Aggregate: TypeAlias = Callable[[list[WeighedModel[Any]]], Arrays | None]


class ArraysModel(Generic[Origin]):
    """The global model."""

    def __init__(self, arrays: Arrays, aggregate: Aggregate) -> None:
        self.arrays: dict[str, NDArray[Any]] = dict(arrays)
        self.version = 0
        self._aggregate = aggregate
        self._replies: dict[Update, Reply[Origin]] = {}
        self._kept: dict[int, Update] = {}
        self._bases: dict[int, tuple[dict[str, NDArray[Any]], int]] = {}  # version → the model, and its users

    def fault(self, arrays: Arrays) -> str:
        """Return why these arrays cannot be a reply, as a sentence; empty if they can."""
        if arrays.keys() != self.arrays.keys():
            odd = sorted(arrays.keys() ^ self.arrays.keys())
            return f"its arrays are not those of the model: {', '.join(odd[:3])}{' …' if len(odd) > 3 else ''} differ"
        for name, array in arrays.items():
            if array.shape != self.arrays[name].shape:
                return f"{name} has the shape {array.shape} instead of {self.arrays[name].shape}"
            if not np.isfinite(array).all():
                return f"{name} contains values that are not finite"
        return ""

    def lend(self) -> int:
        """Remember the model as it is now, until `give_back` is called as often as this. Return its version."""
        arrays, users = self._bases.get(self.version, (self.arrays, 0))
        self._bases[self.version] = (arrays, users + 1)
        return self.version

    def give_back(self, version: int) -> None:
        """Forget one use of a version of the model."""
        arrays, users = self._bases[version]
        if users > 1:
            self._bases[version] = (arrays, users - 1)
        else:
            del self._bases[version]

    def put(self, update: Update, reply: Reply[Origin]) -> None:
        """Hold a reply until the policy decides on it. It uses the version of the model that was lent for it."""
        self._replies[update] = reply

    def drop(self, update: Update) -> None:
        """Drop a reply."""
        if self._replies.pop(update, None):
            self.give_back(update.base_version)

    def keep(self, update: Update, slot: int) -> None:
        """Put a reply aside in a slot, in the place of the slot's old one."""
        old = self._kept.pop(slot, None)
        self._kept[slot] = update
        if old is not None and old != update:
            self.drop(old)

    def apply(self, apply: Apply, compare: bool) -> Sequence[float]:
        """Make the next version from these updates. Return the cosine of each with all, if `compare`."""
        replies = [self._replies[update] for update in apply.updates]
        bases = [self._bases[update.base_version][0] for update in apply.updates]
        cosines = self._cosines(replies, bases, apply.weights) if compare else []
        share = sum(apply.weights) if apply.mix is None else 1.0
        models = []
        for reply, base, weight in zip(replies, bases, apply.weights, strict=True):
            if apply.mix is not None:
                arrays: Arrays = _mixed(self.arrays, reply.arrays, apply.mix)
            elif base is self.arrays and share == 1.0:
                arrays = reply.arrays
            else:
                arrays = _moved(self.arrays, reply.arrays, base, share)
            models.append(WeighedModel(arrays, weight / share, reply.origin))
        made = self._aggregate(models)
        if made is not None:
            self.arrays = {name: _as(made[name], old.dtype) for name, old in self.arrays.items()}
        self.version += 1
        kept = set(self._kept.values())
        for update in apply.updates:
            if update not in kept:
                self.drop(update)
        return cosines

    def _cosines(
        self, replies: Sequence[Reply[Origin]], bases: Sequence[Arrays], weights: Sequence[float]
    ) -> list[float]:
        """Return the cosine of each reply's change with the weighted sum of all changes."""
        found = Products.none(len(replies))
        for name, array in self.arrays.items():
            if array.dtype.kind != "f" or name.rpartition(".")[2] in STATISTICS:
                continue
            changes = [
                np.asarray(reply.arrays[name] - base[name], np.float32).ravel()
                for reply, base in zip(replies, bases, strict=True)
            ]
            whole = sum(weight * change for weight, change in zip(weights, changes, strict=True))
            found += Products(
                tuple(float(change @ whole) for change in changes),
                tuple(float(change @ change) for change in changes),
                float(np.dot(whole, whole)),
            )
        return found.cosines()


def _moved(model: Arrays, reply: Arrays, base: Arrays, share: float) -> dict[str, NDArray[Any]]:
    """Return the model, moved by this share of a reply's change."""
    return {name: array + share * (reply[name] - base[name]) for name, array in model.items()}


def _mixed(model: Arrays, reply: Arrays, mix: float) -> dict[str, NDArray[Any]]:
    """Return the model, with this share of a reply mixed in."""
    return {name: (1 - mix) * array + mix * reply[name] for name, array in model.items()}


def _as(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array with this type. Means of integers, such as counts of batches, are rounded."""
    return np.asarray(np.rint(array) if dtype.kind in "iub" else array).astype(dtype)
