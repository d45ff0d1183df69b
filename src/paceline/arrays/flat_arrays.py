"""A tree of arrays as one flat buffer, which is pulled from the server, and one of the gradients, which is pushed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.arrays.tree import by_path, leaves, replaced
from paceline.model.half_precision import WIDTH, narrow
from paceline.model.layout import STATISTICS, WHOLE, Layout, Tensor

Floats = npt.NDArray[np.float32]
#: The digest of what is not sent, as a torch worker has it whose model has nothing frozen.
NOTHING_FIXED = hashlib.sha256().hexdigest()


class FlatArrays:
    """The parameters of a model, one after another, followed by its running statistics.

    A leaf with a method `assign`, such as a variable of Keras or TensorFlow, gets each pulled value. All other leaves
    are only read: `params` and `statistics` are trees of the pulled values.
    """

    def __init__(
        self, params: Any, statistics: Any = None, names: Mapping[str, str] | None = None, wire: str = "float32"
    ) -> None:
        """names: the names of the parameters on the server, by their paths, in the order of the server's buffer.

        wire: the type in which gradients are pushed.
        """
        if wire not in WIDTH:
            raise ValueError(f"Gradients can be sent as {', '.join(WIDTH)}; got {wire!r:.80}.")
        _refuse_model(params)
        self.wire = wire
        self._trees = params, statistics
        parameters = {path: (leaf, _parameter(path, leaf)) for path, leaf in by_path(params).items()}
        if not any(array.size for _, array in parameters.values()):
            raise ValueError("There is no parameter to train; pass a tree of arrays, such as a dict of them.")
        self._names = _checked_names(names, parameters)
        self._shapes = {path: array.shape for path, (_, array) in parameters.items()}
        #: The values of the statistics that the worker has: those of its last step, or those that were pulled.
        self._statistics = by_path(statistics)
        sent = {path: array for path, leaf in self._statistics.items() if (array := _statistic(leaf)) is not None}
        tensors = [Tensor(name, self._shapes[path]) for path, name in self._names.items()]
        taken = set(self._names.values())
        for path, array in sent.items():
            name = f"statistics.{path}" if path in taken else path
            tensors.append(Tensor(name, array.shape, array.dtype.name, STATISTICS))
        self.layout = Layout(tuple(tensors))
        #: The number of elements of all parameters, without the statistics.
        self.parameter_elements = self.layout.offsets[len(parameters)]
        self.weights: Floats = np.empty(self.layout.size, np.float32)
        self._computed: Floats = np.zeros(self.layout.size, np.float32)
        half = np.zeros(self.layout.size if wire != "float32" else 0, np.uint16)
        self._pushed: npt.NDArray[Any] = self._computed if wire == "float32" else half
        places = [slice(*ends) for ends in zip(self.layout.offsets, self.layout.offsets[1:], strict=False)]
        paths = [*((False, path) for path in self._names), *((True, path) for path in sent)]
        self._places = dict(zip(paths, places, strict=True))  # whether it is a statistic, and its path
        for (is_statistic, path), place in self._places.items():
            self.weights[place] = (sent[path] if is_statistic else parameters[path][1]).reshape(-1)
        self.params: Any = None
        self.statistics: Any = None
        self.use_pulled(assign=False)

    def weights_bytes(self) -> memoryview:
        """Return the buffer that receives pulls."""
        return self.weights.data.cast("B")

    def gradient_bytes(self) -> memoryview:
        """Return the buffer that is pushed."""
        return self._pushed.data.cast("B")

    def use_pulled(self, assign: bool = True) -> None:
        """Make `params` and `statistics` of the buffer that was pulled, and assign the values to variables.

        The arrays are views of a copy: a library may keep an array's memory, and the next pull must not change it.
        """
        values = self.weights.copy()
        values.flags.writeable = False  # a change in place would be lost without a word

        def parameter(path: str, leaf: Any) -> Any:
            value = values[self._places[False, path]].reshape(self._shapes[path])
            if assign and hasattr(leaf, "assign"):
                leaf.assign(value)
            return value

        def statistic(path: str, leaf: Any) -> Any:
            old = np.asarray(self._statistics[path])
            if (True, path) not in self._places:
                return old
            value: npt.NDArray[Any] = values[self._places[True, path]].reshape(old.shape)
            if old.dtype != np.float32:  # a whole number, which float32 may not hold exactly
                value = np.where(old.astype(np.float32) == value, old, np.rint(value).astype(old.dtype))
            if hasattr(leaf, "assign"):
                if assign:
                    leaf.assign(value)
            else:
                self._statistics[path] = value
            return value

        self.params = replaced(self._trees[0], parameter)
        self.statistics = replaced(self._trees[1], statistic)

    def gather(self, gradients: Any, statistics: Any = None) -> Floats:
        """Copy gradients and statistics to one flat array, and return it. A gradient of None counts as zero.

        statistics: None keeps those that the worker has.
        """
        self._gather_gradients(gradients)
        if statistics is not None:
            self._take_statistics(statistics)
        for (is_statistic, path), place in self._places.items():
            if is_statistic:
                value = np.asarray(self._statistics[path]).reshape(-1).astype(np.float32)
                # An overflow may have spoiled the statistics. The pulled ones are finite.
                self._computed[place] = np.where(np.isfinite(value), value, self.weights[place])
        return self._computed

    def gather_weights(self) -> None:
        """Copy the weights, without the statistics, to the flat array of the gradients."""
        self._computed[: self.parameter_elements] = self.weights[: self.parameter_elements]

    def convert(self) -> None:
        """Convert what was gathered to the type in which it is pushed."""
        if self._pushed is not self._computed:
            narrow(self._computed, self.wire, self._pushed)

    def _gather_gradients(self, gradients: Any) -> None:
        missing = set(self._names)
        for path, leaf in leaves(gradients):
            if path not in missing:
                if leaf is not None:
                    raise ValueError(f"There is a gradient of {path!r}, but no such parameter; {_LIKE}.")
                continue
            missing.remove(path)
            due = self._shapes[path]
            self._computed[self._places[False, path]] = 0.0 if leaf is None else _gradient(path, leaf, due).reshape(-1)
        if missing:
            first = next(path for path in self._names if path in missing)
            raise ValueError(f"There is no gradient of {first!r}; {_LIKE}.")

    def _take_statistics(self, statistics: Any) -> None:
        given = by_path(statistics)
        if given.keys() != self._statistics.keys():
            different = sorted(given.keys() ^ self._statistics.keys())[0]
            raise ValueError(f"The statistics differ from those of paceline.arrays.join in {different!r}; {_LIKE}.")
        for path, leaf in given.items():
            shape, due = np.shape(leaf), np.shape(self._statistics[path])
            if shape != due:
                raise ValueError(f"The statistic {path!r} has the shape {shape}, and it had {due} when joining.")
            if not hasattr(self._statistics[path], "assign"):
                self._statistics[path] = leaf
            elif leaf is not self._statistics[path]:
                self._statistics[path].assign(leaf)


_LIKE = "pass a tree with the same dicts and lists as in paceline.arrays.join"


def _refuse_model(params: Any) -> None:
    """Raise ValueError if this is a model of torch or Keras in place of its weights."""
    if hasattr(params, "state_dict"):
        raise ValueError("This is a model of torch: call paceline.join(model, optimizer) for it.")
    if hasattr(params, "trainable_variables"):
        raise ValueError(
            "This is a model of Keras: pass its variables, as in paceline.arrays.join(model.trainable_variables, "
            "optimizer, statistics=model.non_trainable_variables)."
        )


def _checked_names(names: Mapping[str, str] | None, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each parameter by its path. Raise ValueError if a path is wrong or missing."""
    if names is None:
        return {path: path for path in parameters}
    for path in (*names, *parameters):
        if path not in parameters:
            raise ValueError(f"There is no parameter {path!r:.80} to name; there are {', '.join(parameters)}.")
        if path not in names:
            raise ValueError(f"The parameter {path!r:.80} has no name; there are names for {', '.join(names)}.")
    return dict(names)


