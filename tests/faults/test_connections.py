"""The connections of a worker fail: cut, reset, or silent in one direction, at every message.

The worker reopens a lost connection and repeats what was not answered. A message that arrives twice counts once. No
process is restarted here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from faults.scenario import Fault, Outcome, Scenario
from faults.steps import AFTER_A_CUT, AFTER_A_LOSS, PADDING, REPEATED, SHARD_LOST, VISITS, kind_of, worker_steps

Play = Callable[[Scenario], Outcome]
#: Messages that do not occur in every job.
SELDOM = {"CancelIteration", "PushNow", "Refused", "Expelled", "Heartbeat", "KeepWeights"}
HANDSHAKE = {"Challenge", "Proof", "Accepted", "Join", "Welcome", "Hello"}


def connection_fails(name: str, when: str, how: str, policy: str, shards: int, streamed: bool = False) -> Scenario:
    """Return a job in which a worker's connection fails at a message."""
    # Under ASP nobody waits for a worker, so the others may take all samples before its second iteration.
    nth = 2 if name in REPEATED and policy != "asp" else 1
    faults = [Fault("worker", "relay", name, when, nth, how)]
    if name in AFTER_A_CUT:
        faults.append(Fault("worker", "relay", "GrantIteration", "after", 2, "cut"))
    if name in AFTER_A_LOSS:
        faults.append(SHARD_LOST)
    padding, replicas = PADDING if streamed else 0, int(name in AFTER_A_LOSS)
    shards = 2 if name in VISITS else shards
    return Scenario(
        policy, tuple(faults), shards=shards, replicas=replicas, lease=2.0, streamed=streamed, padding=padding
    )


def scenario_name(scenario: Scenario) -> str:
    kind = f"{scenario.policy}{'-streamed' if scenario.streamed else ''}"
    return f"{kind}-{scenario.shards}-{scenario.faults[0]}"


def check(outcome: Outcome, scenario: Scenario) -> None:
    """Assert that the fault happened. Skip the test if the message does not occur in every job."""
    if not outcome.fired[0] and scenario.faults[0].what in SELDOM:
        pytest.skip("this message did not occur")
    assert all(outcome.fired), "the message was never sent"


QUICK = [
    connection_fails("Push", "half", "cut", "bsp", 2),
    connection_fails("Push", "half", "reset", "r2sp", 1),
    connection_fails("Push", "half", "mute", "asp", 2),
    connection_fails("PushReceived", "before", "cut", "bsp", 1),  # the answer is lost, so the push is repeated
    connection_fails("PushReceived", "before", "mute", "r2sp", 2),
    connection_fails("GrantIteration", "before", "cut", "ssp:staleness=2", 1),
    connection_fails("GrantIteration", "before", "mute", "bsp", 1),
    connection_fails("GradientReady", "before", "cut", "bsp", 2),
    connection_fails("GradientReady", "before", "mute", "groups:count=2", 1),
    connection_fails("GradientReady", "after", "reset", "ksync:k=2", 2),
    connection_fails("Pull", "before", "mute", "safa", 1),
    connection_fails("Weights", "half", "cut", "dssp:low=1,high=3", 2),
    connection_fails("Weights", "half", "mute", "kbatch:k=2", 1),
    connection_fails("SampleRange", "before", "reset", "bsp:backup=1", 2),
    connection_fails("InitialWeights", "half", "cut", "asp", 2),
    connection_fails("InitialWeights", "before", "mute", "bsp", 1),
    connection_fails("ProvideWeights", "before", "cut", "r2sp:groups=2", 1),
    connection_fails("Leave", "before", "cut", "asp", 1),
    connection_fails("Resumed", "before", "cut", "bsp", 1),
    connection_fails("Push", "half", "cut", "r2sp", 2, streamed=True),
    connection_fails("Push", "after", "reset", "asp", 1, streamed=True),
    connection_fails("Push", "half", "mute", "bsp:pipeline=true", 2, streamed=True),
    connection_fails("UpdatedPiece", "before", "cut", "asp", 2, streamed=True),  # it was applied, and is pushed again
    connection_fails("UpdatedPiece", "half", "reset", "bsp:pipeline=true", 1, streamed=True),
    connection_fails("UpdatedPiece", "before", "mute", "r2sp", 1, streamed=True),
    connection_fails("GradientStarted", "before", "cut", "r2sp", 1, streamed=True),
    connection_fails("PushNow", "before", "cut", "r2sp", 2, streamed=True),
    connection_fails("VisitShard", "before", "cut", "r2sp", 2, streamed=True),
    connection_fails("EndVisit", "before", "mute", "r2sp", 2, streamed=True),
    connection_fails("RequestPush", "after", "cut", "r2sp", 2),
    connection_fails("AllowPush", "before", "reset", "r2sp", 1),
]
MESSAGES = list(dict.fromkeys(name for _, name, _ in worker_steps()))
MATRIX = [
    connection_fails(name, when, how, kind[0], 1 + (number + turn) % 2, kind[1])
    for number, name in enumerate(MESSAGES)
    for turn, (when, how) in enumerate(
        (when, how) for when in ("before", "half", "after") for how in ("cut", "reset", "mute")
    )
    for kind in (kind_of(number + turn, name),)
    if not (how == "mute" and name in HANDSHAKE)  # that would only wait for the timeout of ten seconds
]


@pytest.mark.parametrize("scenario", QUICK, ids=scenario_name)
def test_a_connection_fails(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


@pytest.mark.matrix
@pytest.mark.parametrize("scenario", MATRIX, ids=scenario_name)
def test_a_connection_fails_at_any_message(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


def test_a_slow_reader_delays_nobody(play: Play) -> None:
    """While one worker slowly reads its pull, others apply updates. Its pull does not mix two versions."""
    outcome = play(Scenario("asp", padding=1 << 21, trickle=6, samples=48))
    granted = [event for event in outcome.events if event["event"] == "granted" and event["worker"] == 0]
    pulled = [event for event in outcome.events if event["event"] == "pulled" and event["worker"] == 0]
    meanwhile = [
        event
        for event in outcome.events
        if event["event"] == "applied" and granted[0]["time"] < event["time"] < pulled[0]["time"]
    ]
    assert len(meanwhile) >= 6
