"""The messages between an observer, such as `paceline watch`, and the coordinator."""

from __future__ import annotations

from paceline.serve.wire.message_base import Message


class Subscribe(Message, frozen=True):
    """An observer sends this to the coordinator, which sends it every trace event from then on, in TraceEvents."""


class TraceEvents(Message, frozen=True):
    """The coordinator sends this to every subscriber. The subscriber reads the newest trace events from it."""

    events: tuple[tuple[str, bytes], ...]  # the name of each event, and its fields as a MessagePack array


class InspectExclusions(Message, frozen=True):
    """An observer sends this to the coordinator to ask which workers the policy leaves out.

    The coordinator readmits the named workers and answers with Exclusions.
    """

    pardon: tuple[int, ...] = ()  # workers to readmit
    everyone: bool = False  # readmit all of them?


class Exclusions(Message, frozen=True):
    """The coordinator sends this to an observer in answer to InspectExclusions. The observer reports it to its user."""

    filters: bool  # does the policy exclude workers at all?
    blacklist: tuple[tuple[int, tuple[float, ...]], ...]  # each excluded worker, and the cosines that led to it
    pardoned: tuple[int, ...]  # the workers that were readmitted now
