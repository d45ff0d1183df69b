"""The correction of staleness: predictions equal the steps of torch's optimizers, and momentum decays once a round."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.model.correction import ASKED, CORRECTIONS, Correction, checked, chosen, momentum_of, slowed
from paceline.model.layout import STATISTICS, Layout, Tensor
from paceline.model.optimizer import spec_of
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.slice import Slice

SIZE = 40
LAYOUT = Layout((Tensor("w", (SIZE,)),))
RATE = 0.05
#: Variants of SGD whose momentum can be predicted.
MOMENTUM: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("SGD", {"momentum": 0.9}),
    "dampening": ("SGD", {"momentum": 0.9, "dampening": 0.4}),
    "mean": ("SGD", {"momentum": 0.8, "dampening": 0.8}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "uphill": ("SGD", {"momentum": 0.9, "maximize": True}),
}
ADAM: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {"betas": (0.8, 0.95)}),
    "amsgrad": ("Adam", {"betas": (0.8, 0.95), "amsgrad": True}),
    "adam uphill": ("Adam", {"maximize": True}),
    "adamw": ("AdamW", {"weight_decay": 0.0}),
}
ALL = MOMENTUM | ADAM
#: Optimizers with a weight decay that moves the weights but hardly changes over a few steps.
DECAY: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("SGD", {"momentum": 0.9, "weight_decay": 0.02}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
    "uphill": ("SGD", {"momentum": 0.9, "maximize": True, "weight_decay": 0.02}),
    "adam": ("Adam", {"betas": (0.8, 0.9999), "weight_decay": 0.02}),
    "adamw": ("AdamW", {"betas": (0.8, 0.9999), "weight_decay": 0.05}),
}


def random(seed: int, size: int = SIZE) -> Any:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def signs(seed: int) -> Any:
    """Return gradients whose squares are always the same, so that Adam's second moment is constant."""
    return random(seed).sign() * random(99).abs()


def both(name: str, settings: dict[str, Any]) -> tuple[Slice, Any, Any]:
    """Return a slice, and torch's own parameter and optimizer with the same weights."""
    parameter = torch.nn.Parameter(random(0))
    optimizer = getattr(torch.optim, name)([parameter], lr=RATE, **settings)
    ours = Slice(LAYOUT, 0, SIZE, spec_of(optimizer))
    ours.weights.copy_(parameter.detach())
    return ours, parameter, optimizer


def step(parameter: Any, optimizer: Any, gradient: Any) -> None:
    parameter.grad = gradient.clone()
    optimizer.step()


def spec(name: str, **settings: Any) -> OptimizerSpec:
    return OptimizerSpec(name, ({"lr": RATE, **settings},))


# The choice of a correction


@pytest.mark.parametrize(
    ("of", "auto"),
    [
        (spec("SGD", momentum=0.9), "full"),
        (spec("SGD", momentum=0.9, nesterov=True), "full"),
        (spec("Adam"), "full"),
        (spec("AdamW"), "full"),
        (spec("SGD"), "none"),
        (spec("SGD", momentum=0.0), "none"),
        (spec("SGD", momentum=1.0), "none"),  # it never decays, so it cannot be predicted
        (OptimizerSpec("SGD", ({"lr": 1.0}, {"lr": 1.0, "momentum": 0.5})), "full"),
        (spec("RMSprop", momentum=0.9), "none"),
        (spec("Adagrad"), "none"),
    ],
    ids=lambda value: "" if isinstance(value, str) else f"{value.name}{value.settings_of_groups[-1]}",
)
def test_auto_is_full_where_momentum_is_known(of: OptimizerSpec, auto: Correction) -> None:
    assert chosen("auto", of) == auto
    assert chosen("none", of) == "none"
    for asked in ("predict", "round", "full"):
        if of.name in ("SGD", "Adam", "AdamW"):
            assert chosen(asked, of) == ("none" if auto == "none" else asked)
        else:
            with pytest.raises(ValueError, match=f"SGD, Adam and AdamW, and that of {of.name} is not known$"):
                chosen(asked, of)


