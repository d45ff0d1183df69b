"""Every step of the protocol at which a process can fail.

The steps are derived from the message types, so a new message is covered at once.
"""

from __future__ import annotations

import random
from typing import get_args

import msgspec

from faults.scenario import LOADING, Fault, Scenario
from paceline import policies
from paceline.serve.coordinator.listener import FROM_ANY_PEER
from paceline.serve.shard import coordinator_session, worker_connection
from paceline.serve.wire.frames import MessageDecoder
from paceline.serve.worker import control, transfers

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
STREAMED = ("bsp:pipeline=true", "r2sp", "r2sp:groups=2", "asp", "ssp:staleness=2")
KINDS = (*((policy, False) for policy in POLICIES), *((policy, True) for policy in STREAMED))
PADDING = 1 << 14  # elements: enough for several pieces on each of two shards
assert {policies.registry.split_spec(spec)[0] for spec in POLICIES} >= set(policies.names()), "a policy is missing"

#: A tuple, because tests are generated from it: parallel test processes must collect the same tests in the same order.
SENT_BY_SHARDS = (
    "Register",
    "CheckpointLoaded",
    "InitialWeightsReceived",
    "UpdateReceived",
    "UpdateHeld",
    "UpdateProducts",
    "PartSaved",
    "ShardFailed",
    "PeerRejected",
    "BackupUnreachable",
    "ShardHeartbeat",
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
    *("GradientStarted", "RequestPush", "AllowPush", "UpdatedPiece", "PullState", "OptimizerState"),
    *("VisitShard", "EndVisit"),
}
WITH_BODY = {"InitialWeights", "InitialState", "Push", "Weights", "Join", "UpdatedPiece", "OptimizerState"}
AFTER_A_CUT = {"Resume", "Resumed"}  # messages that follow a lost connection
VISITS = {"VisitShard", "EndVisit"}  # messages of jobs with two shards
AFTER_A_LOSS = {"ShardMoved"}  # messages that follow the loss of a shard with a backup
SHARD_LOST = Fault("shard", "call", "applied", "after", 2)


def names(*decoders: MessageDecoder) -> list[str]:
    """Return the names of the messages that these decoders accept."""
    found = dict.fromkeys(kind.__name__ for decoder in decoders for kind in get_args(decoder.taken))
    return [name for name in found if name not in NEVER_SENT]


def worker_steps() -> list[tuple[str, str, str]]:
    """Return every step at which a worker can fail: send or receive, the message, and when."""
    sent = [name for name in names(FROM_ANY_PEER, worker_connection.FROM_WORKER) if name not in SENT_BY_OTHERS]
    received = names(control.FROM_COORDINATOR, transfers.FROM_SHARD)
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
        case "VisitShard" | "EndVisit":
            return streamed and policy == "r2sp"
        case "UpdateHeld":
            return streamed and policies.make(policy).hears_held
        case "RequestPush" | "AllowPush":
            return not streamed and policies.make(policy).one_by_one
        case "PushReceived" | "ApplyUpdates" | "KeepUpdate" | "ShardMoved":
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
    if name in AFTER_A_LOSS:
        faults.append(SHARD_LOST)
    # A stopped worker must be given up, so the lease is short. A killed one is restarted before that.
    lease = 1.5 if how == "SIGSTOP" or restart == "late" else 30.0
    padding = PADDING if streamed else 0
    replicas = int(name in AFTER_A_LOSS)
    return Scenario(
        policy,
        tuple(faults),
        shards=2 if name in VISITS else shards,
        replicas=replicas,
        lease=lease,
        restart=restart,
        streamed=streamed,
        padding=padding,
    )


FUNCTIONS = {"coordinator": ("finish",), "shard": ("apply", "applied", "save_shard")}
HALF_DONE = ("finish", "save_shard")  # functions that a process can fail half-way through


def server_steps() -> list[tuple[str, str, str, str]]:
    """Return every step at which the coordinator or a shard can fail.

    A step is the party, one of send, receive and call, the message or function, and the moment.
    """
    steps = []
    for name in names(control.FROM_COORDINATOR, coordinator_session.FROM_COORDINATOR):
        steps += [("coordinator", "send", name, when) for when in ("before", "half", "after")]
    for name in names(FROM_ANY_PEER):
        steps.append(("coordinator", "receive", name, "after"))
    for name in (*names(transfers.FROM_SHARD), *SENT_BY_SHARDS):
        steps += [("shard", "send", name, when) for when in ("before", "half", "after")]
    for name in names(worker_connection.FROM_WORKER, coordinator_session.FROM_COORDINATOR):
        steps += [("shard", "receive", name, when) for when in (("half", "after") if name == "Push" else ("after",))]
    for party, functions in FUNCTIONS.items():
        for name in functions:
            whens = ("before", "half", "after") if name in HALF_DONE else ("before", "after")
            steps += [(party, "call", name, when) for when in whens]
    return list(dict.fromkeys(steps))


