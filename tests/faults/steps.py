"""Every step of the protocol at which a process can fail.

The steps are derived from the message types, so a new message is covered at once.
"""

from __future__ import annotations

from typing import get_args

from faults.scenario import Fault, Scenario
from paceline import policies
from paceline.serve.coordinator.listener import FROM_ANY_PEER
from paceline.serve.shard import shard, worker_connection
from paceline.serve.wire.frames import MessageDecoder
from paceline.serve.worker import incarnation, transfers

#: Every registered policy, with the options that change its messages.
POLICIES = (
    *("bsp", "bsp:backup=1", "ksync:k=2", "kbatch:k=2", "asp", "ssp:staleness=2", "dssp:low=1,high=3"),
    *(
        "r2sp",
        "r2sp:groups=2",
        "rlp",
        "safa",
        "fedbuff:k=1,discount=0",
        "filtered:policy=bsp",
        "fl-r2sp:groups=2",
        "groups:count=2",
    ),
)
#: The policies whose updates are also tested streamed.
STREAMED = ("bsp:pipeline=true", "r2sp", "asp", "ssp:staleness=2")
KINDS = (*((policy, False) for policy in POLICIES), *((policy, True) for policy in STREAMED))
PADDING = 1 << 14  # elements: enough for several pieces on each of two shards
assert {policies.registry.split_spec(spec)[0] for spec in POLICIES} >= set(policies.names()), "a policy is missing"

#: A tuple, because tests are generated from it: parallel test processes must collect the same tests in the same order.
SENT_BY_SHARDS = (
    "Register",
    "CheckpointLoaded",
    "InitialWeightsReceived",
    "UpdateReceived",
    "UpdateProducts",
    "PartSaved",
    "ShardFailed",
    "PeerRejected",
)
SENT_BY_OTHERS = {*SENT_BY_SHARDS, "Subscribe"}
NEVER_SENT = {"Excluded", "InspectExclusions"}  # these jobs have no outliers
#: Messages of every iteration. The fault happens at the second one, during training.
REPEATED = {
    *(
        "RequestSamples",
        "SampleRange",
        "GradientReady",
        "Push",
        "PushReceived",
        "Pull",
        "Weights",
        "GrantIteration",
        "CancelIteration",
    ),
    *("GradientStarted", "RequestPush", "AllowPush", "UpdatedPiece"),
}
WITH_BODY = {"InitialWeights", "Push", "Weights", "Join", "UpdatedPiece"}
AFTER_A_CUT = {"Resume", "Resumed"}  # messages that follow a lost connection


def names(*decoders: MessageDecoder) -> list[str]:
    """Return the names of the messages that these decoders accept."""
    found = dict.fromkeys(kind.__name__ for decoder in decoders for kind in get_args(decoder.taken))
    return [name for name in found if name not in NEVER_SENT]


def worker_steps() -> list[tuple[str, str, str]]:
    """Return every step at which a worker can fail: send or receive, the message, and when."""
    sent = [name for name in names(FROM_ANY_PEER, worker_connection.FROM_WORKER) if name not in SENT_BY_OTHERS]
    received = names(incarnation.FROM_COORDINATOR, transfers.FROM_SHARD)
    steps = []
    for name in sent:
        steps += [("send", name, when) for when in ("before", "half", "after")]
    for name in received:
        steps += [("receive", name, when) for when in (("half", "after") if name in WITH_BODY else ("after",))]
    return steps


def occurs(name: str, policy: str, streamed: bool) -> bool:
    """Return whether this message or call occurs in such a job."""
    match name:
        case "GradientStarted" | "UpdatedPiece" | "StreamUpdates":
            return streamed
        case "RequestPush" | "AllowPush":
            return not streamed and policies.make(policy).takes_turns
        case "PushReceived" | "ApplyUpdates" | "KeepUpdate":
            return not streamed
        case _:
            return True


def kind_of(number: int, name: str) -> tuple[str, bool]:
    """Return a kind of job in which this message or call occurs, a different one for each number."""
    kinds = [kind for kind in KINDS if occurs(name, *kind)]
    return kinds[number % len(kinds)]


def worker_fails(
    step: tuple[str, str, str], how: str, policy: str, streamed: bool, shards: int, restart: str = "at once"
) -> Scenario:
    """Return a job in which a worker is killed or stopped at a step."""
    point, name, when = step
    faults = [Fault("worker", point, name, when, 2 if name in REPEATED else 1, how)]
    if name in AFTER_A_CUT:
        faults.append(Fault("worker", "receive", "GrantIteration", "after", 2, "cut"))
    # A stopped worker must be given up, so the lease is short. A killed one is restarted before that.
    lease = 1.5 if how == "SIGSTOP" or restart == "late" else 30.0
    padding = PADDING if streamed else 0
    return Scenario(
        policy, tuple(faults), shards=shards, lease=lease, restart=restart, streamed=streamed, padding=padding
    )


FUNCTIONS = {"coordinator": ("finish",), "shard": ("apply", "applied", "save_shard")}
HALF_DONE = ("finish", "save_shard")  # functions that a process can fail half-way through


def server_steps() -> list[tuple[str, str, str, str]]:
    """Return every step at which the coordinator or a shard can fail: who, send, receive or call, what, and when."""
    steps = []
    for name in names(incarnation.FROM_COORDINATOR, shard.FROM_COORDINATOR):
        steps += [("coordinator", "send", name, when) for when in ("before", "half", "after")]
    for name in names(FROM_ANY_PEER):
        steps.append(("coordinator", "receive", name, "after"))
    for name in (*names(transfers.FROM_SHARD), *SENT_BY_SHARDS):
        steps += [("shard", "send", name, when) for when in ("before", "half", "after")]
    for name in names(worker_connection.FROM_WORKER, shard.FROM_COORDINATOR):
        steps += [("shard", "receive", name, when) for when in (("half", "after") if name == "Push" else ("after",))]
    for who, functions in FUNCTIONS.items():
        for name in functions:
            whens = ("before", "half", "after") if name in HALF_DONE else ("before", "after")
            steps += [(who, "call", name, when) for when in whens]
    return list(dict.fromkeys(steps))


def server_fails(step: tuple[str, str, str, str], how: str, policy: str, streamed: bool, shards: int) -> Scenario:
    """Return a job in which the coordinator or a shard is killed or stopped at a step, after the first checkpoint."""
    who, point, what, when = step
    fault = Fault(who, point, what, when, 1 if what in ("Leave", "Stop", "PartSaved") else 2, how, saved=True)
    lease = 1.5 if how == "SIGSTOP" else 10.0
    padding = PADDING if streamed else 0
    return Scenario(policy, (fault,), shards=shards, samples=48, lease=lease, streamed=streamed, padding=padding)
