"""Translate a worker's messages to the job's events, and the job's instructions to messages.

Most events and instructions have the fields of a message. Events and instructions of a worker also name a connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgspec

from paceline.job import events, instructions
from paceline.job.identity import identity_of
from paceline.serve.wire import messages
from paceline.serve.wire.messages import Message

#: The event for each message that a member may send.
EVENTS: dict[type, Callable[..., events.Event]] = {
    messages.RequestSamples: events.SamplesRequested,
    messages.GradientStarted: events.GradientBegun,
    messages.GradientReady: events.GradientComputed,
    messages.ReportMetric: events.MetricReported,
    messages.FinishTraining: events.WorkerFinished,
    messages.Heartbeat: events.WorkerAlive,
    messages.Leave: events.WorkerLeft,
}


def event_of(message: Any, connection: int) -> events.Event | None:
    """The event for a worker's message, or None if a member may not send that message."""
    kind = EVENTS.get(type(message))
    return kind(connection, *msgspec.structs.astuple(message)) if kind else None


def _copy(kind: type, message: type[Message]) -> Callable[[Any], Message]:
    """A function that copies an instruction's fields into a message, except for the connection."""
    names = [field.name for field in fields(kind) if field.name != "to"]
    if not names:
        return lambda _: message()
    if len(names) == 1:
        only = attrgetter(names[0])
        return lambda instruction: message(only(instruction))
    several = attrgetter(*names)
    return lambda instruction: message(*several(instruction))


def _apply(apply: instructions.OrderApply) -> Message:
    decision = apply.decision
    updates = tuple([identity_of(update) for update in decision.updates])
    weights, mix, sums = decision.weights, decision.mix, decision.sums
    return messages.ApplyUpdates(apply.version, updates, weights, mix, apply.turns, apply.compare, sums)


def _keep(keep: instructions.OrderKeep) -> Message:
    return messages.KeepUpdate(identity_of(keep.decision.update), keep.decision.slot)


def _copies(pairs: dict[type, type[Message]]) -> dict[type, Callable[[Any], Message]]:
    return {kind: _copy(kind, message) for kind, message in pairs.items()}


#: Instructions that are sent to one worker.
TO_WORKER = _copies(
    {
        instructions.SendResumed: messages.Resumed,
        instructions.SendRefused: messages.Refused,
        instructions.SendExpelled: messages.Expelled,
        instructions.SendWeightsRequest: messages.ProvideWeights,
        instructions.SendGrant: messages.GrantIteration,
        instructions.SendPushNow: messages.PushNow,
        instructions.SendCancel: messages.CancelIteration,
        instructions.SendSamples: messages.SampleRange,
        instructions.SendExcluded: messages.Excluded,
        instructions.SendFinished: messages.TrainingFinished,
        instructions.SendHeartbeat: messages.Heartbeat,
        instructions.SendLeave: messages.Leave,
    }
)
#: Instructions that are sent to all shards.
TO_SHARDS = _copies(
    {
        instructions.OrderInitialWeights: messages.InitialWeightsFrom,
        instructions.OrderStream: messages.StreamUpdates,
        instructions.OrderAdd: messages.AddToSum,
        instructions.OrderFence: messages.Fence,
    }
) | {
    instructions.OrderApply: _apply,
    instructions.OrderDiscard: lambda discard: messages.DropUpdate(identity_of(discard.decision.update)),
    instructions.OrderKeep: _keep,
}
#: The driver closes a worker's connection after these.
LAST_WORDS = frozenset({instructions.SendRefused, instructions.SendExpelled, instructions.SendLeave})
