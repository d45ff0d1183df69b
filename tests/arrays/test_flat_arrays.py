"""Trees of arrays as flat buffers: names, order, types, and a sentence for each mistake."""

from __future__ import annotations

import re
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from paceline.arrays.batches import ArrayData, order_of
from paceline.arrays.flat_arrays import FlatArrays
from paceline.arrays.tree import leaves, replaced
from paceline.model.half_precision import narrow, widen

Layer = namedtuple("Layer", "kernel bias")


def array(*shape: int) -> Any:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def test_leaves_are_named_by_their_paths() -> None:
    tree = {"dense": [array(2), (array(3), None)], 7: Layer(array(1), array(1)), "empty": {}}
    assert [path for path, _ in leaves(tree)] == ["dense.0", "dense.1.0", "dense.1.1", "7.kernel", "7.bias"]
    assert [path for path, _ in leaves(array(2))] == ["array"]
    sizes = replaced(tree, lambda _, leaf: leaf.size)
    assert sizes == {"dense": [2, (3, None)], 7: Layer(1, 1), "empty": {}}
    assert isinstance(sizes[7], Layer)


def test_the_buffer_has_the_order_of_the_tree_or_that_of_the_names() -> None:
    tree = {"b": array(2), "a": {"c": array(3)}}
    assert [tensor.name for tensor in FlatArrays(tree).layout.tensors] == ["b", "a.c"]
    flat = FlatArrays(tree, names={"a.c": "0.weight", "b": "0.bias"})
    assert [(tensor.name, tensor.shape) for tensor in flat.layout.tensors] == [("0.weight", (3,)), ("0.bias", (2,))]
    assert flat.weights.tolist() == [0, 1, 2, 0, 1]
    assert flat.gather({"a": {"c": array(3) + 5}, "b": None}).tolist() == [5, 6, 7, 0, 0]


def test_pulled_arrays_are_not_changed_by_the_next_pull() -> None:
    flat = FlatArrays([array(2, 2)])
    before = flat.params[0]
    flat.weights[:] = 9
    flat.use_pulled()
    assert before.tolist() == [[0, 1], [2, 3]]
    assert flat.params[0].tolist() == [[9, 9], [9, 9]]
    with pytest.raises(ValueError, match="read-only"):
        flat.params[0] += 1


@pytest.mark.parametrize(
    "build",
    [
        lambda tree: FlatArrays(tree),
        lambda tree: FlatArrays([array(2)], tree),
        lambda tree: FlatArrays([array(2)], {"a": array(2)}).gather([array(2)], tree),
        lambda tree: ArrayData(tree),
    ],
    ids=["parameters", "statistics", "the statistics of a step", "data"],
)
def test_two_arrays_with_the_same_path_are_refused(build: Any) -> None:
    for tree in ({"a.b": array(2), "a": {"b": array(2)}}, {1: array(2), "1": array(3)}):
        path = "a.b" if "a" in tree else "1"
        with pytest.raises(ValueError, match=rf"^Two arrays have the path '{path}'; give one of them another key\.$"):
            build(tree)
    assert FlatArrays({"a.b": array(2), "a": {"b": None}}).weights.tolist() == [0, 1]


class Variable:
    """A variable as those of Keras and TensorFlow."""

    def __init__(self, value: Any) -> None:
        self.value, self.assigned = value, 0

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.value

    def assign(self, value: Any) -> None:
        self.value, self.assigned = np.array(value), self.assigned + 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


def test_variables_are_assigned() -> None:
    kernel, mean, seed = Variable(array(2)), Variable(array(2)), Variable(np.zeros(2, np.uint32))
    flat = FlatArrays([kernel], [mean, seed])
    assert [(tensor.name, tensor.group) for tensor in flat.layout.tensors] == [("0", 0), ("statistics.0", -1)]
    assert kernel.assigned == 0
    mean.value = array(2) + 3
    assert flat.gather([array(2)]).tolist() == [0, 1, 3, 4]
    flat.weights[:] = 5
    flat.use_pulled()
    assert kernel.value.tolist() == mean.value.tolist() == [5, 5]
    assert seed.assigned == 0


def test_statistics_that_are_not_finite_are_not_sent_and_whole_numbers_are_rounded() -> None:
    count = np.array(2**24 + 1, np.int64)
    flat = FlatArrays([array(1)], {"mean": array(2), "count": count, "mask": np.array([True])})
    assert flat.statistics["count"] == 2**24 + 1  # float32 does not hold it
    spoiled = {"mean": np.array([7, np.nan], np.float32), "count": np.array(4), "mask": np.array([False])}
    assert flat.gather([array(1)], spoiled)[1:].tolist() == [7, 1, 4]
    flat.weights[1:] = [1, 2, 5.4]
    flat.use_pulled()
    assert flat.statistics["count"] == 5 and flat.statistics["count"].dtype == np.int64
    assert flat.statistics["mask"].tolist() == [False]


