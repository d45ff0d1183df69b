"""The coordinator or a shard is killed or stopped at every step of an update and of a checkpoint.

The server restores its last checkpoint, workers reconnect by themselves, and the training finishes. Exactly-once counts
from the restored version, so in the end every sample has changed the model exactly once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from faults.scenario import Fault, Outcome, Scenario
from faults.steps import KINDS, kind_of, occurs, server_fails, server_steps

Play = Callable[[Scenario], Outcome]
STEPS = server_steps()
#: Messages and calls that occur in every job.
ALWAYS = (
    "ApplyUpdates",
    "StreamUpdates",
    "UpdatedPiece",
    "GrantIteration",
    "UpdateReceived",
    "GradientReady",
    "PushReceived",
    "SavePart",
    "apply",
    "applied",
    "save_shard",
    "finish",
)


def scenario_name(scenario: Scenario) -> str:
    kind = f"{scenario.policy}{'-streamed' if scenario.streamed else ''}"
    return f"{kind}-{scenario.shards}-{scenario.faults[0]}"


def check(outcome: Outcome, scenario: Scenario) -> None:
    """Assert that the fault happened. Skip the test if the step does not occur in every job."""
    fault = scenario.faults[0]
    if not outcome.fired[0] and fault.what not in ALWAYS:
        pytest.skip("this step did not occur after the first checkpoint")
    assert outcome.fired[0], "the job never reached the step"
    if fault.how == "SIGKILL" and fault.what in ALWAYS:  # other steps may come after the last checkpoint
        assert outcome.generations > 1


QUICK = [
    ("coordinator", "send", "ApplyUpdates", "before"),
    ("coordinator", "send", "ApplyUpdates", "half"),
    ("coordinator", "send", "GrantIteration", "after"),
    ("coordinator", "receive", "UpdateReceived", "after"),
    ("coordinator", "send", "SavePart", "half"),
    ("coordinator", "call", "finish", "before"),
    ("coordinator", "call", "finish", "half"),
    ("coordinator", "call", "finish", "after"),
    ("shard", "call", "apply", "before"),
    ("shard", "call", "applied", "after"),
    ("shard", "receive", "Push", "half"),
    ("shard", "send", "PushReceived", "before"),
    ("shard", "send", "Weights", "half"),
    ("shard", "call", "save_shard", "half"),
    ("shard", "call", "save_shard", "after"),
]
STREAMED = [
    ("coordinator", "send", "StreamUpdates", "half"),
    ("coordinator", "send", "SavePart", "after"),
    ("shard", "receive", "StreamUpdates", "after"),
    ("shard", "receive", "Push", "half"),
    ("shard", "call", "apply", "before"),
    ("shard", "call", "applied", "after"),
    ("shard", "send", "UpdatedPiece", "half"),
    ("shard", "call", "save_shard", "before"),
]


def quick() -> list[Scenario]:
    """Return the scenarios that run in every test run."""
    scenarios = []
    for number, step in enumerate(QUICK):
        scenarios.append(server_fails(step, "SIGKILL", *kind_of(number, step[2]), 1 + number % 2))
    kinds = [kind for kind in KINDS if kind[1]]
    for number, step in enumerate(STREAMED):
        scenarios.append(server_fails(step, "SIGKILL", *kinds[number % len(kinds)], 1 + number // 4 % 2))
    scenarios.append(server_fails(("coordinator", "send", "ApplyUpdates", "after"), "SIGSTOP", "asp", False, 2))
    scenarios.append(server_fails(("shard", "call", "apply", "after"), "SIGSTOP", "bsp", False, 2))
    scenarios.append(server_fails(("shard", "call", "apply", "after"), "SIGSTOP", "r2sp", True, 2))
    return scenarios


def test_the_quick_scenarios_are_part_of_the_matrix() -> None:
    assert {*QUICK, *STREAMED} <= set(STEPS)


@pytest.mark.parametrize("scenario", quick(), ids=scenario_name)
def test_a_server_fails(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "scenario",
    [
        server_fails(step, how, *kind, shards)
        for number, kind in enumerate(KINDS)
        for how in ("SIGKILL", "SIGSTOP")
        for shards in (1 + number % 2,)
        for step in STEPS
        if (how == "SIGKILL" or step[3] == "after") and occurs(step[2], *kind)
    ],
    ids=scenario_name,
)
def test_a_server_fails_at_any_step(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


@pytest.mark.slow
@pytest.mark.parametrize("party", ["coordinator", "shard"])
@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_a_server_is_killed_when_all_workers_have_left(party: str, policy: str, play: Play) -> None:
    """The last checkpoint is not written yet, so everything since the one before is trained again."""
    point = {
        "coordinator": Fault("coordinator", "receive", "Leave", "after", nth=3, saved=True),
        "shard": Fault("shard", "receive", "Fence", "after", nth=3, saved=True),
    }[party]
    outcome = play(Scenario(policy, (point,), every=1000))
    assert outcome.fired[0]
    assert outcome.generations == 2


def test_two_shards_are_killed_one_after_the_other(play: Play) -> None:
    faults = (
        Fault("shard", "call", "apply", "after", nth=5, saved=True),
        Fault("shard", "call", "apply", "before", nth=9, saved=True),
    )
    outcome = play(Scenario("r2sp", faults, shards=2, samples=48))
    assert all(outcome.fired)
    assert outcome.generations == 3


def test_a_worker_and_the_server_are_killed(play: Play) -> None:
    faults = (
        Fault("worker", "send", "Push", "half", nth=4),
        Fault("coordinator", "send", "ApplyUpdates", "after", nth=8, saved=True),
        Fault("shard", "call", "applied", "after", nth=12, saved=True),
    )
    outcome = play(Scenario("ssp:staleness=2", faults, shards=2, samples=96))
    assert all(outcome.fired)