@pytest.mark.parametrize(
    ("of", "momentum"),
    [
        (spec("SGD"), 0.0),
        (spec("SGD", momentum=0.9), 0.9),
        (OptimizerSpec("SGD", ({"lr": 1.0, "momentum": 0.3}, {"lr": 1.0, "momentum": 0.5})), 0.5),
        (spec("SGD", momentum=1.0), 0.0),  # it never decays
        (spec("Adam"), 0.9),
        (spec("AdamW", betas=(0.8, 0.99)), 0.8),
        (spec("RMSprop", momentum=0.9), 0.0),  # not known
    ],
    ids=lambda value: f"{value.name}{value.settings_of_groups[-1]}" if isinstance(value, OptimizerSpec) else "",
)
def test_momentum_of_an_optimizer(of: OptimizerSpec, momentum: float) -> None:
    assert momentum_of(of) == momentum


def test_a_correction_that_does_not_exist_is_refused() -> None:
    assert [checked(asked) for asked in ASKED] == ["auto", *CORRECTIONS]
    for wrong in ("Full", "", "yes"):
        with pytest.raises(ValueError, match=f"^correct must be auto, none, predict, round or full, not '{wrong}'$"):
            checked(wrong)


# Predictions, compared with torch's own optimizers that make those steps


@pytest.mark.parametrize("steps", [1, 2, 3, 15, 200])
@pytest.mark.parametrize("which", MOMENTUM)
def test_predict_equals_torchs_steps_with_zero_gradients(which: str, steps: int) -> None:
    ours, parameter, optimizer = both(*MOMENTUM[which])
    for seed in range(1, 6):
        ours.step([random(seed)], [1.0], [RATE])
        step(parameter, optimizer, random(seed))
    before = ours.weights.clone()
    ahead = ours.ahead(steps, "predict")
    for _ in range(steps):
        step(parameter, optimizer, torch.zeros(SIZE))
    torch.testing.assert_close(ahead, parameter.detach(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ahead, before, atol=1e-3)
    assert torch.equal(ours.weights, before), "the prediction is a copy"


@pytest.mark.parametrize("steps", [1, 2, 3, 15])
@pytest.mark.parametrize("which", ALL)
def test_full_equals_torchs_steps_with_the_newest_gradient(which: str, steps: int) -> None:
    ours, parameter, optimizer = both(*ALL[which])
    for seed in range(1, 151):  # enough steps for Adam's bias correction to vanish
        ours.step([signs(seed)], [1.0], [RATE], "full", 1)
        step(parameter, optimizer, signs(seed))
    before, ahead = ours.weights.clone(), ours.ahead(steps, "full")
    for _ in range(steps):
        step(parameter, optimizer, signs(150))
    torch.testing.assert_close(ahead - before, parameter.detach() - before, rtol=1e-3, atol=2e-5)
    assert float((ahead - before).abs().max()) > 0.01


@pytest.mark.parametrize("which", DECAY)
@pytest.mark.parametrize("correct", ["predict", "full"])
def test_predictions_include_weight_decay(which: str, correct: Correction) -> None:
    name, settings = DECAY[which]
    ours, parameter, optimizer = both(name, settings)
    blind = Slice(LAYOUT, 0, SIZE, spec_of(optimizer))
    for seed in range(1, 151):
        ours.step([signs(seed)], [1.0], [RATE], correct, 1)
        step(parameter, optimizer, signs(seed))
    tensors, meta = ours.state()
    blind.load(tensors, meta)
    for group in blind._optimizer.param_groups:
        group["weight_decay"] = 0.0
    before = ours.weights.clone()
    ahead, without = ours.ahead(6, correct) - before, blind.ahead(6, correct) - before
    for _ in range(6):
        step(parameter, optimizer, signs(150) if correct == "full" else torch.zeros(SIZE))
    true = parameter.detach() - before
    assert (ahead - true).norm() < 0.35 * (without - true).norm()


def test_amsgrad_uses_the_largest_second_moment_so_far() -> None:
    ours, parameter, optimizer = both(*ADAM["amsgrad"])
    for seed in range(1, 151):
        gradient = signs(seed) * (10 if seed < 75 else 1)
        ours.step([gradient], [1.0], [RATE], "full", 1)
        step(parameter, optimizer, gradient)
    before, ahead = ours.weights.clone(), ours.ahead(3, "full")
    for _ in range(3):
        step(parameter, optimizer, signs(150))
    torch.testing.assert_close(ahead - before, parameter.detach() - before, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 3, 6])
