"""What a worker says of its model when it joins."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from paceline.model.layout import Layout, Tensor
from paceline.model.spec import OptimizerSpec
from paceline.serve.description import Description

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
