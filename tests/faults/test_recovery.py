"""Faults during recovery: a second fault strikes at every step by which a job recovers from a first one.

The first fault kills the coordinator, a shard or a worker after the first checkpoint. The second one strikes the
process that was restarted, or one that comes back to it, at the first message of a type after that. Other jobs combine
two faults that are drawn from a seed: `--pairs N --pairs-seed S` draws other ones.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from faults.scenario import Fault, Outcome, Scenario
from faults.steps import KINDS, RECOVERY, draw_pair, kind_of, recovery_fails, recovery_steps

Play = Callable[[Scenario], Outcome]
FIRST = ("coordinator", "shard", "worker")
STEPS = recovery_steps()
#: The kinds of job in which every step is struck.
FEW = [("bsp", False), ("ssp:staleness=2", False), ("r2sp", False), ("r2sp", True), ("fl-r2sp:groups=2", False)]


def scenario_name(scenario: Scenario) -> str:
    kind = f"{scenario.policy}{'-streamed' if scenario.streamed else ''}-{scenario.shards}"
    first, second = scenario.faults
    return f"{kind}-{first.party}-then-{second}"


def check(outcome: Outcome) -> None:
    """Assert that the first fault happened. Skip the test if the job did not need the step of the second one."""
    assert outcome.fired[0], "the job never reached the first fault"
    if not outcome.fired[1]:
        pytest.skip("this step did not occur after the first fault")


QUICK = [
    ("coordinator", ("coordinator", "receive", "Register", "after")),
    ("coordinator", ("coordinator", "send", "Setup", "half")),
    ("coordinator", ("coordinator", "receive", "CheckpointLoaded", "after")),
    ("coordinator", ("coordinator", "receive", "Join", "after")),
    ("coordinator", ("coordinator", "send", "Welcome", "half")),
    ("coordinator", ("shard", "send", "Register", "before")),
    ("coordinator", ("shard", "receive", "Setup", "after")),
    ("coordinator", ("shard", "send", "CheckpointLoaded", "before")),
    ("coordinator", ("worker", "send", "Join", "after")),
    ("coordinator", ("worker", "receive", "Welcome", "after")),
    ("shard", ("coordinator", "send", "Setup", "before")),
    ("shard", ("shard", "receive", "Setup", "after")),
    ("shard", ("shard", "send", "Weights", "half")),
    ("shard", ("worker", "send", "Join", "before")),
    ("worker", ("worker", "send", "Join", "after")),
    ("worker", ("worker", "receive", "Weights", "half")),
    ("worker", ("shard", "receive", "Hello", "after")),
    ("worker", ("coordinator", "send", "Welcome", "after")),
]


def test_the_quick_scenarios_are_part_of_the_matrix() -> None:
    assert {step for _, step in QUICK} <= set(STEPS)
    assert {step[2] for step in STEPS} == set(RECOVERY), "a message of the recovery is not a message of the wire"


@pytest.mark.parametrize(
    "scenario",
    [
        recovery_fails(first, step, *kind_of(number, "Join"), 1 + number % 2)
        for number, (first, step) in enumerate(QUICK)
    ],
    ids=scenario_name,
)
def test_a_job_is_struck_while_it_recovers(scenario: Scenario, play: Play) -> None:
    check(play(scenario))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "scenario",
    [
        recovery_fails(first, step, *kind, 1 + number % 2)
        for first in FIRST
        for step in STEPS
        for number, kind in enumerate(FEW)
    ],
    ids=scenario_name,
)
def test_a_job_is_struck_at_any_step_of_its_recovery(scenario: Scenario, play: Play) -> None:
    check(play(scenario))


def test_a_server_is_killed_at_each_of_its_first_three_starts(play: Play) -> None:
    faults = (
        Fault("coordinator", "send", "ApplyUpdates", "after", 2, saved=True),
        Fault("coordinator", "receive", "Register", "after", after=0),
        Fault("coordinator", "send", "Welcome", "before", after=1),
        Fault("shard", "send", "CheckpointLoaded", "before", after=2),
    )
    outcome = play(Scenario("r2sp", faults, shards=2, samples=48))
    assert all(outcome.fired)


@pytest.mark.matrix
def test_two_random_faults(pair_seed: int, play: Play) -> None:
    outcome = play(draw_pair(pair_seed))
    if not any(outcome.fired):
        pytest.skip("neither fault happened")


def test_pairs_are_drawn_of_all_parties_and_kinds() -> None:
    drawn = [draw_pair(seed) for seed in range(400)]
    assert {fault.party for pair in drawn for fault in pair.faults} == {"coordinator", "shard", "worker"}
    hows = {"SIGKILL", "SIGSTOP", "cut", "reset", "mute"}
    assert {fault.how for pair in drawn for fault in pair.faults} == hows
    assert {(pair.policy, pair.streamed) for pair in drawn} == set(KINDS)
    assert {pair.faults[1].after for pair in drawn} == {None, 0}
    assert drawn == [draw_pair(seed) for seed in range(400)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair_seed" in metafunc.fixturenames:
        options = metafunc.config.option
        metafunc.parametrize("pair_seed", range(options.pairs_seed, options.pairs_seed + options.pairs))