@pytest.mark.parametrize("which", ["adam", "adamw"])
def test_adams_prediction_holds_while_its_second_moment_is_constant(which: str, steps: int) -> None:
    name, settings = ADAM[which]
    ours, parameter, optimizer = both(name, settings | {"betas": (0.8, 0.99999)})
    for seed in range(1, 301):
        ours.step([random(seed)], [1.0], [RATE])
        step(parameter, optimizer, random(seed))
    before, ahead = ours.weights.clone(), ours.ahead(steps, "predict")
    for _ in range(steps):
        step(parameter, optimizer, torch.zeros(SIZE))
    torch.testing.assert_close(ahead - before, parameter.detach() - before, rtol=0.02, atol=1e-5)


def test_the_newest_gradient_is_the_weighted_sum_of_an_apply() -> None:
    ours, parameter, optimizer = both("SGD", {"momentum": 0.9})
    together = 0.25 * random(1) + 0.75 * random(2)
    ours.step([random(1), random(2)], [0.25, 0.75], [RATE], "full", 1)
    ahead = ours.ahead(2, "full")
    for _ in range(3):
        step(parameter, optimizer, together)
    torch.testing.assert_close(ahead, parameter.detach(), rtol=1e-4, atol=1e-6)


def test_each_group_has_its_own_prediction_and_statistics_have_none() -> None:
    tensors = (Tensor("a", (5,)), Tensor("b", (4,), group=1), Tensor("c", (6,)), Tensor("mean", (3,), group=STATISTICS))
    layout = Layout(tensors)
    settings = {"lr": RATE, "momentum": 0.9}, {"lr": RATE, "momentum": 0.5, "nesterov": True}
    one = Slice(layout, 2, layout.size, OptimizerSpec("SGD", settings))
    one.weights.copy_(random(0, layout.size)[2:])
    gradient = random(1, layout.size)[2:]
    one.step([gradient], [1.0], [0.1, 0.2], "full", 1)
    ahead = one.ahead(4, "full")
    reference = [torch.nn.Parameter(part.clone()) for part in (one.weights[:3], one.weights[3:7], one.weights[7:13])]
    for number, rate, own in ((0, 0.1, settings[0]), (1, 0.2, settings[1]), (2, 0.1, settings[0])):
        start, stop = ((0, 3), (3, 7), (7, 13))[number]
        optimizer: Any = torch.optim.SGD([reference[number]], **{**own, "lr": rate})
        optimizer.state[reference[number]]["momentum_buffer"] = gradient[start:stop].clone()
        for _ in range(4):
            step(reference[number], optimizer, gradient[start:stop])
    torch.testing.assert_close(ahead[:13], torch.cat([part.detach() for part in reference]), rtol=1e-5, atol=1e-6)
    assert torch.equal(ahead[13:], one.weights[13:])


@pytest.mark.parametrize("correct", CORRECTIONS)
@pytest.mark.parametrize("which", ALL)
def test_there_is_no_prediction_before_the_first_step_or_for_no_steps(which: str, correct: Correction) -> None:
    ours, _, _ = both(*ALL[which])
    assert torch.equal(ours.ahead(7, correct), ours.weights)
    ours.step([random(1)], [1.0], [RATE], correct, 4)
    assert torch.equal(ours.ahead(0, correct), ours.weights)
    assert torch.equal(ours.ahead(-3, correct), ours.weights)
    assert torch.equal(ours.ahead(3, correct), ours.weights) == (correct == "none")


@pytest.mark.parametrize("correct", CORRECTIONS)
@pytest.mark.parametrize("settings", [{}, {"momentum": 1.0}, {"momentum": 1.5}], ids=str)
def test_without_momentum_that_decays_there_is_no_prediction(settings: dict[str, Any], correct: Correction) -> None:
    ours, parameter, optimizer = both("SGD", settings)
    for seed in range(1, 4):
        ours.step([random(seed)], [1.0], [RATE], correct, 4)
        step(parameter, optimizer, random(seed))
    torch.testing.assert_close(ours.weights, parameter.detach())
    assert torch.equal(ours.ahead(5, correct), ours.weights)


@pytest.mark.parametrize("which", ALL)
def test_a_billion_steps_cost_no_more_than_one(which: str) -> None:
    ours, _, _ = both(*ALL[which])
    ours.step([random(1)], [1.0], [RATE], "full", 4)
    began = time.perf_counter()
    for correct in CORRECTIONS:
        ours.ahead(10**9, correct)
    assert time.perf_counter() - began < 10.0


