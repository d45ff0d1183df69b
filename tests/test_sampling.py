"""The cases that `make test` chooses: pairs of parameters, and samples of slow tests and of the matrix."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import pool, sample
from pairs import every_pair

NAMES = [f"tests/test_it.py::test_{which}[{number}]" for which in "abc" for number in range(200)]


def config(count: int, seed: int) -> Any:
    return SimpleNamespace(option=SimpleNamespace(sample=count, sample_seed=seed))


@pytest.mark.parametrize("axes", [((0, 1), (0, 1)), ("abc", "de", "fghi"), (range(7), (0, 1), range(4), (0, 1))])
def test_every_two_values_meet_in_fewer_cases_than_the_product(axes: tuple[Any, ...]) -> None:
    chosen = every_pair(*axes)
    for (first, some), (second, others) in combinations(enumerate(axes), 2):
        assert {(case[first], case[second]) for case in chosen} == set(product(some, others))
    assert chosen <= set(product(*axes))
    assert len(axes) == 2 or len(chosen) < len(list(product(*axes)))
    assert every_pair(*axes) == chosen


@pytest.mark.parametrize("seed", range(5))
def test_the_samples_of_all_functions_contain_the_sample_of_the_matrix(seed: int) -> None:
    """So a function needs to make only the tests of its own sample."""
    asked = config(24, seed)
    parts = [sample([name for name in NAMES if f"test_{which}[" in name], asked) for which in "abc"]
    drawn = sample(NAMES, asked)
    assert len(drawn) == 24
    assert drawn == sample([name for part in parts for name in part], asked)
    assert drawn == sample(NAMES[::-1], asked)
    assert drawn != sample(NAMES, config(24, seed + 100))


def test_a_function_keeps_a_test_even_if_the_sample_is_empty() -> None:
    assert sample(NAMES, config(0, 1)) == []
    assert len(sample(NAMES, config(0, 1), least=1)) == 1


def test_core_tests_always_run_and_other_slow_ones_are_drawn() -> None:
    assert pool({"core", "slow"}) is None
    assert pool({"parametrize"}) is None
    assert pool({"slow"}) == "slow"
    assert pool({"slow", "matrix"}) == pool({"core", "matrix"}) == "matrix"
