"""Every step of the protocol that a worker takes part in, from the message types themselves: a new one is covered by
itself. What only shards and onlookers say is left out."""

from __future__ import annotations

from typing import get_args

from faults.scenario import Fault, Scenario
from paceline import policies
from paceline.serve.coordinator.listener import HEARD_HERE
from paceline.serve.shard import shard, worker_connection
from paceline.serve.wire.frames import MessageDecoder
from paceline.serve.worker import incarnation, transfers

#: Every registered policy, as options make them differ.
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
#: And those that are applied piece by piece.
STREAMED = ("bsp:pipeline=true", "r2sp", "asp", "ssp:staleness=2")
KINDS = (*((policy, False) for policy in POLICIES), *((policy, True) for policy in STREAMED))
PADDING = 1 << 14  # elements, for some pieces on each of two shards
assert {policies.registry.split_spec(spec)[0] for spec in POLICIES} >= set(policies.names()), "a policy is missing"

#: In a fixed order, as tests are made from it: processes that share out the tests must collect the same ones.
SAID_BY_SHARDS = (
    "Register",
    "CheckpointLoaded",
    "InitialWeightsReceived",
    "UpdateReceived",
    "UpdateProducts",
    "PartSaved",
    "ShardFailed",
    "PeerRejected",
)
SAID_BY_OTHERS = {*SAID_BY_SHARDS, "Subscribe"}
NEVER = {"Excluded", "InspectExclusions"}  # these jobs have no outliers
#: What comes again and again; the fault strikes at the second, in the midst of training.
AGAIN_AND_AGAIN = {
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
AFTER_A_CUT = {"Resume", "Resumed"}


def names(*readers: MessageDecoder) -> list[str]:
    """The messages that these readers take."""
    found = dict.fromkeys(kind.__name__ for reader in readers for kind in get_args(reader.taken))
    return [name for name in found if name not in NEVER]


def worker_steps() -> list[tuple[str, str, str]]:
    """Where a worker may be struck: send or receive, the message, and when."""
    said = [name for name in names(HEARD_HERE, worker_connection.FROM_WORKER) if name not in SAID_BY_OTHERS]
    heard = names(incarnation.FROM_COORDINATOR, transfers.FROM_SHARD)
    steps = []
    for name in said:
        steps += [("send", name, when) for when in ("before", "half", "after")]
    for name in heard:
        steps += [("receive", name, when) for when in (("half", "after") if name in WITH_BODY else ("after",))]
    return steps


def comes_up(name: str, policy: str, streamed: bool) -> bool:
    """Is there such a message, or call, in such a job?"""
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
    """One kind of job after the other, of those in which a message comes up."""
    kinds = [kind for kind in KINDS if comes_up(name, *kind)]
    return kinds[number % len(kinds)]


def struck(
    step: tuple[str, str, str], how: str, policy: str, streamed: bool, shards: int, restart: str = "at once"
) -> Scenario:
    """A job in which a worker is struck at a step."""
    point, name, when = step
    faults = [Fault("worker", point, name, when, 2 if name in AGAIN_AND_AGAIN else 1, how)]
    if name in AFTER_A_CUT:
        faults.append(Fault("worker", "receive", "GrantIteration", "after", 2, "cut"))
    # Whoever is stopped must be given up, so the lease is short; whoever is killed need not.
    lease = 1.5 if how == "SIGSTOP" or restart == "late" else 30.0
    padding = PADDING if streamed else 0
    return Scenario(
        policy, tuple(faults), shards=shards, lease=lease, restart=restart, streamed=streamed, padding=padding
    )


FUNCTIONS = {"coordinator": ("finish",), "shard": ("apply", "applied", "save_shard")}
HALVES = ("finish", "save_shard")


def server_steps() -> list[tuple[str, str, str, str]]:
    """Where the coordinator or a shard may be struck: who, send or receive or call, what, and when."""
    steps = []
    said = names(incarnation.FROM_COORDINATOR, shard.FROM_COORDINATOR)
    for name in said:
        steps += [("coordinator", "send", name, when) for when in ("before", "half", "after")]
    for name in names(HEARD_HERE):
        steps.append(("coordinator", "receive", name, "after"))
    for name in (*names(transfers.FROM_SHARD), *SAID_BY_SHARDS):
        steps += [("shard", "send", name, when) for when in ("before", "half", "after")]
    for name in names(worker_connection.FROM_WORKER, shard.FROM_COORDINATOR):
        steps += [("shard", "receive", name, when) for when in (("half", "after") if name == "Push" else ("after",))]
    for who, functions in FUNCTIONS.items():
        for name in functions:
            whens = ("before", "half", "after") if name in HALVES else ("before", "after")
            steps += [(who, "call", name, when) for when in whens]
    return list(dict.fromkeys(steps))


def server_struck(step: tuple[str, str, str, str], how: str, policy: str, streamed: bool, shards: int) -> Scenario:
    """A job in which the coordinator or a shard is struck at a step, after the first checkpoint."""
    who, point, what, when = step
    fault = Fault(who, point, what, when, 1 if what in ("Leave", "Stop", "PartSaved") else 2, how, saved=True)
    lease = 1.5 if how == "SIGSTOP" else 10.0
    padding = PADDING if streamed else 0
    return Scenario(policy, (fault,), shards=shards, samples=48, lease=lease, streamed=streamed, padding=padding)
