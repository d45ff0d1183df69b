"""Optimizers by name, as text: `sgd:lr=0.1,momentum=0.9`. The server makes them from torch.optim."""

from __future__ import annotations

import difflib

from paceline.model.optimizer_spec import REFUSED, OptimizerSpec, Setting

EXAMPLE = "'sgd:lr=0.1,momentum=0.9' or 'adam:lr=0.001,betas=0.9/0.999'"

_ADAM: dict[str, Setting] = {"betas": (0.9, 0.999), "eps": 1e-8}
#: The optimizers of torch.optim that a server can make, with their settings and the values that these have by default.
#: A worker without torch must know them. A test compares them with torch's own.
DEFAULTS: dict[str, dict[str, Setting]] = {
    "ASGD": {"lr": 0.01, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0, "maximize": False},
    "Adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0, "maximize": False},
    "Adafactor": {
        "lr": 0.01,
        "beta2_decay": -0.8,
        "eps": (None, 0.001),
        "d": 1.0,
        "weight_decay": 0.0,
        "maximize": False,
    },
    "Adagrad": {
        "lr": 0.01,
        "lr_decay": 0,
        "eps": 1e-10,
        "weight_decay": 0,
        "initial_accumulator_value": 0,
        "maximize": False,
    },
    "Adam": {"lr": 0.001, **_ADAM, "weight_decay": 0, "amsgrad": False, "maximize": False},
    "AdamW": {"lr": 0.001, **_ADAM, "weight_decay": 0.01, "amsgrad": False, "maximize": False},
    "Adamax": {"lr": 0.002, **_ADAM, "weight_decay": 0, "maximize": False},
    "Muon": {
        "lr": 0.001,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.775, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
    },
    "NAdam": {
        "lr": 0.002,
        **_ADAM,
        "weight_decay": 0,
        "momentum_decay": 0.004,
        "decoupled_weight_decay": False,
        "maximize": False,
    },
    "RAdam": {"lr": 0.001, **_ADAM, "weight_decay": 0, "maximize": False, "decoupled_weight_decay": False},
    "RMSprop": {
        "lr": 0.01,
        "momentum": 0,
        "alpha": 0.99,
        "eps": 1e-8,
        "centered": False,
        "weight_decay": 0,
        "maximize": False,
    },
    "Rprop": {"lr": 0.01, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50), "maximize": False},
    "SGD": {"lr": 0.001, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False},
}
_NAMES = {name.lower(): name for name in (*DEFAULTS, *REFUSED)}


def parse(text: object) -> OptimizerSpec:
    """Return the optimizer that a text such as `sgd:lr=0.1` names. Upper and lower case are the same in its name.

    Raise ValueError with one sentence if there is no such optimizer or setting.
    """
    if not isinstance(text, str):
        raise ValueError(
            f"The server makes the optimizer's steps, so name one of torch.optim with its settings, such as {EXAMPLE}; "
            f"got a value of type {type(text).__name__}."
        )
    given, _, rest = text.partition(":")
    name = _NAMES.get(given.strip().lower())
    if name is None:
        raise ValueError(f"There is no optimizer {given.strip()!r:.80}; there are {_listed(given, sorted(DEFAULTS))}.")
    if name in REFUSED:
        raise ValueError(f"{REFUSED[name]}.")
    settings = dict(DEFAULTS[name])
    for each in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in each.partition("="))
        if key not in settings:
            raise ValueError(f"{name} has no setting {key!r:.80}; it has {_listed(key, list(settings))}.")
        if not equals:
            raise ValueError(f"The setting {key} of {name} has no value; write it like {EXAMPLE}.")
        settings[key] = _value(name, key, value, DEFAULTS[name][key])
    return OptimizerSpec(name, (settings,))


def _listed(wrong: str, known: list[str]) -> str:
    """Return the known names in one string, the one that is most like a wrong name first."""
    near = difflib.get_close_matches(wrong.strip().lower(), [name.lower() for name in known], n=1, cutoff=0.5)
    return ", ".join(sorted(known, key=lambda name: [name.lower()] != near))


def _value(name: str, key: str, text: str, default: Setting) -> Setting:
    """Return the value of a setting. It has the type of the default."""
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, tuple):
            parts = zip(text.split("/"), default, strict=True)
            return tuple(None if may is None and part.lower() == "none" else _number(part) for part, may in parts)
        if default is None:
            return None if text.lower() == "none" else text
        return _number(text)
    except (KeyError, ValueError):
        expected = (
            "true or false"
            if isinstance(default, bool)
            else f"{len(default)} numbers with a slash between them"
            if isinstance(default, tuple)
            else "a number"
        )
        raise ValueError(f"The setting {key} of {name} must be {expected}, not {text!r:.80}.") from None


def _number(text: str) -> float | int:
    number = float(text)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError
    return int(text) if text.lstrip("-").isdigit() else number
