"""Streamed updates at a shard: the connection that pieces are returned over, and updates that wait for others."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.slice import Slice
from paceline.serve.shard.store import HeldUpdate
from paceline.serve.shard.streamed_store import StreamedStore
from paceline.serve.shard.streamed_updates import StreamedUpdates
from paceline.serve.wire.messages import Hello, Identity, StreamUpdates, UpdatedPiece, UpdateHeld, UpdateReceived

UPDATE = Identity(worker=3, incarnation=1, iteration=1)
HELLO = Hello(UPDATE.worker, UPDATE.incarnation, b"")


@dataclass(eq=False)
class Connection:
    """Stands for a connection of the worker, and keeps what is sent over it."""

    number: int
    channel: object = field(default_factory=object)
    sent: list[Any] = field(default_factory=list)

    def send_weights(self, message: Any, _weights: Any, _on_sent: Any = None) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1)], ids=["threads in order", "the older thread begins last"])
@pytest.mark.parametrize("older_ends", [False, True])
def test_an_updated_piece_is_returned_over_the_newest_connection(numbers: tuple[int, int], older_ends: bool) -> None:
    one_piece = Slice(Layout((Tensor("w", (3,)),)), 0, 3, OptimizerSpec("SGD", ({"lr": 1.0},)))
    updates = StreamedUpdates(StreamedStore([one_piece]), threading.Condition(), lambda _message: None)
    connections = {number: Connection(number) for number in numbers}
    for connection in connections.values():
        updates.connected(cast(Any, connection), HELLO)
    if older_ends:
        updates.disconnected(cast(Any, connections[1].channel), HELLO)
    updates.receive(UPDATE, 0, HeldUpdate(torch.ones(3), (1.0,)), None)
    updates.carry_out(StreamUpdates(1, (UPDATE,), (1.0,)))
    assert connections[2].sent == [UpdatedPiece(UPDATE.iteration, 0)]
    assert connections[1].sent == []


@pytest.mark.parametrize("order_comes", ["first", "last"])
def test_an_update_that_waits_for_another_is_reported_once_it_is_whole(order_comes: str) -> None:
    layout, optimizer = Layout((Tensor("w", (6,)),)), OptimizerSpec("SGD", ({"lr": 1.0},))
    told: list[Any] = []
    store = StreamedStore([Slice(layout, start, start + 3, optimizer) for start in (0, 3)])
    updates = StreamedUpdates(store, threading.Condition(), told.append)
    other = Identity(worker=4, incarnation=1, iteration=1)
    order = StreamUpdates(1, (UPDATE, other), (1.0, 1.0), report_held=True)

    def push(update: Identity, piece: int) -> None:
        updates.receive(update, piece, HeldUpdate(torch.ones(3), (1.0,)), None)

    if order_comes == "first":
        updates.carry_out(order)
    push(UPDATE, 0)
    assert told == []
    push(UPDATE, 1)
    if order_comes == "last":
        assert told == []
        updates.carry_out(order)
    assert told == [UpdateHeld(UPDATE)]
    push(other, 1)
    push(other, 0)
    assert told == [UpdateHeld(UPDATE), UpdateReceived(UPDATE), UpdateReceived(other)]
