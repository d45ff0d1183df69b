"""Flower's messages: the parts of a reply that paceline reads, and the replies that it gives to a strategy."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from numpy.typing import NDArray

from paceline.flower.global_model import Arrays, WeighedModel

EXAMPLES = "num-examples"  # the metric that FedAvg weighs by, unless it is told another one
SECONDS = "compute-seconds"  # the metric in which a node may say how long it has trained
LOSSES = ("train_loss", "train-loss", "loss")  # metrics that hold the loss, if a node reports it


@dataclass(frozen=True)
class ReadReply:
    """The content of a reply."""

    arrays: dict[str, NDArray[Any]]
    examples: float
    seconds: float | None  # that the node has trained, if it says so
    loss: float | None


def to_arrays(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return the arrays of a record."""
    return {name: array.numpy() for name, array in record.items()}


def to_record(arrays: Arrays) -> ArrayRecord:
    """Return arrays as a record."""
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def read_reply(message: Message, weighted_by: str) -> ReadReply | str:
    """Return the content of a reply, or a sentence that says why it cannot be used."""
    if message.has_error():
        return f"it failed: {message.error.reason or 'it gave no reason'}"
    arrays, metrics = list(message.content.array_records.values()), list(message.content.metric_records.values())
    if len(arrays) != 1 or len(metrics) != 1:
        return f"its reply has {len(arrays)} ArrayRecords and {len(metrics)} MetricRecords instead of one each"
    examples = _number(metrics[0], weighted_by)
    if examples is None or examples <= 0:
        return f"its reply has no metric {weighted_by!r} above 0"
    loss = next((value for name in LOSSES if (value := _number(metrics[0], name)) is not None), None)
    seconds = _number(metrics[0], SECONDS)
    return ReadReply(to_arrays(arrays[0]), examples, seconds if seconds and seconds > 0 else None, loss)


def train_message(content: RecordDict, node: int, server_round: int, seconds: float) -> Message:
    """Return the message that asks a node to train. It is void after so many seconds."""
    return Message(content, node, MessageType.TRAIN, ttl=seconds, group_id=str(server_round))


def as_reply(model: WeighedModel[Message], weighted_by: str, total: float) -> Message:
    """Return a reply for a strategy to average: a copy of the original one with another model and weight.

    total: the examples of all replies that are averaged together. The weights are shares of them.
    """
    content = RecordDict()
    for name, record in model.origin.content.items():
        if isinstance(record, ArrayRecord):
            content[name] = to_record(model.arrays)
        elif isinstance(record, MetricRecord):
            content[name] = MetricRecord(dict(record) | {weighted_by: model.weight * total})
        else:
            content[name] = record
    reply = copy.copy(model.origin)
    reply.content = content
    return reply


def _number(metrics: MetricRecord, name: str) -> float | None:
    """Return a metric that is one finite number, or None."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