def server_fails(step: tuple[str, str, str, str], how: str, policy: str, streamed: bool, shards: int) -> Scenario:
    """Return a job in which the coordinator or a shard is killed or stopped at a step, after the first checkpoint."""
    party, point, what, when = step
    fault = Fault(party, point, what, when, 1 if what in ("Leave", "Stop", "PartSaved") else 2, how, saved=True)
    lease = 1.5 if how == "SIGSTOP" else 10.0
    padding = PADDING if streamed else 0
    shards = 2 if what in VISITS else shards
    return Scenario(policy, (fault,), shards=shards, samples=48, lease=lease, streamed=streamed, padding=padding)


#: The messages by which a job recovers. A tuple, as above.
RECOVERY = (
    *(
        "Challenge",
        "Proof",
        "Accepted",
        "Register",
        "Setup",
        "CheckpointLoaded",
        "Join",
        "Welcome",
        "Resume",
        "Resumed",
    ),
    *("Expelled", "Hello", "Pull", "Weights", "GrantIteration", "RequestSamples", "SampleRange", "Fence"),
)


def recovery_steps() -> list[tuple[str, str, str, str]]:
    """Return every step of a recovery at which a worker, the coordinator or a shard can fail."""
    steps = [("worker", *step) for step in worker_steps()] + server_steps()
    return [step for step in steps if step[2] in RECOVERY]


def recovery_fails(
    first: str, step: tuple[str, str, str, str], policy: str, streamed: bool, shards: int, how: str = "SIGKILL"
) -> Scenario:
    """Return a job in which a process is killed, and then one fails at the first such step of the recovery."""
    updated = "StreamUpdates" if streamed else "ApplyUpdates"
    fault = {
        "coordinator": Fault("coordinator", "send", updated, "after", 2, saved=True),
        "shard": Fault("shard", "receive", updated, "after", 2, saved=True),
        "worker": Fault("worker", "send", "Push", "half", 3, saved=True),
    }[first]
    party, point, what, when = step
    second = Fault(party, point, what, when, 1, how, after=0)
    padding = PADDING if streamed else 0
    faults = (fault, second)
    return Scenario(policy, faults, shards=shards, samples=48, lease=10.0, streamed=streamed, padding=padding)


#: Messages that occur in few jobs. No random fault waits for them.
SELDOM = {
    *LOADING,
    *VISITS,
    *("Heartbeat", "Refused", "Expelled", "ProvideWeights", "InitialWeights", "InitialWeightsFrom", "PushNow"),
    *("InitialWeightsReceived", "PeerRejected", "ShardFailed", "UpdateProducts", "CancelIteration", "Subscribe"),
    *("InspectExclusions", "Resume", "Resumed", "AddToSum", "KeepUpdate", "DropUpdate", "ReportMetric"),
}


def draw_pair(seed: int) -> Scenario:
    """Return a job of any kind with two faults, drawn from a seed. In half of them the second follows the first."""
    rng = random.Random(seed)
    policy, streamed = rng.choice(KINDS)
    faults = [_draw_fault(rng, policy, streamed) for _ in range(2)]
    if rng.random() < 0.5:
        faults[1] = msgspec.structs.replace(faults[1], after=0, nth=rng.choice((1, 1, 2, 3)))
    return Scenario(
        policy,
        tuple(faults),
        shards=rng.choice((1, 2)),
        samples=48,
        lease=rng.choice((1.5, 3.0)) if any(fault.how in ("SIGSTOP", "mute") for fault in faults) else 10.0,
        streamed=streamed,
        padding=PADDING if streamed else 0,
        every=rng.choice((1, 4, 10)),
        restart=rng.choice(("at once", "at once", "late")),
        limit=120.0,
    )


def _draw_fault(rng: random.Random, policy: str, streamed: bool) -> Fault:
    party, how = rng.choice(("coordinator", "shard", "worker")), rng.choice(("SIGKILL", "SIGKILL", "SIGSTOP", "relay"))
    nth = rng.choice((1, 1, 2, 3, 6))
    steps = (
        worker_steps()
        if party == "worker" or how == "relay"
        else [step[1:] for step in server_steps() if step[0] == party]
    )
    steps = [step for step in steps if occurs(step[1], policy, streamed) and step[1] not in SELDOM]
    point, what, when = rng.choice(steps)
    if how == "relay":
        when, how = rng.choice(("before", "half", "after")), rng.choice(("cut", "reset", "mute"))
        return Fault("worker", "relay", what, when, nth, how, saved=True)
    return Fault(party, point, what, when, nth, how, saved=True)
