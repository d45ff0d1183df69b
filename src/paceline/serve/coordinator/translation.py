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

#: The event for each message that a worker may send after it has joined.
EVENTS: dict[type, Callable[..., events.Event]] = {
    messages.OfferWeights: events.WeightsOffered,
    messages.RequestSamples: events.SamplesRequested,
    messages.GradientStarted: events.GradientBegun,
    messages.GradientReady: events.GradientComputed,
    messages.EndVisit: events.VisitEnded,
    messages.ReportMetric: events.MetricReported,
    messages.FinishTraining: events.WorkerFinished,
    messages.Heartbeat: events.WorkerAlive,
    messages.Leave: events.WorkerLeft,
}


def event_of(message: Any, connection: int) -> events.Event | None:
    """Return the event for a worker's message, or None if a worker may not send that message after it has joined."""
    kind = EVENTS.get(type(message))
    return kind(connection, *msgspec.structs.astuple(message)) if kind else None


def _field_copier(kind: type, message: type[Message]) -> Callable[[Any], Message]:
    """Return a function that copies an instruction's fields into a message, except for the connection."""
    names = [field.name for field in fields(kind) if field.name != "to"]
    if not names:
        return lambda _: message()
    if len(names) == 1:
        only = attrgetter(names[0])
        return lambda instruction: message(only(instruction))
    several = attrgetter(*names)
    return lambda instruction: message(*several(instruction))


def _apply_updates(apply: instructions.OrderApply) -> Message:
    decision = apply.decision
    updates = tuple([identity_of(update) for update in decision.updates])
    weights, mix, sums = decision.weights, decision.mix, decision.sums
    how = (mix, apply.turns, apply.compare, sums, apply.clips)
    return messages.ApplyUpdates(apply.version, updates, weights, *how)


def _keep_update(keep: instructions.OrderKeep) -> Message:
    return messages.KeepUpdate(identity_of(keep.decision.update), keep.decision.slot)


def _field_copiers(pairs: dict[type, type[Message]]) -> dict[type, Callable[[Any], Message]]:
    return {kind: _field_copier(kind, message) for kind, message in pairs.items()}


#: How to make the message from an instruction that goes to one worker.
TO_WORKER = _field_copiers(
    {
        instructions.SendResumed: messages.Resumed,
        instructions.SendRefused: messages.Refused,
        instructions.SendExpelled: messages.Expelled,
        instructions.SendWeightsRequest: messages.ProvideWeights,
        instructions.SendWeightsKept: messages.KeepWeights,
        instructions.SendGrant: messages.GrantIteration,
        instructions.SendPushNow: messages.PushNow,
        instructions.SendVisit: messages.VisitShard,
        instructions.SendCancel: messages.CancelIteration,
        instructions.SendSamples: messages.SampleRange,
        instructions.SendExcluded: messages.Excluded,
        instructions.SendFinished: messages.TrainingFinished,
        instructions.SendHeartbeat: messages.Heartbeat,
        instructions.SendLeave: messages.Leave,
    }
)
#: How to make the message from an instruction that goes to all shards.
TO_SHARDS = _field_copiers(
    {
        instructions.OrderInitialWeights: messages.InitialWeightsFrom,
        instructions.OrderStream: messages.StreamUpdates,
        instructions.OrderAdd: messages.AddToSum,
        instructions.OrderFence: messages.Fence,
    }
) | {
    instructions.OrderApply: _apply_updates,
    instructions.OrderDiscard: lambda discard: messages.DropUpdate(identity_of(discard.decision.update)),
    instructions.OrderKeep: _keep_update,
}
#: The coordinator closes a worker's connection after these.
CLOSES_CONNECTION = frozenset({instructions.SendRefused, instructions.SendExpelled, instructions.SendLeave})
