"""The connection between a shard and the coordinator fails: cut, reset, or silent in one direction, at every message.

The shard opens a new connection, and both sides send again what the other has not received. No generation is lost, no
order is carried out twice, and no process is restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from faults.scenario import Fault, Outcome, Scenario
from faults.steps import PADDING, SENT_BY_SHARDS, occurs
from paceline.serve.shard.coordinator_session import FROM_COORDINATOR

Play = Callable[[Scenario], Outcome]
KINDS = (("bsp", False), ("r2sp", False), ("r2sp", True), ("bsp:pipeline=true", True))
#: Messages that occur several times in every job. The fault happens at the second one.
REPEATED = {"UpdateReceived", "ApplyUpdates", "StreamUpdates"}
#: Messages that occur only after a lost connection, or in some jobs.
SELDOM = {"ShardHeartbeat", "DropUpdate", "KeepUpdate", "AddToSum", "Fence", "PeerRejected", "ShardFailed", "Refused"}
SELDOM |= {"UpdateProducts", "CheckpointLoaded"}
WITH_REPLICAS = {"TakeOver", "ContinueAlone", "BackupUnreachable"}  # these jobs have none
HANDSHAKE = {"Challenge", "Proof", "Accepted", "Register", "Registered"}
ONE_WAY = {"Stop"}  # the job is over


def connection_fails(name: str, when: str, how: str, policy: str, streamed: bool, shards: int) -> Scenario:
    """Return a job in which the connection of a shard to the coordinator fails at a message."""
    fault = Fault("shard", "relay", name, when, 2 if name in REPEATED else 1, how)
    padding = PADDING if streamed else 0
    return Scenario(policy, (fault,), shards=shards, streamed=streamed, padding=padding)


def scenario_name(scenario: Scenario) -> str:
    kind = f"{scenario.policy}{'-streamed' if scenario.streamed else ''}"
    return f"{kind}-{scenario.shards}-{scenario.faults[0]}"


def check(outcome: Outcome, scenario: Scenario) -> None:
    """Assert that the fault happened, and that the job went on in its first generation."""
    if not outcome.fired[0] and scenario.faults[0].what in SELDOM:
        pytest.skip("this message did not occur")
    assert outcome.fired[0], "the message was never sent"
    begun = 2 if scenario.loads else 1  # a worker that loads other weights begins the job again
    assert outcome.generations == begun, "a connection that comes back must lose nothing"


QUICK = [
    connection_fails("Challenge", "half", "reset", "r2sp", False, 1),
    connection_fails("Proof", "half", "cut", "bsp", False, 2),
    connection_fails("Accepted", "before", "reset", "bsp:pipeline=true", True, 1),
    connection_fails("Registered", "before", "cut", "bsp", False, 1),
    connection_fails("Setup", "half", "cut", "r2sp", False, 2),
    connection_fails("InitialWeightsFrom", "before", "reset", "bsp", False, 2),
    connection_fails("InitialWeightsReceived", "before", "cut", "r2sp", True, 1),
    connection_fails("UpdateReceived", "before", "cut", "bsp", False, 2),
    connection_fails("UpdateReceived", "half", "reset", "r2sp", False, 1),
    connection_fails("UpdateReceived", "after", "cut", "r2sp", True, 2),
    connection_fails("UpdateReceived", "before", "mute", "bsp:pipeline=true", True, 1),
    connection_fails("ApplyUpdates", "before", "cut", "r2sp", False, 2),
    connection_fails("ApplyUpdates", "half", "cut", "bsp", False, 1),
    connection_fails("ApplyUpdates", "after", "reset", "bsp", False, 2),
    connection_fails("ApplyUpdates", "before", "mute", "r2sp", False, 1),
    connection_fails("StreamUpdates", "before", "cut", "r2sp", True, 2),
    connection_fails("StreamUpdates", "half", "reset", "bsp:pipeline=true", True, 2),
    connection_fails("SavePart", "before", "cut", "bsp", False, 2),
    connection_fails("PartSaved", "half", "cut", "r2sp", True, 1),
    connection_fails("Stop", "before", "cut", "bsp", False, 1),
]
MESSAGES = [kind.__name__ for kind in get_args(FROM_COORDINATOR.taken)] + [*SENT_BY_SHARDS, "Proof"]
MATRIX = [
    connection_fails(name, when, how, *kind, 1 + (number + turn) % 2)
    for number, name in enumerate(dict.fromkeys(MESSAGES))
    for turn, (when, how) in enumerate(
        (when, how) for when in ("before", "half", "after") for how in ("cut", "reset", "mute")
    )
    for kind in KINDS
    if name not in WITH_REPLICAS
    if occurs(name, *kind) and not (how == "mute" and name in HANDSHAKE | ONE_WAY)  # that would only wait
]


@pytest.mark.parametrize("scenario", QUICK, ids=scenario_name)
def test_the_connection_of_a_shard_fails(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


@pytest.mark.matrix
@pytest.mark.parametrize("scenario", MATRIX, ids=scenario_name)
def test_the_connection_of_a_shard_fails_at_any_message(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


def test_a_connection_that_fails_again_and_again_loses_nothing(play: Play) -> None:
    faults = tuple(
        Fault("shard", "relay", name, when, nth, how)
        for nth, (name, when, how) in enumerate(
            (
                ("Registered", "half", "cut"),
                ("UpdateReceived", "before", "cut"),
                ("ApplyUpdates", "half", "reset"),
                ("ApplyUpdates", "before", "cut"),
                ("UpdateReceived", "after", "cut"),
                ("UpdateReceived", "half", "reset"),
            ),
            start=1,
        )
    )
    outcome = play(Scenario("ssp:staleness=2", faults, shards=2, samples=48))
    assert all(outcome.fired)
    assert outcome.generations == 1
