"""What a worker says of its model when it joins."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.model.description import MIN_PIECE_ELEMENTS, Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec

HERE = Description(Layout((Tensor("a", (2,)),)), OptimizerSpec("SGD", ({"lr": 0.1},)), "abc")


def test_json_brings_back_the_same() -> None:
    assert Description.from_json(HERE.as_json()) == HERE


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        (replace(HERE, layout=Layout((Tensor("a", (3,)),))), r"the shape of 'a' is \(2,\) here and \(3,\) there"),
        (replace(HERE, optimizer=OptimizerSpec("Adam", ({"lr": 0.1},))), "the optimizer is SGD here and Adam there"),
        (replace(HERE, optimizer=OptimizerSpec("SGD", ({}, {}))), "1 parameter groups here and 2 there"),
        (replace(HERE, fixed="xyz"), "frozen, or buffers, have other values there"),
    ],
)
def test_differences_that_matter_are_named(there: Description, sentence: str) -> None:
    assert re.search(sentence, str(HERE.differs_from(there)))


def test_a_learning_rate_may_differ() -> None:
    assert HERE.differs_from(replace(HERE, optimizer=OptimizerSpec("SGD", ({"lr": 0.5},)))) is None


# How a model is dealt out


SIZES = st.lists(st.one_of(st.integers(1, 300), st.integers(1, 400_000)), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(SIZES, st.integers(1, 6), st.one_of(st.none(), st.integers(1, 80)), st.sampled_from(["SGD", "Adam", "Muon"]))
def test_every_element_is_dealt_to_one_shard(sizes: list[int], shards: int, slices: int | None, optimizer: str) -> None:
    layout = Layout(tuple(Tensor(str(number), (size,)) for number, size in enumerate(sizes)))
    described = Description(layout, OptimizerSpec(optimizer, ({"lr": 0.1},)))
    anywhere = optimizer != "Muon"
    try:
        dealt = described.deal(shards, slices)
    except ValueError:
        assert shards > (layout.size if anywhere else len(sizes))
        return
    assert len(dealt) == shards
    (rows,) = {len(pieces) for pieces in dealt}
    cards = [dealt[number % shards][number // shards] for number in range(shards * rows)]
    assert [0, *(stop for _, stop in cards)] == [*(start for start, _ in cards), layout.size], (
        "one card after the other"
    )
    assert all(start < stop for start, stop in cards)
    if anywhere:
        held = [sum(stop - start for start, stop in pieces) for pieces in dealt]
        assert max(held) - min(held) <= rows, "evenly"
        assert rows == 1 or all(stop - start >= MIN_PIECE_ELEMENTS for start, stop in cards), "a slice is worth its ado"
        wanted = slices or 16
        assert rows * shards >= wanted or layout.size < (rows + 1) * shards * MIN_PIECE_ELEMENTS, (
            "as many as were wanted, or fit"
        )
    else:
        assert {end for card in cards for end in card} <= set(layout.offsets), "whole tensors"


def test_a_large_model_is_dealt_in_more_pieces_and_not_in_ever_more() -> None:
    def pieces(size: int) -> int:
        described = Description(Layout((Tensor("w", (size,)),)), OptimizerSpec("SGD", ({"lr": 0.1},)))
        return sum(map(len, described.deal(2)))

    assert [pieces(size) for size in (1000, 1 << 17, 1 << 20, 1 << 21, 1 << 25)] == [2, 16, 32, 64, 64]
