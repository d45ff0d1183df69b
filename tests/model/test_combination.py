"""Updates with weights and learning rates of their own: how far each of them moves the model, under every optimizer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from paceline.model.combination import Combination, Combiner, RunningSum, Term
from paceline.model.layout import STATISTICS, Layout, Tensor
from paceline.model.optimizer import names
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.slice import Slice
from tries import tries

#: Two parameter groups, and running statistics between them. Muon accepts matrices only.
LAYOUT = Layout((Tensor("a", (3, 4), group=0), Tensor("mean", (5,), group=STATISTICS), Tensor("b", (4, 2), group=1)))
RATES = (0.01, 0.04)
#: After its first step, Rprop's steps do not depend on the learning rate. torch defines it so.
SCALED = [name for name in names() if name not in ("Rprop", "LBFGS", "SparseAdam")]
LINEAR = ["SGD", "ASGD"]
#: Without what moves the weights apart from the gradient.
BARE: dict[str, dict[str, float]] = {"AdamW": {"weight_decay": 0}, "Muon": {"weight_decay": 0}, "ASGD": {"lambd": 0}}


def new_slice(name: str, **settings: float) -> Slice:
    made = Slice(LAYOUT, 0, LAYOUT.size, OptimizerSpec(name, tuple({"lr": rate, **settings} for rate in RATES)))
    made.weights.copy_(torch.linspace(-1, 1, LAYOUT.size))
    return made


def gradient(seed: int) -> Any:
    return torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed))


def moved(name: str, *terms: Term, **settings: float) -> Any:
    """Return how far one step moves the weights."""
    made = new_slice(name, **settings)
    before = made.weights.clone()
    made.step_by(terms)
    return made.weights - before


def parameters(whole: Any) -> Any:
    """Return the elements that are not statistics."""
    return torch.cat([whole[:12], whole[17:]])


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("weight", [0.125, 2.5, 7.0])
def test_an_update_moves_the_model_in_proportion_to_its_weight(name: str, weight: float) -> None:
    """This is the linear scaling of the learning rate in R²SP's algorithm 1, line 5."""
    one, other = (
        parameters(moved(name, Term.of(gradient(1), each, RATES), **BARE.get(name, {}))) for each in (1.0, weight)
    )
    assert torch.allclose(other / weight, one, rtol=1e-2, atol=0.01 * float(one.abs().max()))
    assert one.abs().max() > 0


@pytest.mark.parametrize("name", SCALED)
def test_shares_of_a_round_make_the_step_of_their_mean(name: str) -> None:
    """A DDP user expects this of `weights=mean`: the optimizer sees the mean gradient at the plain rate."""
    shares = (0.5, 0.2, 0.3)
    together = moved(name, *(Term.of(gradient(seed), share, RATES) for seed, share in enumerate(shares)))
    mean = torch.stack([share * gradient(seed) for seed, share in enumerate(shares)]).sum(0)
    assert torch.allclose(parameters(together), parameters(moved(name, Term.of(mean, 1.0, RATES))), atol=1e-6)


@pytest.mark.parametrize("name", LINEAR)
def test_each_update_has_its_own_learning_rate(name: str) -> None:
    rates = [(0.01, 0.04), (0.1, 0.0), (0.02, 0.4)]
    weights = (0.25, 2.0, 1.0)
    terms = [Term.of(gradient(seed), weights[seed], rates[seed]) for seed in range(3)]
    bare = BARE.get(name, {})
    alone = sum(moved(name, term, **bare) for term in terms)
    assert torch.allclose(parameters(moved(name, *terms, **bare)), parameters(alone), atol=1e-5)


