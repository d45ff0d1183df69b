"""Convolutions as matrix products have the same outputs and gradients, also for many networks at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.simulate.batched_convolution import Product, as_products
from paceline.simulate.gradients import Scorer, flat, stacked_gradients
from paceline.workloads.data import load
from paceline.workloads.networks import loss, make
from tries import tries

DIGITS = load("digits")
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@tries(20, 60, derandomize=False)
@given(
    kernel=pairs,
    stride=pairs,
    padding=st.one_of(st.just("valid"), st.tuples(st.integers(0, 2), st.integers(0, 2))),
    bias=st.booleans(),
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
)
def test_a_product_has_the_output_of_its_convolution(kernel, stride, padding, bias, size) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, kernel, stride, padding, bias=bias)
    images = torch.randn(4, 2, *size)
    assert torch.allclose(Product(layer)(images), layer(images), atol=1e-5)


def test_a_product_in_low_precision_copies_the_image_in_that_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies for each place of the kernel take most of the memory, and of the time on a GPU."""
    torch.manual_seed(0)
    layer, images = Product(nn.Conv2d(2, 3, 3, padding=1, bias=False)), torch.randn(4, 2, 6, 6)
    copied: list[torch.dtype] = []
    stack = torch.stack

    def watched(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
        copied.append(parts[0].dtype)
        return stack(parts, dim)

    monkeypatch.setattr(torch, "stack", watched)
    exact = layer(images)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(images)
    assert copied == [torch.float32, torch.bfloat16]
    assert found.dtype == torch.float32  # batch norm under vmap needs a single type
    assert torch.allclose(found, exact, atol=0.05)


def test_convolutions_that_cannot_be_products_stay() -> None:
    kept = [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding="same"),
    ]
    network = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Sequential(*kept))
    changed = as_products(network)
    assert [type(layer) for layer in changed.modules()].count(Product) == 1
    assert isinstance(network[0], nn.Conv2d)  # the original network is unchanged
    images = torch.randn(2, 4, 12, 12)
    assert torch.allclose(changed(images), network(images), atol=1e-5)


@pytest.mark.parametrize("name", ["cnn", "resnet20"])
def test_gradients_of_many_networks_at_once_equal_those_of_each(name: str) -> None:
    torch.manual_seed(0)
    network = make(name, DIGITS).double()
    torch.func.replace_all_batch_norm_modules_(network)
    scorer = Scorer(loss, torch.device("cpu"), "float32")

    def fetch(samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return DIGITS.prepared(DIGITS.inputs[samples]).double(), DIGITS.labels[samples]

    weights = flat(network) + 0.01 * torch.randn(3, flat(network).numel(), dtype=torch.float64)
    samples = torch.randint(0, len(DIGITS.labels), (3, 8))
    found, losses = stacked_gradients(as_products(network), scorer, fetch, weights, samples)
    for client in range(3):
        row = weights[client].clone().requires_grad_()
        views = dict(zip(dict(network.named_parameters()), _split(row, network), strict=True))
        inputs, labels = fetch(samples[client])
        expected = loss(torch.func.functional_call(network, views, inputs), labels)
        (gradient,) = torch.autograd.grad(expected, row)
        assert losses[client].item() == pytest.approx(expected.item())
        assert torch.allclose(found[client], gradient, atol=1e-9)


def test_many_residual_networks_at_once_in_low_precision() -> None:
    torch.manual_seed(0)
    network = make("resnet20", DIGITS)
    torch.func.replace_all_batch_norm_modules_(network)

    def fetch(samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return DIGITS.prepared(DIGITS.inputs[samples]), DIGITS.labels[samples]

    weights, samples = flat(network).repeat(2, 1), torch.randint(0, len(DIGITS.labels), (2, 8))
    (exact, exact_loss), (rough, rough_loss) = (
        stacked_gradients(as_products(network), Scorer(loss, torch.device("cpu"), each), fetch, weights, samples)
        for each in ("float32", "bfloat16")
    )
    assert torch.allclose(rough_loss, exact_loss, rtol=0.05)
    assert torch.cosine_similarity(rough, exact).min() > 0.9


def _split(row: torch.Tensor, network: nn.Module) -> list[torch.Tensor]:
    sizes = [parameter.numel() for parameter in network.parameters()]
    return [
        part.view(parameter.shape)
        for part, parameter in zip(torch.split(row, sizes), network.parameters(), strict=True)
    ]
