"""The partition of a data set among clients."""

from __future__ import annotations

import pytest
import torch

from paceline.federated.partition import Skew, dirichlet
from paceline.simulate.task import TrainingError

LABELS = torch.arange(10).repeat(600)  # 6,000 samples of ten classes


def largest_class(share: torch.Tensor) -> float:
    """Return the fraction of a share that belongs to its largest class."""
    counts = torch.bincount(LABELS[share], minlength=10)
    return float(counts.max() / counts.sum())


def test_a_quarter_of_the_clients_are_outliers_with_mostly_one_class() -> None:
    alphas = Skew().alphas(128, seed=3)
    assert len(alphas) == 128 and sum(alpha == 0.1 for alpha in alphas) == 32
    shares = dirichlet(LABELS, alphas, 390, seed=3)
    assert [len(share) for share in shares] == [390] * 128
    odd = sorted(largest_class(share) for share, alpha in zip(shares, alphas, strict=True) if alpha < 1)
    usual = [largest_class(share) for share, alpha in zip(shares, alphas, strict=True) if alpha > 1]
    assert odd[len(odd) // 2] > 0.6
    assert max(usual) < 0.35
    assert sum(usual) / len(usual) < odd[0]


def test_the_number_of_outliers_is_rounded_up() -> None:
    assert [sum(alpha == 0.1 for alpha in Skew(0.25).alphas(clients, 0)) for clients in (1, 4, 6, 10)] == [1, 1, 2, 3]
    assert 0.1 not in Skew(0.0).alphas(10, 0)


@pytest.mark.parametrize(("alpha", "low", "high"), [(1e4, 0.1, 0.2), (10.0, 0.1, 0.35), (1e-3, 0.97, 1.0)])
def test_alpha_decides_how_even_the_classes_are(alpha: float, low: float, high: float) -> None:
    shares = dirichlet(LABELS, [alpha] * 20, 300, seed=0)
    assert all(low <= largest_class(share) <= high for share in shares)


def test_no_sample_is_assigned_twice_before_all_others_of_its_class() -> None:
    shares = dirichlet(LABELS, [1e6] * 10, 300, seed=0)  # half of the set
    dealt = torch.cat(shares)
    assert len(set(dealt.tolist())) == len(dealt)


def test_if_there_are_too_few_samples_they_are_assigned_again() -> None:
    (share,) = dirichlet(LABELS[:50], [1e6], 500, seed=0)
    assert len(share) == 500
    assert len(set(share.tolist())) == 50


def test_the_same_seed_gives_the_same_shares() -> None:
    one, same, other = (dirichlet(LABELS, [0.5] * 4, 100, seed) for seed in (7, 7, 8))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_missing_class_is_not_assigned() -> None:
    labels = torch.tensor([0, 2, 2, 0] * 50)
    for share in dirichlet(labels, [0.1] * 8, 60, seed=1):
        assert set(labels[share].tolist()) <= {0, 2}


@pytest.mark.parametrize(("alphas", "samples"), [([], 10), ([1.0], 0), ([0.0], 10), ([1.0, -1.0], 10)])
def test_wrong_arguments_are_refused(alphas: list[float], samples: int) -> None:
    with pytest.raises(TrainingError, match="at least one client"):
        dirichlet(LABELS, alphas, samples, seed=0)
