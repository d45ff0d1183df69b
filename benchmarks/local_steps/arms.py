"""The arms of the comparison, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.local_steps.rules import RULES, Rule, average
from benchmarks.local_steps.schedules import Plan, in_parts, staggered
from benchmarks.local_steps.size import WORKERS, Size


@dataclass(frozen=True)
class Arm:
    """A schedule, the server's rule, and the workers' rules."""

    name: str
    size: Size
    plan: Plan
    rule: Rule
    blend: float = 0.0  # the share of a worker's last end point in the model from which its difference is measured
    predict: float = 0.0  # a worker begins ahead by this share of the model's last movement
    keep: float = 0.0  # the share of a worker's end point in the model with which it begins


def arm_of(name: str, size: Size) -> Arm:
    """Return an arm by its name. Raise ValueError if there is none."""
    schedule, *words = name.split("+")
    kind, _, number = schedule.partition(":")
    rule: Rule = average
    shares: dict[str, float] = {}
    counts: dict[str, int] = {}
    for each in words:
        word, _, value = each.partition(":")
        if word in ("blend", "predict", "keep"):
            shares[word] = float(value)
        elif word == "rounds":
            if not value.isdigit() or int(value) < 1:
                raise ValueError(f"{name!r}: rounds:R needs a number of rounds, such as rounds:40")
            size = replace(size, rounds=int(value))
        elif word in ("first", "final", "pulls"):
            counts[word] = int(value)
        elif each in RULES:
            rule = RULES[each]
        else:
            raise ValueError(
                f"{each!r} is no rule: {', '.join(RULES)}, blend, predict, keep, pulls, rounds, first or final"
            )
    if kind in ("streaming", "parts", "turns") and number.isdigit():
        if counts or shares:
            raise ValueError(f"{name!r}: {kind} has no such rule as {', '.join([*counts, *shares])}")
        if rule is RULES["delayed"]:
            raise ValueError(f"{name!r}: delayed momentum counts differences of the whole model")
        return Arm(name, size, in_parts(size, int(number), kind == "parts", kind == "turns"), rule)
    groups = {"sync": "1", "turns": str(WORKERS), "groups": number}.get(kind, "")
    if not groups.isdigit():
        raise ValueError(f"{schedule!r} is no schedule: sync, groups:M, turns, turns:P, streaming:P or parts:P")
    return Arm(name, size, staggered(size, int(groups), **counts), rule, **shares)
