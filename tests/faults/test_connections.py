"""The network between a worker and its servers fails: cut, reset, or silent in one direction, at every message.

A connection that is lost comes back by itself, and what was not answered is said again; what was said twice counts
once. Nobody is restarted here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from faults.scenario import Fault, Outcome, Scenario
from faults.steps import AFTER_A_CUT, AGAIN_AND_AGAIN, PADDING, kind_of, worker_steps

Play = Callable[[Scenario], Outcome]
#: Nobody greets twice, so what is lost of a greeting is only a slow beginning; and these seldom come up.
SELDOM = {"CancelIteration", "PushNow", "Refused", "Expelled", "Heartbeat"}
GREETING = {"Challenge", "Proof", "Accepted", "Join", "Welcome", "Hello"}


def spoiled(name: str, when: str, how: str, policy: str, shards: int, streamed: bool = False) -> Scenario:
    # Under ASP a worker is not waited for, and the others may leave it no second iteration.
    nth = 2 if name in AGAIN_AND_AGAIN and policy != "asp" else 1
    faults = [Fault("worker", "relay", name, when, nth, how)]
    if name in AFTER_A_CUT:
        faults.append(Fault("worker", "relay", "GrantIteration", "after", 2, "cut"))
    padding = PADDING if streamed else 0
    return Scenario(policy, tuple(faults), shards=shards, lease=2.0, streamed=streamed, padding=padding)


def named(scenario: Scenario) -> str:
    kind = f"{scenario.policy}{'-streamed' if scenario.streamed else ''}"
    return f"{kind}-{scenario.shards}-{scenario.faults[0]}"


def check(outcome: Outcome, scenario: Scenario) -> None:
    if not outcome.fired[0] and scenario.faults[0].what in SELDOM:
        pytest.skip("this message did not come up")
    assert all(outcome.fired), "the message was never sent"


QUICK = [
    spoiled("Push", "half", "cut", "bsp", 2),
    spoiled("Push", "half", "reset", "r2sp", 1),
    spoiled("Push", "half", "mute", "asp", 2),
    spoiled("PushReceived", "before", "cut", "bsp", 1),  # the answer is lost, and the push repeated
    spoiled("PushReceived", "before", "mute", "r2sp", 2),
    spoiled("GrantIteration", "before", "cut", "ssp:staleness=2", 1),
    spoiled("GrantIteration", "before", "mute", "bsp", 1),
    spoiled("GradientReady", "before", "cut", "bsp", 2),
    spoiled("GradientReady", "before", "mute", "groups:count=2", 1),
    spoiled("GradientReady", "after", "reset", "ksync:k=2", 2),
    spoiled("Pull", "before", "mute", "safa", 1),
    spoiled("Weights", "half", "cut", "dssp:low=1,high=3", 2),
    spoiled("Weights", "half", "mute", "kbatch:k=2", 1),
    spoiled("SampleRange", "before", "reset", "bsp:backup=1", 2),
    spoiled("InitialWeights", "half", "cut", "asp", 2),
    spoiled("InitialWeights", "before", "mute", "bsp", 1),
    spoiled("ProvideWeights", "before", "cut", "r2sp:groups=2", 1),
    spoiled("Leave", "before", "cut", "asp", 1),
    spoiled("Resumed", "before", "cut", "bsp", 1),
    spoiled("Push", "half", "cut", "r2sp", 2, streamed=True),
    spoiled("Push", "after", "reset", "asp", 1, streamed=True),
    spoiled("Push", "half", "mute", "bsp:pipeline=true", 2, streamed=True),
    spoiled("UpdatedPiece", "before", "cut", "asp", 2, streamed=True),  # it was applied, and is asked for again
    spoiled("UpdatedPiece", "half", "reset", "bsp:pipeline=true", 1, streamed=True),
    spoiled("UpdatedPiece", "before", "mute", "r2sp", 1, streamed=True),
    spoiled("GradientStarted", "before", "cut", "r2sp", 1, streamed=True),
    spoiled("PushNow", "before", "cut", "r2sp", 2, streamed=True),
    spoiled("RequestPush", "after", "cut", "r2sp", 2),
    spoiled("AllowPush", "before", "reset", "r2sp", 1),
]
MESSAGES = list(dict.fromkeys(name for _, name, _ in worker_steps()))
MATRIX = [
    spoiled(name, when, how, kind[0], 1 + (number + turn) % 2, kind[1])
    for number, name in enumerate(MESSAGES)
    for turn, (when, how) in enumerate(
        (when, how) for when in ("before", "half", "after") for how in ("cut", "reset", "mute")
    )
    for kind in (kind_of(number + turn, name),)
    if not (how == "mute" and name in GREETING)  # that is a wait of ten seconds, and nothing else
]


@pytest.mark.parametrize("scenario", QUICK, ids=named)
def test_a_connection_fails(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


@pytest.mark.matrix
@pytest.mark.parametrize("scenario", MATRIX, ids=named)
def test_a_connection_fails_anywhere(scenario: Scenario, play: Play) -> None:
    check(play(scenario), scenario)


def test_a_slow_reader_delays_nobody(play: Play) -> None:
    """While one worker reads its pull at a trickle, others apply updates, and it sees no mixture of two versions."""
    outcome = play(Scenario("asp", padding=1 << 21, trickle=6, samples=48))
    granted = [event for event in outcome.events if event["event"] == "granted" and event["worker"] == 0]
    pulled = [event for event in outcome.events if event["event"] == "pulled" and event["worker"] == 0]
    meanwhile = [
        event
        for event in outcome.events
        if event["event"] == "applied" and granted[0]["time"] < event["time"] < pulled[0]["time"]
    ]
    assert len(meanwhile) >= 6
