"""A worker is killed, or stopped beyond its lease, at every step of the protocol and under every policy.

Afterwards every sample of every epoch has changed the model exactly once, all shards hold the same version, every
update that arrived was decided once (see `promises.py`), and the job has ended by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from faults.scenario import Outcome, Scenario
from faults.steps import KINDS, kind_of, occurs, worker_fails, worker_steps

Play = Callable[[Scenario], Outcome]
HOW = ("SIGKILL", "SIGSTOP")
STEPS = worker_steps()
#: Messages that occur only under some policies, or only after another fault.
SELDOM = {
    *("CancelIteration", "PushNow", "Refused", "Expelled", "Heartbeat", "ProvideWeights", "InitialWeights"),
    "KeepWeights",
}


def scenario_name(scenario: Scenario) -> str:
    kind = f"{scenario.policy}{'-streamed' if scenario.streamed else ''}"
    return f"{kind}-{scenario.shards}-{scenario.restart.replace(' ', '-')}-{scenario.faults[0]}"


def check(outcome: Outcome, scenario: Scenario) -> None:
    """Assert that the fault happened. Skip the test if the step does not occur in every job."""
    if not outcome.fired[0] and scenario.faults[0].what in SELDOM:
        pytest.skip("this step did not occur")
    assert all(outcome.fired), "the job never reached the step"


def quick() -> list[Scenario]:
    """Return one scenario for each message, over all policies. Every fifth stops the worker; the others kill it."""
    scenarios = []
    for number, steps in enumerate(
        by_message(step for step in STEPS if step[1] not in SELDOM - {"ProvideWeights", "InitialWeights"})
    ):
        step = steps[number % len(steps)]
        scenarios.append(worker_fails(step, HOW[number % 5 == 0], *kind_of(number, step[1]), 1 + number % 2))
    for number, step in enumerate(
        step for step in STEPS if step[1] in ("Push", "GradientReady", "GradientStarted", "UpdatedPiece")
    ):
        kind = [kind for kind in KINDS if kind[1]][number % 4]  # during the push of each streamed policy
        scenarios.append(worker_fails(step, HOW[number % 2], *kind, 1 + number // 4 % 2))
    return list(dict.fromkeys(scenarios))


def by_message(steps: Iterable[tuple[str, str, str]]) -> list[list[tuple[str, str, str]]]:
    """Group the steps by message and direction."""
    found: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for step in steps:
        found.setdefault(step[:2], []).append(step)
    return list(found.values())


def matrix() -> list[Any]:
    """Return a scenario for every step, kind of job, number of shards and signal."""
    return [
        worker_fails(step, how, *kind, shards, "late" if how == "SIGKILL" and shards == 2 else "at once")
        for kind in KINDS
        for shards in (1, 2)
        for how in HOW
        for step in STEPS
        if occurs(step[1], *kind)
    ]


@pytest.mark.parametrize("scenario", quick(), ids=scenario_name)
def test_a_worker_fails(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


@pytest.mark.matrix
@pytest.mark.parametrize("scenario", matrix(), ids=scenario_name)
def test_a_worker_fails_at_any_step(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)
