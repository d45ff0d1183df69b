"""Staleness that is known in advance, taken into account where momentum makes it bite.

An update that is s versions stale was computed from weights that s steps have left behind. A policy whose order is
fixed knows s beforehand (`Grant.expected_staleness`), so things can be done that no other scheme can do:

 - *predict*: hand out the weights as they will be when the gradient comes back, as far as the optimizer's momentum
   already says. With momentum v and decay β that is w − η·v·Σ βʲ, j from 1 to s.
 - *round*: besides, let momentum decay once a round and not once an update. Where M = s+1 updates make a round, each
   decays it by β^(1/M), and the rate is scaled so that a gradient moves the weights as far in the end as it would
   have.
 - *full*: besides, predict that the gradients to come are like the newest one, and not that there are none.

Running statistics are no parameters: they are never predicted. Which correction a job has is told without torch, since
the coordinator has none.

How much each is worth shows on a parabola of curvature λ (`benchmarks/staleness.py`): with β = 0.9 BSP is stable up to
η·λ = 3.8. Where groups take turns, from 2 to 16 of them, that is 0.20 to 0.13 without a correction, 0.50 to 0.03 by
*predict*, 0.74 to 0.48 by *round* and 1.9 to 1.8 by *full*. docs/decisions/0012 has measurements on networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from paceline.model.optimizer_spec import OptimizerSpec, Setting

if TYPE_CHECKING:
    import torch

Correction: TypeAlias = Literal["none", "predict", "round", "full"]
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)

#: What can be asked for. auto: whatever the job's optimizer allows.
Asked: TypeAlias = Literal["auto", "none", "predict", "round", "full"]
ASKED: tuple[Asked, ...] = get_args(Asked)

#: Whose momentum we know how to follow.
PREDICTED = ("SGD", "Adam", "AdamW")


def checked(text: str) -> Asked:
    """What was asked for, if there is such a thing. Else: ValueError with the list of what there is."""
    for asked in ASKED:
        if text == asked:
            return asked
    raise ValueError(f"correct must be {', '.join(ASKED[:-1])} or {ASKED[-1]}, not {text!r:.80}")


def chosen(asked: Asked, spec: OptimizerSpec) -> Correction:
    """How staleness is corrected for under this optimizer, if that is what was asked for.

    auto: in full where there is momentum that we know how to follow, else not at all. Plain SGD has none, so that there
    every correction comes to none, which costs nothing. Asked for with an optimizer that is not known: ValueError.
    """
    if asked == "none" or (asked == "auto" and spec.name not in PREDICTED):
        return "none"
    if spec.name not in PREDICTED:
        known = f"{', '.join(PREDICTED[:-1])} and {PREDICTED[-1]}"
        raise ValueError(f"staleness is corrected for by the momentum of {known}, and that of {spec.name} is not known")
    if spec.name == "SGD" and not any(_has_momentum(settings.get("momentum")) for settings in spec.settings_of_groups):
        return "none"
    return "full" if asked == "auto" else asked


def momentum_of(spec: OptimizerSpec) -> float:
    """How much of its last step the optimizer carries on; of several groups the most. 0 where that is not known."""
    if spec.name not in PREDICTED:
        return 0.0
    given = (
        settings.get("momentum") if spec.name == "SGD" else settings.get("betas", (0.9,))
        for settings in spec.settings_of_groups
    )
    each = [_number(beta[0] if isinstance(beta, list | tuple) else beta) for beta in given]
    return max((beta for beta in each if _has_momentum(beta)), default=0.0)


def slowed(name: str, settings: Mapping[str, Setting], rate: float, turns: int) -> dict[str, Any]:
    """A group's settings for a step that is one of `turns` in a round, its learning rate among them.

    SGD: momentum β^(1/turns), and the rate times (1−β^(1/turns))/(1−β): the sum of a gradient's effects stays what it
    was, with dampening too. Adam's step does not depend on the gradient's scale, so its rate stays.

    What the step before may have changed is in it in any case, also where a round is one step.
    """
    changed: dict[str, Any] = {"lr": rate}
    if name == "SGD":
        if _has_momentum(given := settings.get("momentum")):
            beta = _number(given)
            changed["momentum"] = slow = beta ** (1 / turns)
            if turns > 1:  # else it is the rate as it is, to the last bit
                changed["lr"] = rate * (1 - slow) / (1 - beta)
    elif name in PREDICTED:
        betas = settings.get("betas")
        if isinstance(betas, tuple):
            changed["betas"] = tuple(_number(beta) ** (1 / turns) for beta in betas)
    return changed


def drift(
    name: str,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    parameter: torch.Tensor,
    gradient: torch.Tensor | None,
    steps: int,
    out: torch.Tensor,
) -> bool:
    """How far `steps` more steps like the last one would move a parameter, by what the optimizer remembers.

    gradient: what each of those steps is taken to be given; None: nothing. Weight decay pulls besides, as much as it
    does now. out: where that goes, a tensor of the parameter's shape. False where it is nowhere, or not known; `out` is
    as it was then. However many steps there are, it costs the same.
    """
    import torch  # only here: who is merely to tell which correction there is may have none

    if steps <= 0:
        return False
    rate, sign = float(group["lr"]), -1.0 if group.get("maximize") else 1.0  # of a gradient, where it is climbed
    decay = float(group.get("weight_decay") or 0.0)
    if name == "SGD":
        momentum, beta = state.get("momentum_buffer"), float(group["momentum"])
        if momentum is None or not _has_momentum(beta):
            return False
        # v decays to βʲ·v in j steps, and gains g·(1−βʲ)/(1−β) by gradients g.
        decayed = _geometric(beta, steps)
        of_momentum, of_gradient = decayed, (1 - float(group["dampening"])) * (steps - decayed) / (1 - beta)
        if group["nesterov"]:  # a step is g + β·v then
            of_momentum, of_gradient = beta * of_momentum, beta * of_gradient + steps
        torch.mul(momentum, -rate * of_momentum, out=out)
        if gradient is not None:
            out.add_(gradient, alpha=-rate * of_gradient * sign)
        if decay:
            out.add_(parameter, alpha=-rate * of_gradient * decay)
        return True
    if name in PREDICTED and "exp_avg" in state:
        beta1, beta2 = group["betas"]
        taken = float(state["step"])
        decayed = _geometric(beta1, steps)
        torch.mul(state["exp_avg"], decayed, out=out)
        if gradient is not None:
            out.add_(gradient, alpha=(steps - decayed) * sign)
        if decay and name == "Adam":
            out.add_(parameter, alpha=(steps - decayed) * decay)
        # Adam divides by what its means still lack; over a few steps that hardly changes.
        squares = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        root = torch.div(squares, 1 - beta2**taken).sqrt_().add_(group["eps"])
        out.div_(root).mul_(-rate / (1 - beta1 ** (taken + 1)))
        if decay and name == "AdamW":  # apart from the gradient
            out.add_(parameter, alpha=(1 - rate * decay) ** steps - 1)
        return True
    return False


def _geometric(beta: float, steps: int) -> float:
    """Σ βʲ, j from 1 to `steps`."""
    return beta * (1 - beta**steps) / (1 - beta)


def _has_momentum(beta: Setting) -> bool:
    """From 1 on nothing decays, and there is no telling where it leads."""
    return 0 < _number(beta) < 1


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
