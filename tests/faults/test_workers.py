"""A worker killed, or stopped beyond its lease, at every step of the protocol and under every policy.

After each: every sample of every epoch has changed the model exactly once, all shards hold the same, every update that
arrived was decided once (see `director.py`), and the job has ended by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from faults.scenario import Outcome, Scenario
from faults.steps import KINDS, comes_up, kind_of, struck, worker_steps

Play = Callable[[Scenario], Outcome]
HOW = ("SIGKILL", "SIGSTOP")
STEPS = worker_steps()
#: Messages that do not come up in every job: under some policies, or only when something else goes wrong as well.
SELDOM = {"CancelIteration", "PushNow", "Refused", "Expelled", "Heartbeat", "ProvideWeights", "InitialWeights"}


def named(scenario: Scenario) -> str:
    kind = f"{scenario.policy}{'-streamed' if scenario.streamed else ''}"
    return f"{kind}-{scenario.shards}-{scenario.restart.replace(' ', '-')}-{scenario.faults[0]}"


def check(outcome: Outcome, scenario: Scenario) -> None:
    if not outcome.fired[0] and scenario.faults[0].what in SELDOM:
        pytest.skip("this step did not come up")
    assert all(outcome.fired), "the job never came to the step"


def quick() -> list[Scenario]:
    """Each message once, before it, in the midst of it or after it, policy after policy; every fifth time stopped."""
    scenarios = []
    for number, steps in enumerate(
        by_message(step for step in STEPS if step[1] not in SELDOM - {"ProvideWeights", "InitialWeights"})
    ):
        step = steps[number % len(steps)]
        scenarios.append(struck(step, HOW[number % 5 == 0], *kind_of(number, step[1]), 1 + number % 2))
    for number, step in enumerate(
        step for step in STEPS if step[1] in ("Push", "GradientReady", "GradientStarted", "UpdatedPiece")
    ):
        kind = [kind for kind in KINDS if kind[1]][number % 4]  # in mid-push, of each that is streamed
        scenarios.append(struck(step, HOW[number % 2], *kind, 1 + number // 4 % 2))
    return list(dict.fromkeys(scenarios))


def by_message(steps: Iterable[tuple[str, str, str]]) -> list[list[tuple[str, str, str]]]:
    """The steps at which one message is sent, or received."""
    found: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for step in steps:
        found.setdefault(step[:2], []).append(step)
    return list(found.values())


def matrix() -> list[Any]:
    return [
        struck(step, how, *kind, shards, "late" if how == "SIGKILL" and shards == 2 else "at once")
        for kind in KINDS
        for shards in (1, 2)
        for how in HOW
        for step in STEPS
        if comes_up(step[1], *kind)
    ]


@pytest.mark.parametrize("scenario", quick(), ids=named)
def test_a_worker_is_struck(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


@pytest.mark.matrix
@pytest.mark.parametrize("scenario", matrix(), ids=named)
def test_a_worker_is_struck_anywhere(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)
