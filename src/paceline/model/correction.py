"""Correction of staleness that is known in advance. It matters where the optimizer has momentum.

An update with staleness s was computed from weights that are s steps old. A policy with a fixed order knows s in
advance (`Grant.expected_staleness`). So it can be corrected for, which no other scheme can do:

 - *predict*: hand out the weights as they will be when the gradient comes back, as far as the optimizer's momentum
   determines them. With momentum v and decay β they are w − η·v·Σ βʲ, j from 1 to s.
 - *round*: in addition, let momentum decay once per round instead of once per update. With M = s+1 updates per round,
   each update decays it by β^(1/M). The learning rate is scaled so that a gradient finally moves the weights as far as
   it would without the correction.
 - *full*: in addition, predict that the coming gradients are like the newest one, instead of zero.

Running statistics are not parameters and are never predicted. Which correction a job uses is decided without torch,
because the coordinator does not import it.

The effect shows on a parabola of curvature λ (`benchmarks/staleness.py`): with β = 0.9, BSP is stable up to
η·λ = 3.8. With 2 to 16 groups that take turns, that limit is 0.20 to 0.13 without a correction, 0.50 to 0.03 with
*predict*, 0.74 to 0.48 with *round* and 1.9 to 1.8 with *full*. docs/decisions/0012 has measurements on networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from paceline.model.optimizer_spec import OptimizerSpec, Setting

if TYPE_CHECKING:
    import torch

Correction: TypeAlias = Literal["none", "predict", "round", "full"]
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)

#: The values of the option. auto: the best correction that the job's optimizer allows.
CorrectionOption: TypeAlias = Literal["auto", "none", "predict", "round", "full"]
ASKED: tuple[CorrectionOption, ...] = get_args(CorrectionOption)

#: Optimizers whose momentum can be predicted.
PREDICTED = ("SGD", "Adam", "AdamW")


def checked(text: str) -> CorrectionOption:
    """Return the value of the option. Raise ValueError with the list of all values if there is no such value."""
    for asked in ASKED:
        if text == asked:
            return asked
    raise ValueError(f"correct must be {', '.join(ASKED[:-1])} or {ASKED[-1]}, not {text!r:.80}")


def chosen(asked: CorrectionOption, spec: OptimizerSpec) -> Correction:
    """Return the correction to use with this optimizer.

    auto: full for an optimizer whose momentum can be predicted, otherwise none. Plain SGD has no momentum, so every
    correction is none there, which costs nothing. Raise ValueError if a correction is asked for by name and the
    momentum of the optimizer cannot be predicted.
    """
    if asked == "none" or (asked == "auto" and spec.name not in PREDICTED):
        return "none"
    if spec.name not in PREDICTED:
        known = f"{', '.join(PREDICTED[:-1])} and {PREDICTED[-1]}"
        raise ValueError(f"staleness is corrected by the momentum of {known}, and that of {spec.name} is not known")
    if spec.name == "SGD" and not any(_has_momentum(settings.get("momentum")) for settings in spec.settings_of_groups):
        return "none"
    return "full" if asked == "auto" else asked


def momentum_of(spec: OptimizerSpec) -> float:
    """Return the momentum of an optimizer: the largest one of its groups, or 0 if it is not known."""
    if spec.name not in PREDICTED:
        return 0.0
    given = (
        settings.get("momentum") if spec.name == "SGD" else settings.get("betas", (0.9,))
        for settings in spec.settings_of_groups
    )
    each = [_number(beta[0] if isinstance(beta, list | tuple) else beta) for beta in given]
    return max((beta for beta in each if _has_momentum(beta)), default=0.0)


def slowed(name: str, settings: Mapping[str, Setting], rate: float, turns: int) -> dict[str, Any]:
    """Return the settings of a parameter group, with its learning rate, for one of `turns` steps in a round.

    SGD: momentum β^(1/turns), and the rate times (1−β^(1/turns))/(1−β). The sum of a gradient's effects stays the
    same, with dampening too. Adam's step does not depend on the gradient's scale, so its rate stays.

    The result always contains every setting that an earlier step may have changed, even with one step per round.
    """
    changed: dict[str, Any] = {"lr": rate}
    if name == "SGD":
        if _has_momentum(given := settings.get("momentum")):
            beta = _number(given)
            changed["momentum"] = slow = beta ** (1 / turns)
            if turns > 1:  # otherwise the rate must stay exactly as it is
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
    """Predict how far `steps` more steps like the last one would move a parameter, and write that to `out`.

    gradient: the gradient to assume for each of those steps; None means zero. Weight decay is assumed to pull as much
    as it does now. out: a tensor of the parameter's shape. Return False, and leave `out` unchanged, if the parameter
    would not move or its movement is not known. The cost does not depend on the number of steps.
    """
    import torch  # here, because the coordinator chooses a correction without torch

    if steps <= 0:
        return False
    rate, sign = float(group["lr"]), -1.0 if group.get("maximize") else 1.0
    decay = float(group.get("weight_decay") or 0.0)
    if name == "SGD":
        momentum, beta = state.get("momentum_buffer"), float(group["momentum"])
        if momentum is None or not _has_momentum(beta):
            return False
        # In j steps with gradient g, v decays to βʲ·v and gains g·(1−βʲ)/(1−β).
        decayed = _geometric(beta, steps)
        of_momentum, of_gradient = decayed, (1 - float(group["dampening"])) * (steps - decayed) / (1 - beta)
        if group["nesterov"]:  # then a step is g + β·v
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
        # Adam's bias correction hardly changes over a few steps, so it is taken as constant.
        squares = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        root = torch.div(squares, 1 - beta2**taken).sqrt_().add_(group["eps"])
        out.div_(root).mul_(-rate / (1 - beta1 ** (taken + 1)))
        if decay and name == "AdamW":  # its decay is not part of the gradient
            out.add_(parameter, alpha=(1 - rate * decay) ** steps - 1)
        return True
    return False


def _geometric(beta: float, steps: int) -> float:
    """Return Σ βʲ, j from 1 to `steps`."""
    return beta * (1 - beta**steps) / (1 - beta)


def _has_momentum(beta: Setting) -> bool:
    """Return True for momentum that can be predicted. From β = 1 on, it does not decay."""
    return 0 < _number(beta) < 1


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
