"""The description of a model that a worker sends when it joins."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.model.description import MIN_PIECE_ELEMENTS, Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from tries import tries


def sgd(*groups: dict[str, Any], name: str = "SGD") -> Description:
    return Description(Layout((Tensor("a", (2,)),)), OptimizerSpec(name, groups), "abc")


HERE = sgd({"lr": 0.1, "momentum": 0.9})


def test_a_description_survives_json() -> None:
    assert Description.from_json(HERE.as_json()) == HERE
    several = replace(HERE, local_steps=True)
    assert Description.from_json(several.as_json()) == several


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        (replace(HERE, layout=Layout((Tensor("a", (3,)),))), r"the shape of 'a' is \(2,\) here and \(3,\) there"),
        (replace(HERE, optimizer=OptimizerSpec("Adam", ({"lr": 0.1},))), "the optimizer is SGD here and Adam there"),
        (replace(HERE, optimizer=OptimizerSpec("SGD", ({}, {}))), "1 parameter groups here and 2 there"),
        (replace(HERE, fixed="xyz"), "frozen parameters or buffers have other values there"),
        (sgd({"lr": 0.1, "momentum": 0.5}), "SGD's momentum is 0.9 here and 0.5 there"),
    ],
)
def test_differences_that_matter_are_named(there: Description, sentence: str) -> None:
    assert re.search(sentence, str(HERE.differs_from(there)))


def test_a_learning_rate_may_differ() -> None:
    assert HERE.differs_from(sgd({"lr": 0.5, "momentum": 0.9})) is None


def test_a_differing_setting_is_named_with_its_group() -> None:
    ours = sgd({"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.1, "betas": (0.9, 0.99)}, name="Adam")
    theirs = sgd({"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.1, "betas": (0.9, 0.999)}, name="Adam")
    sentence = "Adam's betas of parameter group 1 is (0.9, 0.99) here and (0.9, 0.999) there"
    assert ours.differs_from(theirs) == sentence
    assert ours.differs_from(theirs, settings=False) is None, "a resumed run may change its settings"
    assert Description.from_json(ours.as_json()).differs_from(ours) is None


def test_a_setting_that_only_one_version_of_torch_knows_is_not_compared() -> None:
    assert HERE.differs_from(sgd({"lr": 0.1, "momentum": 0.9, "new": True})) is None
    assert sgd({"lr": 0.1, "momentum": 0.9, "new": True}).differs_from(HERE) is None


# Dealing the pieces of a model to the shards


SIZES = st.lists(st.one_of(st.integers(1, 300), st.integers(1, 400_000)), min_size=1, max_size=12)


@tries(60, 300)
@given(SIZES, st.integers(1, 6), st.one_of(st.none(), st.integers(1, 80)), st.sampled_from(["SGD", "Adam", "Muon"]))
def test_every_element_is_dealt_to_one_shard(sizes: list[int], shards: int, pieces: int | None, optimizer: str) -> None:
    layout = Layout(tuple(Tensor(str(number), (size,)) for number, size in enumerate(sizes)))
    described = Description(layout, OptimizerSpec(optimizer, ({"lr": 0.1},)))
    anywhere = optimizer != "Muon"
    try:
        dealt = described.deal(shards, pieces)
    except ValueError:
        assert shards > (layout.size if anywhere else len(sizes))
        return
    assert len(dealt) == shards
    (rows,) = {len(ranges) for ranges in dealt}
    in_turn = [dealt[number % shards][number // shards] for number in range(shards * rows)]
    assert [0, *(stop for _, stop in in_turn)] == [*(start for start, _ in in_turn), layout.size], (
        "the pieces have no gaps"
    )
    assert all(start < stop for start, stop in in_turn)
    if anywhere:
        held = [sum(stop - start for start, stop in ranges) for ranges in dealt]
        assert max(held) - min(held) <= rows, "all shards hold about the same"
        assert rows == 1 or all(stop - start >= MIN_PIECE_ELEMENTS for start, stop in in_turn), "no piece is too small"
        wanted = pieces or 16
        assert rows * shards >= wanted or layout.size < (rows + 1) * shards * MIN_PIECE_ELEMENTS, (
            "as many pieces as wanted, or as fit"
        )
    else:
        assert {end for ends in in_turn for end in ends} <= set(layout.offsets), "whole tensors"


def test_a_larger_model_has_more_pieces_up_to_a_limit() -> None:
    def pieces(size: int, shards: int = 2) -> int:
        described = Description(Layout((Tensor("w", (size,)),)), OptimizerSpec("SGD", ({"lr": 0.1},)))
        return sum(map(len, described.deal(shards)))

    assert [pieces(size) for size in (1000, 1 << 17, 1 << 22, 1 << 23, 1 << 25)] == [2, 16, 32, 64, 64]
    assert [pieces(1 << 25, shards) for shards in (1, 4, 8, 16)] == [64, 64, 128, 256], "16 each, of several shards"


def test_an_optimizer_is_shown_with_the_settings_that_matter() -> None:
    settings = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0, "foreach": None}
    assert str(OptimizerSpec("SGD", (settings, {"lr": 0.5}))) == "SGD(lr=0.1, momentum=0.9)"
    assert len(str(OptimizerSpec("SGD", ({"x" * 1000: 1},)))) < 300, "a worker sends these names"
