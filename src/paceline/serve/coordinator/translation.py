"""Between the wire and the job: a worker's messages as events, and instructions as messages.

Most of them have the same names and fields on both sides. An event has its connection in front.
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

#: A worker's messages that are events as they are.
EVENTS: dict[type, Callable[..., events.Event]] = {
    messages.Want: events.Want,
    messages.Soon: events.Soon,
    messages.Ready: events.Ready,
    messages.Measured: events.Measured,
    messages.Finish: events.Finish,
    messages.Beat: events.Beat,
    messages.Leave: events.Leave,
}


def event_of(message: Any, connection: int) -> events.Event | None:
    """The event that a worker's message is; None if a worker may not say that once it takes part."""
    kind = EVENTS.get(type(message))
    return kind(connection, *msgspec.structs.astuple(message)) if kind else None


def _as_it_is(kind: type, message: type[Message]) -> Callable[[Any], Message]:
    """How an instruction becomes the message with the same fields, but for the connection in front."""
    names = [field.name for field in fields(kind) if field.name != "to"]
    if not names:
        return lambda _: message()
    if len(names) == 1:
        only = attrgetter(names[0])
        return lambda instruction: message(only(instruction))
    several = attrgetter(*names)
    return lambda instruction: message(*several(instruction))


def _apply(apply: instructions.Apply) -> Message:
    decision = apply.decision
    updates = tuple([identity_of(update) for update in decision.updates])
    weights, mix, sums = decision.weights, decision.mix, decision.sums
    return messages.Apply(apply.version, updates, weights, mix, apply.turns, apply.compare, sums)


def _keep(keep: instructions.Keep) -> Message:
    return messages.Keep(identity_of(keep.decision.update), keep.decision.slot)


def _same(*kinds: type) -> dict[type, Callable[[Any], Message]]:
    return {kind: _as_it_is(kind, getattr(messages, kind.__name__)) for kind in kinds}


#: Instructions that are sent to one worker.
TO_WORKER = _same(
    instructions.Resumed,
    instructions.Refused,
    instructions.Expelled,
    instructions.Give,
    instructions.Granted,
    instructions.Turned,
    instructions.Cancelled,
    instructions.Given,
    instructions.Barred,
    instructions.Finished,
    instructions.Beat,
    instructions.Leave,
)
#: Instructions that are sent to all shards.
TO_SHARDS = _same(instructions.Giver, instructions.Stream, instructions.Add, instructions.Fence) | {
    instructions.Apply: _apply,
    instructions.Discard: lambda discard: messages.Drop(identity_of(discard.decision.update)),
    instructions.Keep: _keep,
}
#: After these a worker's connection is closed.
LAST_WORDS = frozenset({instructions.Refused, instructions.Expelled, instructions.Leave})
