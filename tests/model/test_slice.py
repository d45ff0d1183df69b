"""Slices: several of them side by side are equal to one optimizer over the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer import make, names, spec_of
from paceline.model.optimizer_spec import OptimizerSpec, is_elementwise
from paceline.model.slice import MAX_ELEMENT, MAX_RATE, Slice

# The groups alternate, so that parts are cut there too. All tensors are matrices, because Muon accepts nothing else.
LAYOUT = Layout(
    tuple(
        Tensor(name, shape, group=group)
        for name, shape, group in (
            ("a", (7, 5), 0),
            ("b", (1, 5), 0),
            ("c", (6, 9), 1),
            ("d", (3, 4), 0),
            ("e", (8, 8), 1),
        )
    )
)
#: Two groups with settings that differ as much as possible.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SGD": ({"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.5, "nesterov": True}),
    "Adam": ({"betas": (0.8, 0.9), "amsgrad": True}, {"weight_decay": 0.1, "eps": 1e-3}),
    "AdamW": ({"weight_decay": 0.3}, {"betas": (0.5, 0.7)}),
    "Adamax": ({"betas": (0.8, 0.9)}, {"weight_decay": 0.1}),
    "NAdam": ({"momentum_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": ({"betas": (0.8, 0.9)}, {"weight_decay": 0.1}),
    "Adagrad": ({"lr_decay": 0.1}, {"weight_decay": 0.1}),
    "Adadelta": ({"rho": 0.5}, {"weight_decay": 0.1}),
    "RMSprop": ({"centered": True}, {"momentum": 0.5, "alpha": 0.8}),
    "Rprop": ({"etas": (0.4, 1.3)}, {"step_sizes": (1e-4, 5.0)}),
    "ASGD": ({"lambd": 0.1, "t0": 1.0}, {"alpha": 0.5, "weight_decay": 0.1}),
    "Adafactor": ({"d": 1.5}, {"weight_decay": 0.1}),
    "Muon": ({"momentum": 0.5}, {"nesterov": False, "weight_decay": 0.2}),
}
ALL = [name for name in names() if name in SETTINGS]
RATES = (0.05, 0.02)


def spec_for(name: str) -> OptimizerSpec:
    """The specification of a live optimizer, as a worker would send it."""
    groups = [
        {"params": [torch.zeros(2, 2)], "lr": rate, **own} for rate, own in zip(RATES, SETTINGS[name], strict=True)
    ]
    return spec_of(getattr(torch.optim, name)(groups, lr=0.01))


def random(size: int, seed: int) -> Any:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def slices_of(layout: Layout, spec: OptimizerSpec, shards: int, weights: Any) -> list[Slice]:
    made = []
    for piece in layout.cut(shards, anywhere=is_elementwise(spec.name)):
        made.append(Slice(layout, piece.start, piece.stop, spec))
        made[-1].weights.copy_(weights[piece.start : piece.stop])
    return made


def step_all(
    slices: Sequence[Slice], gradients: Sequence[Any], weights: Sequence[float], rates: Sequence[float]
) -> None:
    for each in slices:
        each.step([gradient[each.start : each.stop] for gradient in gradients], weights, rates)


def joined(slices: Sequence[Slice]) -> Any:
    return torch.cat([each.weights for each in slices])


def plain(layout: Layout, spec: OptimizerSpec, weights: Any) -> tuple[list[Any], Any]:
    """An ordinary optimizer, with one parameter for each tensor and torch's default implementation."""
    parameters = [
        torch.nn.Parameter(weights[a:b].clone().view(tensor.shape))
        for tensor, (a, b) in zip(layout.tensors, pairwise(layout.offsets), strict=True)
    ]
    groups: list[dict[str, Any]] = [{"params": [], **settings} for settings in spec.settings_of_groups]
    for tensor, parameter in zip(layout.tensors, parameters, strict=True):
        groups[tensor.group]["params"].append(parameter)
    return parameters, getattr(torch.optim, spec.name)(groups)


