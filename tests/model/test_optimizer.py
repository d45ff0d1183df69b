"""Conversion of a live optimizer to its specification, and of a specification to an optimizer."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from paceline.model.optimizer import make, names, spec_of
from paceline.model.optimizer_spec import OptimizerSpec, is_elementwise


def parameter(*shape: int) -> Any:
    return torch.nn.Parameter(torch.zeros(shape or (2, 2)))


def live(name: str, **settings: Any) -> Any:
    """An optimizer with two groups, the second at another learning rate."""
    groups = [{"params": [parameter()]}, {"params": [parameter()], "lr": 0.5}]
    return getattr(torch.optim, name)(groups, lr=0.25, **settings)


@pytest.mark.parametrize("name", names())
def test_a_specification_survives_json_and_makes_the_same_optimizer(name: str) -> None:
    optimizer = live(name)
    spec = OptimizerSpec.from_json(json.loads(json.dumps(spec_of(optimizer).as_json())))
    assert spec == spec_of(optimizer)
    assert [settings["lr"] for settings in spec.settings_of_groups] == [0.25, 0.5]
    again = make(spec, [[torch.zeros(2, 2)], [torch.zeros(2, 2)]])
    assert type(again) is type(optimizer)
    assert spec_of(again) == spec


def test_names_lists_the_optimizers_that_a_server_can_run() -> None:
    assert {"SGD", "Adam", "AdamW", "Adagrad"} <= set(names())
    assert not {"LBFGS", "SparseAdam", "Optimizer"} & set(names())
    assert is_elementwise("Adam") and not is_elementwise("Adafactor") and not is_elementwise("Muon")


@pytest.mark.parametrize(
    ("name", "settings"), [("SGD", {"momentum": 0.5}), ("Adam", {}), ("AdamW", {}), ("Adagrad", {})]
)
def test_the_server_chooses_the_fused_implementation_whatever_the_worker_chose(
    name: str, settings: dict[str, Any]
) -> None:
    spec = spec_of(live(name, foreach=True, **settings))
    assert not {"foreach", "fused", "capturable", "differentiable"} & spec.settings_of_groups[0].keys()
    groups = make(spec, [[torch.zeros(2)], []]).param_groups
    assert [group["fused"] for group in groups] == [True, True]


def test_only_plain_sgd_is_not_fused() -> None:
    """The plain loop is as fast, and faster in the small steps of streamed pieces."""
    groups = make(spec_of(live("SGD", fused=True)), [[torch.zeros(2)], []]).param_groups
    assert [(group["fused"], group["foreach"]) for group in groups] == [(False, False)] * 2


def test_tensors_and_numpy_numbers_become_plain_numbers() -> None:
    optimizer = torch.optim.Adam([parameter()], lr=torch.tensor(0.5))
    optimizer.param_groups[0]["betas"] = [0.5, torch.tensor(0.75)]
    optimizer.param_groups[0]["eps"] = np.float32(0.125)
    settings = spec_of(optimizer).settings_of_groups[0]
    assert (settings["lr"], settings["betas"], settings["eps"]) == (0.5, (0.5, 0.75), 0.125)
    assert type(settings["lr"]) is type(settings["eps"]) is float


def test_entries_of_a_scheduler_are_left_out() -> None:
    optimizer = live("SGD", momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    assert "initial_lr" in optimizer.param_groups[0]
    assert not {"initial_lr", "max_lr", "min_lr", "params"} & spec_of(optimizer).settings_of_groups[0].keys()


def test_adagrad_starts_with_the_accumulator_of_its_constructor() -> None:
    groups: Any = [{"params": [parameter()], "initial_accumulator_value": 9.0}, {"params": [parameter()]}]
    spec = spec_of(torch.optim.Adagrad(groups, initial_accumulator_value=0.5))
    tensors = [torch.zeros(2), torch.zeros(2)]
    again = make(spec, [[tensors[0]], [tensors[1]]])
    assert [again.state[tensor]["sum"].tolist() for tensor in tensors] == [[0.5, 0.5]] * 2


def test_a_setting_that_is_not_a_plain_value_is_named() -> None:
    optimizer = live("SGD")
    optimizer.param_groups[1]["momentum"] = object()
    with pytest.raises(ValueError, match="SGD's setting 'momentum' is <object"):
        spec_of(optimizer)


def test_a_custom_optimizer_is_refused() -> None:
    mine = type("Mine", (torch.optim.SGD,), {})
    with pytest.raises(ValueError, match=r"Mine is not torch.optim's own.* Adam,"):
        spec_of(mine([parameter()]))


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_an_optimizer_that_cannot_run_on_a_server_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot run on the server"):
        spec_of(getattr(torch.optim, name)([parameter()]))
    with pytest.raises(ValueError, match=f"{name} cannot run on the server"):
        OptimizerSpec(name, ({},))


@pytest.mark.parametrize("name", ["Adamm", "Optimizer", "lr_scheduler", "__loader__", "os"])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=f"torch.optim has no optimizer '{name}'; there are .*Adam, AdamW"):
        make(OptimizerSpec(name, ({"lr": 0.1},)), [[torch.zeros(1)]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("SGD", {"lr": -1.0}, "Invalid learning rate"),
        ("SGD", {"lr": "much"}, "SGD does not accept its settings"),
        ("SGD", {"speed": 3}, "no setting 'speed'; there are lr, momentum"),
        ("SGD", {"params": ()}, "no setting 'params'"),
        ("Adam", {"betas": (0.9,)}, "Adam does not accept its settings"),
        ("Adam", {"betas": (0.9, 2.0)}, "Invalid beta"),
        ("ASGD", {"lambd": "x"}, "ASGD does not accept its settings"),
        ("Adam", {"lr": 10**400}, "Adam does not accept its settings"),
    ],
)
@pytest.mark.parametrize("group", [0, 1])
def test_bad_settings_are_refused_in_any_group(name: str, settings: Any, sentence: str, group: int) -> None:
    of_groups = ({"lr": 0.1}, settings) if group else (settings, {"lr": 0.1})
    with pytest.raises(ValueError, match=sentence):
        make(OptimizerSpec(name, of_groups), [[torch.zeros(1)], [torch.zeros(1)]])


def test_the_number_of_groups_must_match() -> None:
    with pytest.raises(ValueError, match="settings for 1 groups of tensors, not 2"):
        make(OptimizerSpec("SGD", ({"lr": 0.1},)), [[torch.zeros(1)], []])


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "must be an object"),
        ({"name": "SGD"}, "must be an object"),
        ({"name": "SGD", "groups": [1]}, "must be an object"),
        ({"name": "SGD", "groups": [{}], "code": "x"}, "must be an object"),
        ({"name": "SGD", "groups": []}, "at least one parameter group"),
        ({"name": "os.system", "groups": [{}]}, "must be that of a class in torch.optim"),
        ({"name": "SGD", "groups": [{"lr": {"x": 1}}]}, "setting 'lr' must be"),
        ({"name": "SGD", "groups": [{"lr": [[1]]}]}, "setting 'lr' must be"),
        ({"name": "SGD", "groups": [{"lr": ["1"]}]}, "setting 'lr' must be"),
        ({"name": "SGD", "groups": [{"lr": float("nan")}]}, "setting 'lr' must be"),
    ],
)
def test_a_bad_specification_is_refused(value: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        OptimizerSpec.from_json(value)
    assert "\n" not in str(caught.value)


STEPS = """
import sys, torch
from paceline.model.optimizer import without_compiler
from paceline.model.slice import Slice
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec

without_compiler()
for name, settings in (("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {}), ("RMSprop", {})):
    slice = Slice(Layout((Tensor("w", (4,)),)), 0, 4, OptimizerSpec(name, ({"lr": 0.1, **settings},)))
    slice.step([torch.ones(4)], [1.0], [0.1])
    assert slice.weights.sum() < 0
sys.exit("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_process_that_makes_steps_does_not_import_torchs_compiler() -> None:
    """The import would take longer than the whole start of a shard."""
    ran = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
