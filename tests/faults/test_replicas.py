"""A shard with a backup is killed or stopped at every step: its backup takes over, and no version is lost.

The job goes on in its first generation, so versions follow one another without a gap. Every sample counts once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from faults.scenario import Fault, Outcome, Scenario
from faults.steps import occurs, server_steps

Play = Callable[[Scenario], Outcome]
POLICIES = ("bsp", "ssp:staleness=2", "r2sp", "fl-r2sp:groups=2")
#: Messages and calls that occur in every job with replicas, several times.
ALWAYS = {"ApplyUpdates", "UpdateReceived", "PushReceived", "Push", "Weights", "Pull", "apply", "applied"}
#: Messages that a backup sends or receives only after it has taken over.
ONLY_PRIMARY = {"UpdateReceived", "Pull", "Weights"}
#: Steps of a shard. A process cannot be stopped by its own Stop, and nothing is left to do then.
STEPS = [step for step in server_steps() if step[0] == "shard" and step[2] not in ("Stop", "Leave")]
GENEROUS = 15.0  # seconds between two updates, on a busy machine; the backup takes over in less than three


def shard_fails(step: tuple[str, str, str, str], policy: str, shards: int, party: str = "shard") -> Scenario:
    """Return a job with replicas in which a shard, or its backup, is killed at a step."""
    _, point, what, when = step
    fault = Fault(party, point, what, when, 3 if what in ALWAYS else 1)
    return Scenario(policy, (fault,), shards=shards, samples=48, replicas=1)


def scenario_name(scenario: Scenario) -> str:
    return f"{scenario.policy}-{scenario.shards}-{scenario.faults[0]}"


def check(outcome: Outcome, scenario: Scenario) -> None:
    """Assert that the fault happened, and that the job went on in its first generation, without a long pause."""
    fault = scenario.faults[0]
    if not outcome.fired[0] and fault.what not in ALWAYS:
        pytest.skip("this step did not occur")
    assert outcome.fired[0], "the job never reached the step"
    begun = 2 if scenario.loads else 1  # a worker that loads other weights begins the job again
    assert outcome.generations == begun, "the backup must take over without a rollback"
    times = [event["time"] for event in outcome.events if event["event"] == "applied"]
    assert max(after - before for before, after in itertools.pairwise(times)) < GENEROUS


QUICK = [
    shard_fails(("shard", "receive", "Push", "half"), "bsp", 1),
    shard_fails(("shard", "receive", "Push", "after"), "r2sp", 2),
    shard_fails(("shard", "send", "UpdateReceived", "before"), "bsp", 2),  # only the backup knows of the update
    shard_fails(("shard", "send", "UpdateReceived", "after"), "ssp:staleness=2", 1),
    shard_fails(("shard", "send", "PushReceived", "before"), "fl-r2sp:groups=2", 2),
    shard_fails(("shard", "receive", "ApplyUpdates", "after"), "r2sp", 1),
    shard_fails(("shard", "call", "applied", "after"), "ssp:staleness=2", 2),
    shard_fails(("shard", "send", "Weights", "half"), "bsp", 1),
    shard_fails(("shard", "call", "save_shard", "half"), "r2sp", 2),
    shard_fails(("shard", "send", "PartSaved", "before"), "bsp", 2),
    shard_fails(("shard", "receive", "InitialWeights", "after"), "bsp", 2),
    shard_fails(("shard", "send", "InitialWeightsReceived", "before"), "r2sp", 1),
    shard_fails(("shard", "receive", "Push", "half"), "bsp", 2, party="backup"),
    shard_fails(("shard", "send", "PushReceived", "before"), "r2sp", 1, party="backup"),
    shard_fails(("shard", "call", "apply", "before"), "ssp:staleness=2", 2, party="backup"),
]
MATRIX = [
    shard_fails(step, policy, 1 + (number + turn) % 2, party)
    for party in ("shard", "backup")
    for number, step in enumerate(STEPS)
    for turn, policy in enumerate(POLICIES)
    if occurs(step[2], policy, False) and not (party == "backup" and (turn % 2 or step[2] in ONLY_PRIMARY))
]


@pytest.mark.parametrize("scenario", QUICK, ids=scenario_name)
def test_a_shard_with_a_backup_is_killed(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


@pytest.mark.matrix
@pytest.mark.parametrize("scenario", MATRIX, ids=scenario_name)
def test_a_shard_with_a_backup_is_killed_at_any_step(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


def test_both_processes_of_a_shard_are_killed(play: Play) -> None:
    """The first loss costs nothing. The second one goes back to the checkpoint."""
    faults = (
        Fault("shard", "call", "applied", "after", 5, saved=True),
        Fault("backup", "call", "applied", "after", 12, saved=True),
    )
    outcome = play(Scenario("bsp", faults, samples=96, replicas=1))
    assert all(outcome.fired)
    assert outcome.generations == 2


def test_the_backup_and_then_the_shard_are_killed(play: Play) -> None:
    faults = (
        Fault("backup", "call", "applied", "after", 5, saved=True),
        Fault("shard", "call", "applied", "after", 12, saved=True),
    )
    outcome = play(Scenario("r2sp", faults, samples=96, replicas=1))
    assert all(outcome.fired)
    assert outcome.generations == 2


def test_a_connection_between_shard_and_coordinator_may_come_back_with_replicas_too(play: Play) -> None:
    faults = (
        Fault("shard", "relay", "UpdateReceived", "before", 3, "cut"),
        Fault("backup", "relay", "ApplyUpdates", "before", 3, "cut"),
    )
    outcome = play(Scenario("ssp:staleness=2", faults, shards=2, samples=48, replicas=1))
    assert all(outcome.fired)
    assert outcome.generations == 1
