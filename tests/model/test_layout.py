"""The layout of a model's tensors in the buffer, and how the buffer is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.model.layout import STATISTICS, Layout, Tensor
from tries import tries

TENSORS = st.builds(
    Tensor,
    st.text("ab\u00e9.\ud800", min_size=1, max_size=4),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(-1, 2),
)
LAYOUTS = st.lists(TENSORS, max_size=8, unique_by=lambda tensor: tensor.name).map(lambda some: Layout(tuple(some)))
FEW = tries(40, 200)


def layout_of_sizes(sizes: list[int]) -> Layout:
    return Layout(tuple(Tensor(f"t{index}", (size,)) for index, size in enumerate(sizes)))


def test_tensors_follow_one_another_in_the_buffer() -> None:
    layout = Layout((Tensor("a", (2, 3)), Tensor("b", ()), Tensor("c", (0, 7)), Tensor("d", (4,), group=1)))
    assert layout.offsets == (0, 6, 7, 7, 11)
    assert (layout.size, layout.groups) == (11, 2)
    assert [(tensor.name, begin, end) for tensor, begin, end in layout.within(3, 9)] == [
        ("a", 3, 6),
        ("b", 6, 7),
        ("d", 7, 9),
    ]


def cover_the_model(pieces: tuple[range, ...], size: int) -> bool:
    joined = pieces[0].start == 0 and pieces[-1].stop == size and all(a.stop == b.start for a, b in pairwise(pieces))
    return joined and all(len(piece) > 0 for piece in pieces)


@FEW
@given(LAYOUTS, st.integers(1, 10))
def test_pieces_cut_anywhere_differ_by_at_most_one_element(layout: Layout, shards: int) -> None:
    if shards > layout.size:
        with pytest.raises(ValueError, match="too many"):
            layout.cut(shards, anywhere=True)
        return
    pieces = layout.cut(shards, anywhere=True)
    assert len(pieces) == shards and cover_the_model(pieces, layout.size)
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@FEW
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(1, 6))
def test_a_cut_between_tensors_makes_the_largest_piece_as_small_as_possible(sizes: list[int], shards: int) -> None:
    layout = layout_of_sizes(sizes)
    if shards > sum(size > 0 for size in sizes):
        with pytest.raises(ValueError, match="too many"):
            layout.cut(shards, anywhere=False)
        return
    pieces = layout.cut(shards, anywhere=False)
    assert len(pieces) == shards and cover_the_model(pieces, layout.size)
    assert {piece.start for piece in pieces} <= set(layout.offsets)
    every_way = combinations(layout.offsets[1:-1], shards - 1)
    best = min(max(b - a for a, b in pairwise((0, *cuts, layout.size))) for cuts in every_way)
    assert max(map(len, pieces)) == best


@FEW
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=100), st.data())
def test_a_cut_between_many_tensors_is_about_even(sizes: list[int], data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, len(sizes)))
    pieces = layout_of_sizes(sizes).cut(shards, anywhere=False)
    assert len(pieces) == shards and cover_the_model(pieces, sum(sizes))
    assert max(map(len, pieces)) <= sum(sizes) / shards + max(sizes)


def test_the_other_pieces_are_even_if_one_tensor_is_huge() -> None:
    pieces = layout_of_sizes([100, *[1] * 20]).cut(3, anywhere=False)
    assert list(map(len, pieces)) == [100, 10, 10]


def test_a_cut_into_no_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 shard"):
        layout_of_sizes([3]).cut(0, anywhere=True)


@FEW
@given(LAYOUTS)
def test_a_layout_survives_json(layout: Layout) -> None:
    assert Layout.from_json(json.loads(json.dumps(layout.as_json()))) == layout


@FEW
@given(LAYOUTS, LAYOUTS)
def test_digest_and_difference_agree_with_equality(a: Layout, b: Layout) -> None:
    assert (a.digest() == b.digest()) == (a == b) == (a.differs_from(b) is None)
    assert a.digest() == Layout(a.tensors).digest() and a.differs_from(a) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": "x"}, "parameter 1 is 'b' here and 'x' there"),
        ({"shape": (3, 2)}, "the shape of 'b' is (2, 3) here and (3, 2) there"),
        ({"dtype": "float16"}, "the dtype of 'b' is float32 here and float16 there"),
        ({"group": 4}, "the group of 'b' is 0 here and 4 there"),
    ],
)
def test_the_first_difference_is_named(change: dict[str, Any], sentence: str) -> None:
    a, b = Tensor("a", (1,)), Tensor("b", (2, 3))
    layout, other = Layout((a, b)), Layout((a, replace(b, **change)))
    assert layout.differs_from(other) == sentence
    assert layout.digest() != other.digest()


def test_statistics_may_be_integers_and_need_no_parameter_group() -> None:
    layout = Layout((Tensor("weight", (2,)), Tensor("batches", (), "int64", STATISTICS)))
    assert layout.groups == 1
    assert Layout.from_json(json.loads(json.dumps(layout.as_json()))) == layout


def test_a_longer_layout_differs() -> None:
    a, b = Tensor("a", (1,)), Tensor("b", (2, 3))
    assert Layout((a,)).differs_from(Layout((a, b))) == "there are 1 parameters here and 2 there: 'b' is only there"
    assert Layout((a, b)).differs_from(Layout((a,))) == "there are 2 parameters here and 1 there: 'b' is only here"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "must be an object"),
        ([], "must be an object"),
        ({"tensors": {}}, "must be an object"),
        ({"tensors": [], "more": 1}, "must be an object"),
        ({"tensors": [["a", [1], "float32"]]}, "must be .name, shape, type, group."),
        ({"tensors": [["a", 1, "float32", 0]]}, "must be .name, shape, type, group."),
        ({"tensors": [["", [1], "float32", 0]]}, "not empty"),
        ({"tensors": [["a", [-1], "float32", 0]]}, "whole numbers"),
        ({"tensors": [["a", [1.0], "float32", 0]]}, "whole numbers"),
        ({"tensors": [["a", [True], "float32", 0]]}, "whole numbers"),
        ({"tensors": [["a", ["1"], "float32", 0]]}, "whole numbers"),
        ({"tensors": [["a", [0, 2**63], "float32", 0]]}, "whole numbers"),
        ({"tensors": [["a", [2**30, 2**30], "float32", 0]]}, "whole numbers"),
        ({"tensors": [["a", [1] * 65, "float32", 0]]}, "at most 64"),
        ({"tensors": [["a", [1], "int8", 0]]}, "the type of 'a'"),
        ({"tensors": [["a", [1], "float32", -2]]}, "the group of 'a'"),
        ({"tensors": [["a", [1], "float32", True]]}, "the group of 'a'"),
        ({"tensors": [["a", [1], "int64", 0]]}, "the type of 'a'"),
        ({"tensors": [["a", [1], "bool", -1]]}, "the type of 'a'"),
        ({"tensors": [["a", [1], "float32", 10**9]]}, "the group of 'a'"),
        ({"tensors": [["a", [1], "float32", 0]] * 2}, "'a' twice"),
        ({"tensors": [[f"{n}", [2**40], "float32", 0] for n in range(2)]}, "more than the 2.40"),
    ],
)
def test_a_bad_layout_is_refused(value: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        Layout.from_json(value)
    assert "\n" not in str(caught.value)


def test_some_modules_do_not_import_torch() -> None:
    """The coordinator and the client use these modules where torch is not installed."""
    modules = ("layout", "optimizer_spec", "half_precision")
    code = f"import sys, {', '.join(f'paceline.model.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
