"""The cases that `make test` chooses: pairs of parameters, and the sample of the matrix."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import matrix_sample
from pairs import every_pair

NAMES = [f"tests/test_it.py::test_{which}[{number}]" for which in "abc" for number in range(200)]


def config(sample: int, seed: int) -> Any:
    return SimpleNamespace(option=SimpleNamespace(matrix_sample=sample, matrix_seed=seed))


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
    parts = [matrix_sample([name for name in NAMES if f"test_{which}[" in name], asked) for which in "abc"]
    drawn = matrix_sample(NAMES, asked)
    assert len(drawn) == 24
    assert drawn == matrix_sample([name for part in parts for name in part], asked)
    assert drawn == matrix_sample(NAMES[::-1], asked)
    assert drawn != matrix_sample(NAMES, config(24, seed + 100))


def test_a_function_keeps_a_test_even_if_the_sample_is_empty() -> None:
    assert matrix_sample(NAMES, config(0, 1)) == []
    assert len(matrix_sample(NAMES, config(0, 1), least=1)) == 1