def flat(tensors: Sequence[Any]) -> Any:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def test_every_elementwise_optimizer_of_torch_is_tested() -> None:
    assert set(filter(is_elementwise, names())) <= set(SETTINGS)


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("name", ALL)
def test_slices_side_by_side_equal_one_optimizer_over_the_whole_model(name: str, shards: int) -> None:
    spec, start = spec_for(name), random(LAYOUT.size, seed=0)
    slices = slices_of(LAYOUT, spec, shards, start)
    parameters, optimizer = plain(LAYOUT, spec, start)
    whole = slices_of(LAYOUT, spec, 1, start)
    for step in range(1, 9):
        gradient = random(LAYOUT.size, seed=step)
        for parameter, (a, b) in zip(parameters, pairwise(LAYOUT.offsets), strict=True):
            parameter.grad = gradient[a:b].view(parameter.shape)
        optimizer.step()
        step_all(slices, [gradient], [1.0], RATES)
        step_all(whole, [gradient], [1.0], RATES)
        torch.testing.assert_close(joined(slices), flat(parameters), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(joined(slices), start)
    if not is_elementwise(name):  # the same operations on the same tensors, wherever they are cut
        assert torch.equal(joined(slices), joined(whole))
        assert torch.equal(joined(slices), flat(parameters))


@pytest.mark.parametrize("name", ALL)
def test_one_slice_equals_the_optimizer_over_the_same_parts_bit_for_bit(name: str) -> None:
    """Combining, views and learning rates add no rounding of their own."""
    spec, start = spec_for(name), random(LAYOUT.size, seed=0)
    (ours,) = slices_of(LAYOUT, spec, 1, start)
    runs = [(0, 40, 0), (40, 94, 1), (94, 106, 0), (106, 170, 1)]  # a and b are neighbours of one group
    if not is_elementwise(name):
        runs = [(a, b, each.group) for each, (a, b) in zip(LAYOUT.tensors, pairwise(LAYOUT.offsets), strict=True)]
    shapes = [(b - a,) for a, b, _ in runs] if is_elementwise(name) else [tensor.shape for tensor in LAYOUT.tensors]
    parts = [start[a:b].clone().view(shape) for (a, b, _), shape in zip(runs, shapes, strict=True)]
    groups = [[part for part, run in zip(parts, runs, strict=True) if run[2] == group] for group in (0, 1)]
    theirs = make(spec, groups)
    for step in range(1, 6):
        gradient = random(LAYOUT.size, seed=step)
        for part, (a, b, _) in zip(parts, runs, strict=True):
            part.grad = gradient[a:b].view(part.shape)
        theirs.step()
        ours.step([gradient], [1.0], RATES)
    assert torch.equal(ours.weights, flat(parts))


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_an_optimizer_that_needs_whole_tensors_is_not_cut_within_one(name: str) -> None:
    if name not in ALL:
        pytest.skip(f"this torch has no {name}")
    with pytest.raises(ValueError, match="must begin and end where tensors do"):
        Slice(LAYOUT, 0, 36, spec_for(name))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bsp_mean_over_unequal_batches_is_one_step_on_the_joint_batch(name: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    optimizer = OPTIMIZERS[name](model.parameters())
    layout = Layout(tuple(Tensor(key, tuple(value.shape)) for key, value in model.named_parameters()))
    spec = spec_of(optimizer)
    slices = slices_of(layout, spec, 2, flat(list(model.parameters())))
    worker = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    batches = (1, 5, 10)

    def gradient(net: Any, x: Any, y: Any) -> Any:
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        return flat([parameter.grad for parameter in net.parameters()])

    for _ in range(10):
        x, y = torch.randn(sum(batches), 6), torch.randint(3, (sum(batches),))
        gradient(model, x, y)
        optimizer.step()
        torch.nn.utils.vector_to_parameters(joined(slices), worker.parameters())
        pushed = [gradient(worker, *part) for part in zip(x.split(batches), y.split(batches), strict=True)]
        step_all(slices, pushed, [batch / sum(batches) for batch in batches], [optimizer.param_groups[0]["lr"]])
        torch.testing.assert_close(joined(slices), flat(list(model.parameters())), rtol=1e-4, atol=1e-5)


def test_each_step_uses_the_learning_rate_of_each_group() -> None:
    spec = OptimizerSpec("SGD", ({"lr": 9.0}, {"lr": 9.0}))
    (one,) = slices_of(LAYOUT, spec, 1, torch.zeros(LAYOUT.size))
    ones = torch.ones(LAYOUT.size)
    one.step([ones], [1.0], (0.5, 0.25))
    one.step([ones], [1.0], (1.0, 0.0))
    expected = {0: -1.5, 1: -0.25}
    for tensor, (a, b) in zip(LAYOUT.tensors, pairwise(LAYOUT.offsets), strict=True):
        assert set(one.weights[a:b].tolist()) == {expected[tensor.group]}


def test_gradients_are_weighted_and_not_changed() -> None:
    spec = OptimizerSpec("SGD", ({"lr": 1.0, "momentum": 0.5}, {"lr": 1.0}))
    (one,) = slices_of(LAYOUT, spec, 1, torch.zeros(LAYOUT.size))
    gradients = [random(LAYOUT.size, seed) for seed in (1, 2)]
    copies = [gradient.clone() for gradient in gradients]
    one.step(gradients, [0.25, 2.0], (1.0, 1.0))
    assert all(map(torch.equal, gradients, copies))
    torch.testing.assert_close(one.weights, -(0.25 * copies[0] + 2 * copies[1]))


def test_one_gradient_of_weight_one_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = slices_of(LAYOUT, spec_for("SGD"), 1, torch.zeros(LAYOUT.size))
    gradient, seen = random(LAYOUT.size, seed=1), list[Any]()
    theirs = one._make_step

    def step(optimizer: Any) -> None:
        seen.extend(part.grad for part in one._parameters)
        theirs(optimizer)

    monkeypatch.setattr(one, "_make_step", step)
    one.step([gradient], [1.0], RATES)
    assert {each.untyped_storage().data_ptr() for each in seen} == {gradient.untyped_storage().data_ptr()}
    assert one._sum is None


@pytest.mark.parametrize("name", ALL)
def test_a_gradients_buffer_may_be_used_again_after_the_step(name: str) -> None:
    """The next push reuses the buffer, so the optimizer must not keep it, for example as its first momentum."""
    spec, start = spec_for(name), random(LAYOUT.size, seed=0)
    (kept,), (reused,) = slices_of(LAYOUT, spec, 1, start), slices_of(LAYOUT, spec, 1, start)
    buffer = torch.empty(LAYOUT.size)
    for step in range(1, 4):
        kept.step([random(LAYOUT.size, step)], [1.0], RATES)
        buffer.copy_(random(LAYOUT.size, step))
        reused.step([buffer], [1.0], RATES)
        buffer.fill_(float("nan"))
    assert torch.equal(kept.weights, reused.weights)


def test_the_buffer_is_the_weights() -> None:
    one = Slice(LAYOUT, 10, 50, spec_for("Adam"))
    assert len(one.buffer) == 160
    one.buffer[:4] = torch.tensor([2.5]).numpy().tobytes()
    assert one.weights[0] == 2.5
    one.step([torch.ones(40)], [1.0], RATES)
    assert one.buffer.cast("f")[0] == one.weights[0] < 2.5


def test_mix_moves_the_weights_towards_the_models() -> None:
    (one,) = slices_of(LAYOUT, spec_for("SGD"), 1, random(LAYOUT.size, 0))
    old, a, b = one.weights.clone(), random(LAYOUT.size, 1), random(LAYOUT.size, 2)
    one.mix([a, b], [0.25, 0.75], mix=0.5)
    torch.testing.assert_close(one.weights, 0.5 * old + 0.5 * (0.25 * a + 0.75 * b))
    one.mix([a], [1.0], mix=1.0)
    assert torch.equal(one.weights, a)
    one.mix([b], [1.0], mix=0.0)
    assert torch.equal(one.weights, a)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_found_and_located(bad: float) -> None:
    one = Slice(LAYOUT, 10, 100, spec_for("SGD"))
    gradient = random(90, seed=1)
    assert one.check(gradient) is None
    gradient[40] = bad  # element 50 of the model
    assert str(one.check(gradient)).startswith("there is NaN or infinity in the values for 'c'; ")


def test_large_numbers_are_not_mistaken_for_infinity() -> None:
    one = Slice(LAYOUT, 10, 100, spec_for("SGD"))
    assert one.check(torch.full((90,), MAX_ELEMENT)) is None, "their squares add up to more than the limit"


@pytest.mark.parametrize("huge", [3e38, -3e38, 1.1 * MAX_ELEMENT])
def test_finite_numbers_that_would_overflow_in_a_step_are_found_and_located(huge: float) -> None:
    one = Slice(LAYOUT, 10, 100, spec_for("SGD"))
    gradient = random(90, seed=1)
    gradient[40] = huge
    assert str(one.check(gradient)).startswith("there are numbers above 1e+18 in the values for 'c'; ")


@pytest.mark.parametrize("name", [name for name in names() if name != "Muon"])
@pytest.mark.parametrize("rate", [0.0, 1e-30, 1.0, MAX_RATE])
@pytest.mark.parametrize("element", [0.0, 1e-38, MAX_ELEMENT, -MAX_ELEMENT])
def test_the_largest_accepted_numbers_keep_the_weights_finite(name: str, rate: float, element: float) -> None:
    layout = Layout((Tensor("matrix", (4, 3)), Tensor("vector", (5,))))
    one = Slice(layout, 0, layout.size, OptimizerSpec(name, ({"lr": 0.1},)))
    one.weights.copy_(random(layout.size, 0))
    gradient = torch.full((layout.size,), element)
    assert one.check(gradient) is None
    for _ in range(3):
        one.step([gradient], [1.0], [rate])
        one.step([random(layout.size, 1)], [1.0], [rate])
    assert one.weights.isfinite().all()


def test_arguments_that_do_not_fit_are_refused_and_change_nothing() -> None:
    (one,) = slices_of(LAYOUT, spec_for("Adam"), 1, random(LAYOUT.size, 0))
    before, good, nan = one.weights.clone(), torch.ones(LAYOUT.size), float("nan")
    for gradients, weights, rates, sentence in (
        ([], [], RATES, "0 updates and 0 weights"),
        ([good], [1.0, 1.0], RATES, "1 updates and 2 weights"),
        ([good[1:]], [1.0], RATES, "flat float32 tensor of 170 elements"),
        ([good.view(10, 17)], [1.0], RATES, "flat float32 tensor of 170 elements"),
        ([good, good.double()], [1.0, 1.0], RATES, "flat float32 tensor of 170 elements"),
        ([good], [nan], RATES, "the weight of an update"),
        ([good], [1.0], RATES[:1], "2 parameter groups and 1 rates"),
        ([good], [1.0], (0.1, nan), "a learning rate must be"),
        ([good], [1.0], (0.1, -1.0), "a learning rate must be"),
    ):
        with pytest.raises(ValueError, match=sentence):
            one.step(gradients, weights, rates)
    with pytest.raises(ValueError, match="flat float32"):
        one.mix([good[1:]], [1.0], 0.5)
    with pytest.raises(ValueError, match="share of the new models"):
        one.mix([good], [1.0], nan)
    assert torch.equal(one.weights, before) and len(one.state()[0]) == 1


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 5), (5, 4), (0, 171)])
def test_a_slice_must_be_part_of_the_model(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="is not part of a model of 170 elements"):
        Slice(LAYOUT, start, stop, spec_for("SGD"))


