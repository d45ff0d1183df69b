"""Optimizers by name: the same as torch's, and wrong names are answered with the right ones."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from arrays.perceptron import alone, data, student
from paceline.arrays.local_step import LocalStep
from paceline.model.optimizer import IMPLEMENTATION, names, spec_of
from paceline.model.optimizer_text import DEFAULTS, parse


def test_the_table_has_the_optimizers_of_torch() -> None:
    assert sorted(DEFAULTS) == names()


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_settings_are_those_of_torch(name: str) -> None:
    theirs = spec_of(getattr(torch.optim, name)([torch.zeros(2, 2, requires_grad=True)])).settings_of_groups[0]
    added = {"decoupled_weight_decay"} if name in ("Adam", "AdamW") else set()  # only later versions of torch have it
    assert not theirs.keys() & IMPLEMENTATION
    assert {key: value for key, value in theirs.items() if key not in added} == dict(parse(name).settings_of_groups[0])


def test_settings_are_read_from_text() -> None:
    sgd = parse("sgd:lr=1e-2, momentum=0.9,nesterov=True")
    assert sgd.name == "SGD"
    assert sgd.settings_of_groups[0] == {**DEFAULTS["SGD"], "lr": 0.01, "momentum": 0.9, "nesterov": True}
    assert parse("ADAMW:betas=0.8/0.99").settings_of_groups[0]["betas"] == (0.8, 0.99)
    assert parse("Adafactor:eps=none/0.01").settings_of_groups[0]["eps"] == (None, 0.01)
    assert parse("Muon:adjust_lr_fn=None") == parse("Muon")
    assert parse("Muon:adjust_lr_fn=original").settings_of_groups[0]["adjust_lr_fn"] == "original"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("adm", "There is no optimizer 'adm'; there are Adam, ASGD, Adadelta, Adafactor, "),
        ("sgd:momentun=0.9", "SGD has no setting 'momentun'; it has momentum, lr, dampening, "),
        ("sgd:lr", "The setting lr of SGD has no value; write it like 'sgd:lr=0.1"),
        ("sgd:lr=fast", "The setting lr of SGD must be a number, not 'fast'."),
        ("sgd:lr=nan", "The setting lr of SGD must be a number, not 'nan'."),
        ("sgd:lr=none", "The setting lr of SGD must be a number, not 'none'."),
        (
            "adam:betas=none/0.9",
            "The setting betas of Adam must be 2 numbers with a slash between them, not 'none/0.9'.",
        ),
        ("sgd:nesterov=1", "The setting nesterov of SGD must be true or false, not '1'."),
        ("adam:betas=0.9", "The setting betas of Adam must be 2 numbers with a slash between them, not '0.9'."),
        ("lbfgs", "LBFGS cannot run on the server: "),
        (torch.optim.SGD, "The server makes the optimizer's steps, so name one of torch.optim with its settings, such"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(text: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        parse(text)


STEPS = (
    *("sgd:lr=0.1", "sgd:lr=0.1,momentum=0.9,weight_decay=0.01", "sgd:lr=0.1,momentum=0.9,dampening=0.5,maximize=true"),
    *("sgd:lr=0.1,momentum=0.9,nesterov=true", "adam:lr=0.01", "adam:lr=0.01,weight_decay=0.1,amsgrad=true"),
    *("adamw:lr=0.01", "adamw:lr=0.01,betas=0.8/0.95,maximize=true"),
)


@pytest.mark.parametrize("optimizer", STEPS)
def test_training_alone_equals_torch(optimizer: str) -> None:
    x, y = data(24)
    np.testing.assert_allclose(student(optimizer, x, y, 20)(None), alone(optimizer, x, y, 20), rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


def test_an_optimizer_without_a_step_here_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has SGD, Adam, AdamW: use one of them, or RMSprop in a job"):
        LocalStep(parse("rmsprop"))