def test_a_prediction_is_written_to_the_given_buffer() -> None:
    ours, _, _ = both("SGD", {"momentum": 0.9})
    ours.step([random(1)], [1.0], [RATE], "full", 4)
    out = torch.full((SIZE,), float("nan"))
    for correct in CORRECTIONS:
        assert ours.ahead(3, correct, out) is out
        assert torch.equal(out, ours.ahead(3, correct))


def test_a_gradient_that_is_no_longer_the_newest_is_not_used() -> None:
    """A step without a correction has followed, and its gradient was not kept."""
    ours, _, _ = both("SGD", {"momentum": 0.9})
    ours.step([random(1)], [1.0], [RATE], "full", 4)
    ours.step([random(2)], [1.0], [RATE], "none", 1)
    assert torch.equal(ours.ahead(3, "full"), ours.ahead(3, "predict"))


# Rounds


@pytest.mark.parametrize("turns", [2, 5, 16])
@pytest.mark.parametrize("correct", ["round", "full"])
@pytest.mark.parametrize("which", MOMENTUM)
def test_a_gradient_finally_moves_the_weights_as_far_as_without_the_correction(
    which: str, correct: Correction, turns: int
) -> None:
    ours, parameter, optimizer = both(*MOMENTUM[which])
    quiet = torch.zeros(SIZE)  # the first step, because torch dampens from the second step on
    for gradient in (quiet, random(1), *[quiet] * 150):
        step(parameter, optimizer, gradient)
    for gradient in (quiet, random(1), *[quiet] * 150 * turns):
        ours.step([gradient], [1.0], [RATE], correct, turns)
    torch.testing.assert_close(ours.weights, parameter.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", MOMENTUM)
def test_a_round_of_the_same_gradient_moves_the_weights_as_far_as_one_plain_step(which: str) -> None:
    """This holds once momentum has reached its limit. Each update of a round has its share of the weight."""
    turns = 4
    ours, parameter, optimizer = both(*MOMENTUM[which])
    for _ in range(200):
        step(parameter, optimizer, random(1))
        for _ in range(turns):
            ours.step([random(1)], [1 / turns], [RATE], "round", turns)
    ends = []
    for _ in range(2):
        ends.append((parameter.detach().clone(), ours.weights.clone()))
        step(parameter, optimizer, random(1))
        for _ in range(turns):
            ours.step([random(1)], [1 / turns], [RATE], "round", turns)
    (plain, mine), (plain_after, mine_after) = ends
    torch.testing.assert_close(mine_after - mine, plain_after - plain, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("which", ["adam", "adamw"])
def test_adams_means_decay_once_a_round(which: str) -> None:
    name, settings = ADAM[which]
    slow, turns = Slice(LAYOUT, 0, SIZE, spec(name, **settings)), 4
    betas = settings.get("betas", (0.9, 0.999))  # torch's own, where none are given
    plain = Slice(LAYOUT, 0, SIZE, spec(name, **settings | {"betas": tuple(beta ** (1 / turns) for beta in betas)}))
    for seed in range(1, 9):
        slow.step([random(seed)], [1.0], [RATE], "round", turns)
        plain.step([random(seed)], [1.0], [RATE])
    assert torch.equal(slow.weights, plain.weights)


@pytest.mark.parametrize("correct", CORRECTIONS)
@pytest.mark.parametrize("which", ALL)
def test_a_round_of_one_step_equals_no_correction(which: str, correct: Correction) -> None:
    """They are equal bit for bit, also after rounds of several steps."""
    ours, _, _ = both(*ALL[which])
    plain, _, _ = both(*ALL[which])
    for seed in range(1, 40):
        ours.step([random(seed)], [0.5], [seed / 1000], correct, 1)
        plain.step([random(seed)], [0.5], [seed / 1000])
    assert torch.equal(ours.weights, plain.weights)
    ours.step([random(4)], [1.0], [RATE], correct, 5)
    plain.load(*copied(ours))
    for seed in range(5, 8):
        ours.step([random(seed)], [1.0], [2 * RATE], correct, 1)
        plain.step([random(seed)], [1.0], [2 * RATE])
        assert torch.equal(ours.weights, plain.weights)


def test_the_settings_for_a_round_of_one_step_are_exact() -> None:
    for thousandths in range(1, 100):
        rate = thousandths / 1000
        assert slowed("SGD", {"momentum": 0.9}, rate, 1) == {"lr": rate, "momentum": 0.9}
        assert slowed("Adam", {"betas": (0.9, 0.999)}, rate, 1) == {"lr": rate, "betas": (0.9, 0.999)}


# Checkpoints


def copied(one: Slice) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a copy of a slice's state, as it would be in a file."""
    tensors, meta = one.state()
    return {name: each.clone() for name, each in tensors.items()}, json.loads(json.dumps(meta))


@pytest.mark.parametrize("correct", CORRECTIONS)
@pytest.mark.parametrize("which", ALL)
def test_predictions_are_the_same_after_a_checkpoint(which: str, correct: Correction) -> None:
    ours, _, _ = both(*ALL[which])
    again, _, _ = both(*ALL[which])
    again.step([random(9)], [1.0], [3 * RATE], "full", 7)  # this earlier state must be replaced completely
    again.load(*copied(ours))
    assert torch.equal(again.ahead(5, correct), ours.ahead(5, correct))
    for seed in range(1, 4):
        ours.step([random(seed)], [1.0], [RATE / seed], correct, 4)
    again.load(*copied(ours))
    for seed in range(4, 7):
        assert torch.equal(again.ahead(5, correct), ours.ahead(5, correct))
        for each in (ours, again):
            each.step([random(seed)], [1.0], [RATE], correct, 4)
        assert torch.equal(again.weights, ours.weights)


@pytest.mark.parametrize("then", CORRECTIONS)
@pytest.mark.parametrize("before", CORRECTIONS)
def test_a_run_may_continue_with_another_correction(before: Correction, then: Correction) -> None:
    ours, _, _ = both("SGD", {"momentum": 0.9})
    ours.step([random(1)], [1.0], [RATE], before, 4)
    again, _, _ = both("SGD", {"momentum": 0.9})
    again.load(*copied(ours))
    for each in (ours, again):
        each.step([random(2)], [1.0], [RATE], then, 4)
    assert torch.equal(again.weights, ours.weights)
    assert torch.equal(again.ahead(3, then), ours.ahead(3, then))


def test_a_checkpoint_that_is_older_than_corrections_can_be_loaded() -> None:
    ours, _, _ = both("Adam", {})
    ours.step([random(1)], [1.0], [RATE], "full", 4)
    tensors, meta = copied(ours)
    del tensors["newest"], meta["last"]
    again, _, _ = both("Adam", {})
    again.step([random(9)], [1.0], [3 * RATE], "full", 7)
    again.load(tensors, meta)
    assert torch.equal(again.ahead(3, "full"), again.ahead(3, "predict")), "there is no newest gradient"
    for each in (ours, again):
        each.step([random(2)], [1.0], [RATE], "full", 4)
    assert torch.equal(again.weights, ours.weights)
    assert torch.equal(again.ahead(3, "full"), ours.ahead(3, "full"))


@pytest.mark.parametrize(
    "damage",
    [
        {"last": {"rates": [RATE]}},
        {"last": {"rates": [RATE, RATE], "turns": 1}},
        {"last": {"rates": ["fast"], "turns": 1}},
        {"last": {"rates": [float("nan")], "turns": 1}},
        {"last": {"rates": [RATE], "turns": 0}},
        {"last": {"rates": [RATE], "turns": "many"}},
        {"last": 7},
        {"newest": torch.zeros(SIZE - 1)},
        {"newest": torch.zeros(SIZE, dtype=torch.float64)},
    ],
    ids=str,
)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(damage: Mapping[str, Any]) -> None:
    ours, _, _ = both("SGD", {"momentum": 0.9})
    ours.step([random(1)], [1.0], [RATE], "full", 4)
    tensors, meta = copied(ours)
    (tensors if "newest" in damage else meta).update(damage)
    again, _, _ = both("SGD", {"momentum": 0.9})
    again.step([random(9)], [1.0], [RATE], "full", 2)
    before, ahead = again.weights.clone(), again.ahead(3, "full")
    with pytest.raises(ValueError, match=r"^the checkpoint is damaged: it does not (hold|say)"):
        again.load(tensors, meta)
    assert torch.equal(again.weights, before)
    assert torch.equal(again.ahead(3, "full"), ahead)
