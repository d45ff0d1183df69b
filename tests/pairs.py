"""Choose cases of a product of parameters so that every two values of different parameters meet in one of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(*axes: Sequence[Hashable]) -> set[tuple[Hashable, ...]]:
    """Return cases, one value of each axis, in which every two values of different axes occur together.

    The case that adds the most pairs is taken next; of equals, the first. So the choice is always the same.
    """
    cases = {case: set(_pairs(case)) for case in product(*axes)}
    wanted = set().union(*cases.values())
    chosen = set()
    while wanted:
        best = max(cases, key=lambda case: len(cases[case] & wanted))
        chosen.add(best)
        wanted -= cases.pop(best)
    return chosen


def parametrize_pairs(names: Sequence[str], *axes: Sequence[Hashable]) -> pytest.MarkDecorator:
    """Run the cases of `every_pair` in every run. The rest of the product belongs to the matrix."""
    chosen = every_pair(*axes)
    return pytest.mark.parametrize(
        names,
        [pytest.param(*case, marks=() if case in chosen else pytest.mark.matrix) for case in product(*axes)],
    )


def _pairs(case: Iterable[Hashable]) -> Iterable[tuple[Any, Any]]:
    return combinations(enumerate(case), 2)