@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_an_adaptive_optimizer_takes_the_rates_into_its_mean(name: str) -> None:
    rates = [(0.01, 0.04), (0.1, 0.0)]
    terms = [Term.of(gradient(seed), 0.5, rates[seed]) for seed in range(2)]
    first = (0.5 * 0.01 * gradient(0) + 0.5 * 0.1 * gradient(1)) / 0.055
    expected = torch.cat([first[:12], gradient(0)[12:]])  # the second group has only the first update's rate
    found = moved(name, *terms)
    assert torch.allclose(parameters(found), parameters(moved(name, Term.of(expected, 1.0, (0.055, 0.02)))), atol=1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_rate_of_zero_moves_nothing(name: str) -> None:
    """A warm-up may begin with a rate of 0. The optimizer still learns the size of the gradients."""
    made = new_slice(name)
    before = parameters(made.weights.clone())
    made.step([gradient(0), gradient(1)], [0.5, 0.5], (0.0, 0.0))
    assert torch.equal(parameters(made.weights), before)
    if name == "Adam":
        seen = made.state()[0]["0.exp_avg"]
        assert torch.allclose(seen, 0.1 * 0.5 * (gradient(0) + gradient(1))[:12].view(seen.shape), atol=1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_clipping_scales_the_gradient_and_leaves_the_rate(name: str) -> None:
    """A huge gradient must not enter the optimizer's averages at its full size."""
    made = new_slice(name, **({"momentum": 0.9} if name == "SGD" else {}))
    made.step_by([Term.of(gradient(0) * 1e6, 0.5, RATES, clip=1e-6)])
    same = new_slice(name, **({"momentum": 0.9} if name == "SGD" else {}))
    same.step_by([Term.of(gradient(0), 0.5, RATES)])
    assert torch.allclose(parameters(made.weights), parameters(same.weights), atol=1e-6)
    for key, value in made.state()[0].items():
        assert key == "weights" or torch.allclose(value, same.state()[0][key], atol=1e-5), key


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_weight_decay_is_shared_among_the_steps_of_a_round(name: str) -> None:
    """Without gradients, eight updates of weight 1/8 decay the model as one update of weight 1 does."""
    settings = {"weight_decay": 0.1, "lr": 1e-3}
    nothing = torch.zeros(LAYOUT.size)
    eight, one = (new_slice(name, **settings) for _ in range(2))
    start = one.weights.clone()
    one.step([nothing], [1.0], (1e-3, 1e-3))
    for _ in range(8):
        eight.step([nothing], [1 / 8], (1e-3, 1e-3))
    ratio = (parameters(eight.weights) - parameters(start)) / (parameters(one.weights) - parameters(start))
    assert ratio.median() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.parametrize("seed", range(8))
def test_a_running_sum_makes_the_same_step_as_its_updates(name: str, seed: int) -> None:
    random_ = random.Random(seed)
    choices = ((0.01, 0.04), (0.1, 0.0), (0.0, 0.4), (0.02, 0.02))
    drawn = [(random_.choice(choices), random_.uniform(0.1, 3)) for _ in range(4)]
    made = new_slice(name)
    total: RunningSum | None = None
    for at, (rates, weight) in enumerate(drawn):
        total = made.add(Term.of(gradient(at), 10 * weight, rates), total)
    assert total is not None and total.count == 4
    before = made.weights.clone()
    made.step_by([total.term(0.1)])
    direct = moved(name, *(Term.of(gradient(at), weight, rates) for at, (rates, weight) in enumerate(drawn)))
    assert torch.allclose(made.weights - before, direct, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_checkpoint_keeps_the_last_step(name: str) -> None:
    """Predictions after a restore use the rate and the weight decay of the last step."""
    settings = {"weight_decay": 0.1, **({"momentum": 0.9} if name == "SGD" else {})}
    made, restored = (new_slice(name, **settings) for _ in range(2))
    for seed in range(3):
        made.step([gradient(seed)], [0.25], RATES, "full", 4)
    restored.load(*made.state())
    assert torch.equal(made.ahead(3, "full"), restored.ahead(3, "full"))


WEIGHTED = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([RATES, (0.01, 0.0), (0.02, 0.04)]))


@tries(50, 200)
@given(st.lists(st.lists(WEIGHTED, min_size=1, max_size=3), max_size=8), st.sampled_from(["SGD", "Adam"]))
def test_what_a_step_reuses_of_the_last_one_is_what_it_would_compute(
    steps: list[list[tuple[float, tuple[float, float]]]], name: str
) -> None:
    combiner = Combiner(name)
    for weighted in steps:
        terms = [Term.of(gradient(1), weight, rates) for weight, rates in weighted]
        assert combiner.of(terms) == Combination.of(terms, name)


def test_a_step_at_another_rate_between_two_steps_is_made_at_its_own_rate() -> None:
    """The settings of the optimizer are left as they are only where the last step had the same."""
    made = new_slice("SGD", momentum=0.9, weight_decay=0.1)
    for rates, turns in ((RATES, 1), (RATES, 1), ((0.5, 0.1), 1), (RATES, 4), (RATES, 1), (RATES, 1)):
        fresh = new_slice("SGD", momentum=0.9, weight_decay=0.1)
        fresh.load(*made.state())
        fresh.step_by([Term.of(gradient(turns), 0.5, rates)], "round", turns)
        made.step_by([Term.of(gradient(turns), 0.5, rates)], "round", turns)
        assert torch.equal(made.weights, fresh.weights)