def test_a_sparse_gradient_becomes_dense() -> None:
    class Slices:
        indices, values = np.array([2, 0, 2]), array(3, 2)

    gathered = FlatArrays([array(3, 2)]).gather([Slices()])
    assert gathered.tolist() == [2, 3, 0, 0, 4, 6]


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_gradients_with_two_bytes_are_those_of_torch(wire: str) -> None:
    torch: Any = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    values = (random.standard_normal(1000) * 10.0 ** random.integers(-9, 9, 1000)).astype(np.float32)
    values[:4] = [np.nan, np.inf, -np.inf, 65504 * 2]
    narrowed, back = np.zeros(1000, np.uint16), np.zeros(1000, np.float32)
    narrow(values, wire, narrowed)
    widen(narrowed.data.cast("B"), wire, back)
    limit = 65504 if wire == "float16" else np.inf
    clipped = np.where(np.isinf(values), values, np.clip(values, -limit, limit))
    np.testing.assert_array_equal(back, torch.from_numpy(clipped).to(getattr(torch, wire)).float().numpy())


@pytest.mark.parametrize(
    ("tree", "options", "sentence"),
    [
        ({}, {}, "There is no parameter to train; pass a tree of arrays, such as a dict of them."),
        ([np.zeros(2)], {}, "The parameter '0' is float64; paceline.arrays trains float32, so convert it."),
        ({"w": object()}, {}, "The parameter 'w' is a object and not an array; pass dicts, lists and tuples of arrays"),
        ([array(2)], {"wire": "int8"}, "Gradients can be sent as float32, bfloat16, float16; got 'int8'."),
        ({"w": array(2)}, {"names": {"v": "x"}}, "There is no parameter 'v' to name; there are w."),
        (
            {"w": array(2), "v": array(2)},
            {"names": {"v": "x"}},
            "The parameter 'w' has no name; there are names",
        ),
    ],
)
def test_a_wrong_tree_is_refused_in_one_sentence(tree: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        FlatArrays(tree, **options)


def test_models_are_refused_with_the_right_call() -> None:
    class Torch:
        state_dict = None

    class Keras:
        trainable_variables = None

    with pytest.raises(ValueError, match=r"call paceline\.join\(model, optimizer\)"):
        FlatArrays(Torch())
    with pytest.raises(ValueError, match=r"paceline\.arrays\.join\(model\.trainable_variables, optimizer, statistics="):
        FlatArrays(Keras())


@pytest.mark.parametrize(
    ("gradients", "sentence"),
    [
        (
            {"w": array(2)},
            "There is no gradient of 'b'; pass a tree with the same dicts and lists as in",
        ),
        ({"w": array(2), "b": array(1), "c": array(1)}, "There is a gradient of 'c', but no such parameter; pass"),
        ({"w": array(3), "b": array(1)}, "The gradient of 'w' has the shape (3,), and the parameter has (2,)."),
    ],
)
def test_wrong_gradients_are_refused_in_one_sentence(gradients: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        FlatArrays({"w": array(2), "b": array(1)}).gather(gradients)


def test_wrong_statistics_are_refused_in_one_sentence() -> None:
    flat = FlatArrays([array(1)], {"mean": array(2)})
    with pytest.raises(ValueError, match=r"differ from those of paceline\.arrays\.join in 'variance'"):
        flat.gather([array(1)], {"mean": array(2), "variance": array(2)})
    with pytest.raises(ValueError, match=r"'mean' has the shape \(3,\), and it had \(2,\) when joining"):
        flat.gather([array(1)], {"mean": array(3)})


@pytest.mark.parametrize("size", [1, 2, 33, 5000])
def test_the_order_of_the_samples_is_that_of_torch(size: int) -> None:
    torch: Any = pytest.importorskip("torch")
    for seed, epoch in ((0, 0), (7, 2), (2**32 - 1, 3)):
        expected = torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch))
        assert order_of(size, seed)(epoch).tolist() == expected.tolist()


def test_data_must_have_a_row_for_each_sample() -> None:
    batch = ArrayData({"x": array(3, 2), "y": (array(3), None)}).some(np.array([2, 0]))
    assert batch["x"].tolist() == [[4, 5], [0, 1]] and batch["y"][0].tolist() == [2, 0]
    with pytest.raises(ValueError, match="a row for each sample: '0' has 3 rows, and '1' has 2"):
        ArrayData((array(3), array(2)))
    with pytest.raises(ValueError, match="There is no data"):
        ArrayData(())
