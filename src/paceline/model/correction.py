"""Staleness that is known in advance, taken into account where momentum makes it bite.

An update that is s versions stale was computed from weights that s steps have left behind. A policy whose order is
fixed knows s beforehand (`Grant.expected_staleness`), so things can be done that no other scheme can do:

 - *predict*: hand out the weights as they will be when the gradient comes back, as far as the optimizer's momentum
   already says. With momentum v and decay β that is w − η·v·Σ βʲ, j from 1 to s.
 - *round*: besides, let momentum decay once a round and not once an update. Where M = s+1 updates make a round, each
   decays it by β^(1/M), and the rate is scaled so that a gradient moves the weights as far in the end as it would
   have.
 - *full*: besides, predict that the gradients to come are like the newest one, and not that there are none.

How much each is worth shows on a parabola of curvature λ (`benchmarks/staleness.py`): with β = 0.9 BSP is stable up to
η·λ = 3.6, and R²SP up to 0.11 to 0.15 without a correction, 0.3 by *predict*, 0.5 to 0.6 by *round*, 1.6 to 1.8 by
*full*, whatever the number of groups. docs/decisions/0012 has the measurements on networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import torch

from paceline.model.spec import Setting

Correction: TypeAlias = Literal["none", "predict", "round", "full"]
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)

#: Whose momentum we know how to follow.
PREDICTED = ("SGD", "Adam", "AdamW")


def slowed(name: str, settings: Mapping[str, Setting], rate: float, turns: int) -> dict[str, Any]:
    """A group's settings for a step that is one of `turns` in a round, its learning rate among them.

    SGD: momentum β^(1/turns), and the rate times (1−β^(1/turns))/(1−β): the sum of a gradient's effects stays what it
    was. Adam's step does not depend on the gradient's scale, so its rate stays.
    """
    changed: dict[str, Any] = {"lr": rate}
    if turns <= 1:
        return changed
    if name == "SGD":
        beta = _number(settings.get("momentum"))
        if 0 < beta < 1:
            slow = beta ** (1 / turns)
            changed["momentum"] = slow
            # With dampening 1 torch's momentum is a mean of gradients already.
            if not settings.get("dampening"):
                changed["lr"] = rate * (1 - slow) / (1 - beta)
    elif name in PREDICTED:
        betas = settings.get("betas")
        if isinstance(betas, tuple):
            changed["betas"] = tuple(_number(beta) ** (1 / turns) for beta in betas)
    return changed


def drift(
    name: str, group: Mapping[str, Any], state: Mapping[str, Any], gradient: torch.Tensor | None, steps: int
) -> torch.Tensor | None:
    """How far `steps` more steps like the last one would move a parameter, by what the optimizer remembers.

    gradient: what each of those steps is taken to be given; None: nothing.
    Returns None where that is nowhere, or not known.
    """
    if steps <= 0:
        return None
    rate = float(group["lr"])
    if name == "SGD":
        momentum, beta = state.get("momentum_buffer"), float(group["momentum"])
        if momentum is None or not beta:
            return None
        # v decays to βʲ·v in j steps, and gains g·(1−βʲ)/(1−β) by gradients g.
        decayed = _geometric(beta, steps)
        of_momentum, of_gradient = decayed, (1 - float(group["dampening"])) * (steps - decayed) / (1 - beta)
        if group["nesterov"]:  # a step is g + β·v then
            of_momentum, of_gradient = beta * of_momentum, beta * of_gradient + steps
        moved = torch.mul(momentum, -rate * of_momentum)
        return moved if gradient is None else moved.add_(gradient, alpha=-rate * of_gradient)
    if name in PREDICTED and "exp_avg" in state:
        beta1, beta2 = group["betas"]
        taken = float(state["step"])
        decayed = _geometric(beta1, steps)
        moved = torch.mul(state["exp_avg"], decayed)
        if gradient is not None:
            moved.add_(gradient, alpha=steps - decayed)
        # Adam divides by what its means still lack; over a few steps that hardly changes.
        root = torch.div(state["exp_avg_sq"], 1 - beta2**taken).sqrt_().add_(group["eps"])
        return moved.div_(root).mul_(-rate / (1 - beta1 ** (taken + 1)))
    return None


def _geometric(beta: float, steps: int) -> float:
    """Σ βʲ, j from 1 to `steps`."""
    return beta * (1 - beta**steps) / (1 - beta) if beta < 1 else float(steps)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