def _parameter(path: str, leaf: Any) -> npt.NDArray[Any]:
    """Return a leaf as an array. Raise ValueError if it is not one of float32."""
    array = np.asarray(leaf)
    if array.dtype.hasobject or array.dtype.kind in "USmM":
        raise ValueError(
            f"The parameter {path!r} is a {type(leaf).__name__} and not an array; pass dicts, lists and tuples of "
            "arrays (for another structure, the list that jax.tree.leaves returns)."
        )
    if array.dtype != np.float32:
        raise ValueError(f"The parameter {path!r} is {array.dtype}; paceline.arrays trains float32, so convert it.")
    return array


def _statistic(leaf: Any) -> npt.NDArray[Any] | None:
    """Return a statistic as an array; None if it cannot be averaged, as the state of a random generator."""
    array = np.asarray(leaf)
    return array if array.dtype.name in ("float32", *WHOLE) else None


def _gradient(path: str, leaf: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Return a gradient as a dense array of this shape. Raise ValueError if it has another one."""
    if hasattr(leaf, "indices") and hasattr(leaf, "values"):  # TensorFlow's gradient of an embedding
        array = np.zeros(shape, np.float32)
        np.add.at(array, np.asarray(leaf.indices), np.asarray(leaf.values))
    else:
        array = np.asarray(leaf)
    if array.shape != shape:
        raise ValueError(f"The gradient of {path!r} has the shape {array.shape}, and the parameter has {shape}.")
    return array
