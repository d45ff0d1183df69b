"""The coordinator, or a shard, killed or stopped at every step: around an update, around a checkpoint.

The server goes back to its last checkpoint, workers reconnect by themselves, and training is finished. Exactly once is
counted from the restored version, and so in the end every sample has changed the model exactly once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from faults.scenario import Fault, Outcome, Scenario
from faults.steps import KINDS, comes_up, kind_of, server_steps, server_struck

Play = Callable[[Scenario], Outcome]
STEPS = server_steps()
#: Every job comes to these.
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


def named(scenario: Scenario) -> str:
    kind = f"{scenario.policy}{'-streamed' if scenario.streamed else ''}"
    return f"{kind}-{scenario.shards}-{scenario.faults[0]}"


def check(outcome: Outcome, scenario: Scenario) -> None:
    fault = scenario.faults[0]
    if not outcome.fired[0] and fault.what not in ALWAYS:
        pytest.skip("this step did not come up once there was a checkpoint")
    assert outcome.fired[0], "the job never came to the step"
    if fault.how == "SIGKILL" and fault.what in ALWAYS:  # others may come when all is saved
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
    scenarios = []
    for number, step in enumerate(QUICK):
        scenarios.append(server_struck(step, "SIGKILL", *kind_of(number, step[2]), 1 + number % 2))
    kinds = [kind for kind in KINDS if kind[1]]
    for number, step in enumerate(STREAMED):
        scenarios.append(server_struck(step, "SIGKILL", *kinds[number % len(kinds)], 1 + number // 4 % 2))
    scenarios.append(server_struck(("coordinator", "send", "ApplyUpdates", "after"), "SIGSTOP", "asp", False, 2))
    scenarios.append(server_struck(("shard", "call", "apply", "after"), "SIGSTOP", "bsp", False, 2))
    scenarios.append(server_struck(("shard", "call", "apply", "after"), "SIGSTOP", "r2sp", True, 2))
    return scenarios


def test_the_quick_ones_are_of_the_matrix() -> None:
    assert {*QUICK, *STREAMED} <= set(STEPS)


@pytest.mark.parametrize("scenario", quick(), ids=named)
def test_a_server_is_struck(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "scenario",
    [
        server_struck(step, how, *kind, shards)
        for number, kind in enumerate(KINDS)
        for how in ("SIGKILL", "SIGSTOP")
        for shards in (1 + number % 2,)
        for step in STEPS
        if (how == "SIGKILL" or step[3] == "after") and comes_up(step[2], *kind)
    ],
    ids=named,
)
def test_a_server_is_struck_anywhere(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


@pytest.mark.parametrize("who", ["coordinator", "shard"])
@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_a_server_is_killed_when_everybody_has_left(who: str, policy: str, play: Play) -> None:
    """Before its last checkpoint is written: what was done since the one before is done again."""
    point = {
        "coordinator": Fault("coordinator", "receive", "Leave", "after", nth=3, saved=True),
        "shard": Fault("shard", "receive", "Fence", "after", nth=3, saved=True),
    }[who]
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
