"""Running statistics are averaged over the workers, and the optimizer does not touch them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from paceline.model.layout import STATISTICS, Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec, is_elementwise
from paceline.model.slice import Slice
from tries import tries

FEW = tries(25, 100)
SPECS = {
    "SGD": OptimizerSpec("SGD", ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, {"lr": 0.1})),
    "AdamW": OptimizerSpec("AdamW", ({"lr": 0.1}, {"lr": 0.1, "weight_decay": 0.5})),
    "Adafactor": OptimizerSpec("Adafactor", ({"lr": 0.1}, {"lr": 0.1})),
}
#: Statistics lie between the parameters and behind them, so that slices are cut there too.
MIXED = Layout(
    (
        Tensor("a", (3, 4), group=0),
        Tensor("a.mean", (4,), group=STATISTICS),
        Tensor("b", (5, 2), group=1),
        Tensor("a.batches", (), "int64", STATISTICS),
        Tensor("c.var", (3,), group=STATISTICS),
    )
)
PLAIN = Layout(tuple(tensor for tensor in MIXED.tensors if tensor.group != STATISTICS))
IS_STATISTIC = torch.cat([torch.full((tensor.size,), tensor.group == STATISTICS) for tensor in MIXED.tensors])


def slices_of(layout: Layout, name: str, shards: int, weights: Any) -> list[Slice]:
    made = []
    for piece in layout.cut(shards, anywhere=is_elementwise(name)):
        made.append(Slice(layout, piece.start, piece.stop, SPECS[name]))
        made[-1].weights.copy_(weights[piece.start : piece.stop])
    return made


def joined(slices: list[Slice]) -> Any:
    return torch.cat([each.weights for each in slices])


def random(size: int, seed: int) -> Any:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@FEW
@given(
    st.sampled_from(sorted(SPECS)),
    st.integers(1, 5),
    st.lists(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_parameters_step_as_if_there_were_no_statistics_and_statistics_are_averaged(
    name: str, shards: int, rounds: list[list[float]]
) -> None:
    start = random(MIXED.size, 0)
    ours = slices_of(MIXED, name, shards, start)
    plain = slices_of(PLAIN, name, 1, start[~IS_STATISTIC])
    expected = start[IS_STATISTIC].double()
    for number, weights in enumerate(rounds):
        pushed = [random(MIXED.size, 10 * number + each + 1) for each in range(len(weights))]
        for one in ours:
            one.step([update[one.start : one.stop] for update in pushed], weights, (0.1, 0.2))
        plain[0].step([update[~IS_STATISTIC] for update in pushed], weights, (0.1, 0.2))
        total = sum(weights)
        if total > 0:
            share = min(1.0, total)
            mean = sum(w / total * update[IS_STATISTIC].double() for w, update in zip(weights, pushed, strict=True))
            expected = (1 - share) * expected + share * mean
        got = joined(ours)
        torch.testing.assert_close(got[~IS_STATISTIC], joined(plain), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[IS_STATISTIC].double(), expected, rtol=1e-4, atol=1e-5)


@FEW
@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(-10.0, 10.0)), min_size=1, max_size=40))
def test_statistics_stay_within_the_values_of_the_workers(updates: list[tuple[float, float]]) -> None:
    """So a variance is never negative, for any order, weights and staleness."""
    layout = Layout((Tensor("mean", (1,), group=STATISTICS),))
    one = Slice(layout, 0, 1, SPECS["SGD"])
    seen = [0.0]
    for weight, value in updates:
        one.step([torch.tensor([value])], [weight], (0.1, 0.1))
        seen.append(value)
        assert min(seen) - 1e-4 <= one.weights.item() <= max(seen) + 1e-4


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 0.5), (7.0, 7.0)])
def test_a_barrier_gives_the_mean_for_any_scale_of_its_weights(weights: tuple[float, float]) -> None:
    one = Slice(Layout((Tensor("n", (), "int64", STATISTICS),)), 0, 1, SPECS["SGD"])
    one.weights.fill_(100.0)
    one.step([torch.tensor([7.0]), torch.tensor([9.0])], weights, (0.1, 0.1))
    assert one.weights.item() == 8.0


def test_stale_values_do_not_make_statistics_diverge() -> None:
    """Thirty workers push in turn. Each makes batch norm's step from the value that it pulled thirty updates ago."""
    one = Slice(Layout((Tensor("var", (1,), group=STATISTICS),)), 0, 1, SPECS["SGD"])
    one.weights.fill_(1.0)
    pulled = [1.0] * 30
    for step in range(3000):
        worker = step % 30
        one.step([torch.tensor([0.9 * pulled[worker] + 0.1 * 0.2])], [1.0], (0.1, 0.1))
        pulled[worker] = one.weights.item()
        assert 0.2 <= one.weights.item() <= 1.0
    assert one.weights.item() == pytest.approx(0.2, abs=1e-3)


def test_statistics_are_saved_and_restored_bit_for_bit() -> None:
    one = slices_of(MIXED, "AdamW", 1, random(MIXED.size, 0))[0]
    again = Slice(MIXED, 0, MIXED.size, SPECS["AdamW"])
    for step in range(3):
        one.step([random(MIXED.size, step)], [0.5], (0.1, 0.1))
    tensors, meta = one.state()
    again.load({key: value.clone() for key, value in tensors.items()}, meta)
    for step in range(3, 5):
        for each in (one, again):
            each.step([random(MIXED.size, step)], [0.5], (0.1, 0.1))
        assert torch.equal(one.weights, again.weights)


def test_statistics_are_mixed_like_parameters() -> None:
    one = slices_of(MIXED, "SGD", 1, random(MIXED.size, 0))[0]
    old, model = one.weights.clone(), random(MIXED.size, 1)
    one.mix([model], [1.0], 0.25)
    torch.testing.assert_close(one.weights, 0.75 * old + 0.25 * model)