def test_every_group_needs_its_settings() -> None:
    with pytest.raises(ValueError, match="2 parameter groups; SGD has settings for 1"):
        Slice(LAYOUT, 0, 9, OptimizerSpec("SGD", ({"lr": 0.1},)))


def saved_and_read(one: Slice, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of a slice after it was written to a file and read again, if safetensors is installed."""
    tensors, meta = one.state()
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        return {key: value.clone() for key, value in tensors.items()}, json.loads(json.dumps(meta))
    save_file(tensors, folder / "state.safetensors")
    return load_file(folder / "state.safetensors"), json.loads(json.dumps(meta))


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("name", ALL)
def test_a_run_continues_from_its_state_bit_for_bit(name: str, after: int, tmp_path: Path) -> None:
    spec, start = spec_for(name), random(LAYOUT.size, seed=0)
    one = slices_of(LAYOUT, spec, 2, start)[1]
    again = Slice(LAYOUT, one.start, one.stop, spec)
    place = again.weights.data_ptr()
    again.step([random(len(one.weights), 99)], [1.0], RATES)  # this earlier state must be replaced completely
    for step in range(after):
        one.step([random(len(one.weights), step)], [1.0], RATES)
    again.load(*saved_and_read(one, tmp_path))
    assert torch.equal(again.weights, one.weights) and again.weights.data_ptr() == place
    for step in range(after, after + 3):
        for each in (one, again):
            each.step([random(len(one.weights), step)], [0.5], RATES)
        assert torch.equal(again.weights, one.weights)


def test_a_state_from_elsewhere_is_refused_and_changes_nothing() -> None:
    one, other = (Slice(LAYOUT, 0, 100, spec_for("Adam")) for _ in range(2))
    for each in (one, other):
        each.step([torch.ones(100)], [1.0], RATES)
    tensors, meta = other.state()
    cut = torch.zeros(3)
    for bad_tensors, bad_meta, sentence in (
        (tensors, {}, "of another model"),
        (tensors, {**meta, "layout": "x"}, "of another model"),
        (tensors, {**meta, "stop": 50}, "elements 0 to 50 .* 0 to 100: cut it again first"),
        (tensors, {**meta, "optimizer": "SGD"}, "of SGD, and this run uses Adam"),
        (tensors, {**meta, "others": None}, "damaged"),
        ({}, meta, "damaged"),
        ({**tensors, "weights": cut}, meta, "damaged"),
        ({**tensors, "9.step": cut}, meta, "'9.step' belongs to no parameter"),
        ({**tensors, "evil": cut}, meta, "'evil' belongs to no parameter"),
        ({**tensors, "0.evil": cut}, meta, "has 'evil', which these settings do not use"),
        ({key: value for key, value in tensors.items() if key != "0.exp_avg"}, meta, "lacks 'exp_avg'"),
        ({**tensors, "0.exp_avg": cut}, meta, "'exp_avg' of Adam has a wrong shape"),
        ({**tensors, "0.exp_avg": tensors["0.exp_avg"][:1]}, meta, "'exp_avg' of Adam has a wrong shape"),
        ({**tensors, "0.step": cut}, meta, "'step' of Adam has a wrong shape"),
        ({**tensors, "0.exp_avg": tensors["0.exp_avg"].double()}, meta, "'exp_avg' of Adam has a wrong shape"),
    ):
        before = {key: value.clone() for key, value in one.state()[0].items()}
        with pytest.raises(ValueError, match=sentence):
            one.load(bad_tensors, bad_meta)
        assert all(torch.equal(value, before[key]) for key, value in one.state()[0].items())


def test_settings_that_need_another_state_are_refused() -> None:
    layout = Layout((Tensor("a", (5,)),))
    old, new = (Slice(layout, 0, 5, OptimizerSpec("Adam", ({"amsgrad": flag},))) for flag in (False, True))
    old.step([torch.ones(5)], [1.0], [0.1])
    with pytest.raises(ValueError, match="lacks 'max_exp_avg_sq', which these settings need"):
        new.load(*old.state())
