"""The cosines of updates with their weighted sum."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.model.layout import STATISTICS, Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.similarity import Products, products
from paceline.model.slice import Slice


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a.double() @ b.double() / a.double().norm() / b.double().norm())


@pytest.mark.parametrize("weights", [(0.25, 0.25, 0.25, 0.25), (0.1, 0.4, 0.3, 0.2), (1.0, 2.0, 0.0, 0.5)])
def test_cosines_are_those_of_the_vectors(weights: tuple[float, ...]) -> None:
    torch.manual_seed(0)
    updates = [torch.randn(500) + 0.3 for _ in weights]
    whole = sum(weight * update for weight, update in zip(weights, updates, strict=True))
    assert isinstance(whole, torch.Tensor)
    found = products(updates, weights).cosines()
    assert found == pytest.approx([cosine(each, whole) for each in updates], abs=1e-5)


def test_the_products_of_the_parts_of_a_model_add_up() -> None:
    torch.manual_seed(1)
    updates, weights = [torch.randn(300) for _ in range(5)], (0.1, 0.2, 0.3, 0.2, 0.2)
    whole = products(updates, weights)
    parts = [products([update[a:b] for update in updates], weights) for a, b in ((0, 100), (100, 130), (130, 300))]
    together = parts[0] + parts[1] + parts[2]
    assert together.cosines() == pytest.approx(whole.cosines(), abs=1e-5)


def test_models_are_compared_by_their_differences_to_their_own_bases() -> None:
    torch.manual_seed(2)
    updates, bases = torch.randn(4, 50), 100 * torch.randn(4, 50)
    weights = (0.1, 0.2, 0.3, 0.4)
    found = products(list(bases + updates), weights, list(bases))
    assert found.cosines() == pytest.approx(products(list(updates), weights).cosines(), abs=1e-3)


def test_statistics_are_not_compared() -> None:
    """Clients whose models learn opposite things have counted the same number of batches."""
    layout = Layout((Tensor("w", (3,)), Tensor("n", (2,), group=STATISTICS), Tensor("v", (4,), group=1)))
    part = Slice(layout, 0, 9, OptimizerSpec("SGD", ({"lr": 1.0}, {"lr": 1.0})))
    one = torch.tensor([1.0, 2, 3, 500, 500, 4, 5, 6, 7])
    other = torch.tensor([-1.0, -2, -3, 500, 500, -4, -5, -6, -7])
    assert part.products([one, one, other], (0.3,) * 3).cosines() == pytest.approx([1, 1, -1])
    base = torch.full((9,), 10.0)
    models = [one + base, one + base, other + base]
    assert part.products(models, (0.3,) * 3, [base] * 3).cosines() == pytest.approx([1, 1, -1], abs=1e-5)
    only = Slice(layout, 3, 5, OptimizerSpec("SGD", ({"lr": 1.0}, {"lr": 1.0})))
    assert only.products([one[3:5], other[3:5]], (0.5, 0.5)) == Products.none(2)


def test_the_cosine_of_noise_comes_from_the_update_itself() -> None:
    torch.manual_seed(2)
    updates = [torch.randn(100_000) for _ in range(12)]
    found = products(updates, [1 / 12] * 12).cosines()
    assert found == pytest.approx([1 / math.sqrt(12)] * 12, abs=0.02)


@pytest.mark.parametrize("odd", [torch.zeros(10), torch.full((10,), math.nan), torch.full((10,), 1e30)])
def test_an_update_without_a_direction_has_a_cosine_of_zero(odd: torch.Tensor) -> None:
    cosines = products([odd, torch.ones(10), torch.ones(10)], [1 / 3] * 3).cosines()
    assert all(math.isfinite(cosine) for cosine in cosines)
    assert cosines[0] == 0.0
