"""Hostile and broken peers attack a job whose updates are streamed. No other peer is affected.

As in `test_hostile.py`, two honest workers train all the while, and the final weights must equal the number of their
updates. So the updates that an attacker is allowed to make are gradients of zeros.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.job.saving import MAX_STALENESS
from paceline.serve.shard.worker_connection import MAX_UNREAD, WorkerConnection
from paceline.serve.wire.frames import Channel, encode
from paceline.serve.wire.messages import (
    AllowPush,
    DropUpdate,
    Fence,
    GradientReady,
    GradientStarted,
    GrantIteration,
    Identity,
    InitialWeights,
    Leave,
    Pull,
    Push,
    RequestPush,
    StreamUpdates,
    UpdatedPiece,
    Weights,
    Welcome,
)
from serve.test_hostile import (
    PATIENCE,
    SIZE,
    Target,
    assert_dropped,
    assert_refused,
    honest_workers_continue,
    receive_until,
    under_attack,
)

assert honest_workers_continue  # a fixture that runs here, too
PIECES = 8  # of each of two shards
EACH = SIZE // 2 // PIECES


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 1)
        with under_attack(streamed=True) as attacked:
            yield attacked


def body(fill: float = 0.0, elements: int = EACH) -> memoryview:
    return np.full(elements, fill, dtype=np.float32).data.cast("B")


def leave(channel: Channel) -> None:
    channel.send(Leave())
    receive_until(channel, Leave)


def receive(channel: Channel, kind: type) -> Any:
    """Return the next message of this kind, without its body."""
    while not isinstance(message := channel.receive(lambda _message, size: memoryview(bytearray(size))), kind):
        pass
    return message


def returned(channel: Channel, iteration: int) -> list[int]:
    """Wait until all pieces of an update have been returned. Return their numbers."""
    pieces: set[int] = set()
    while len(pieces) < PIECES:
        message = receive(channel, UpdatedPiece)
        assert message.iteration == iteration
        pieces.add(message.piece)
    return sorted(pieces)


def ready(welcome: Welcome, granted: GrantIteration) -> GradientReady:
    assert welcome.streamed
    return GradientReady(granted.iteration, granted.version, 1, 0.01, None)


@pytest.mark.parametrize(
    ("push", "fill", "elements", "why"),
    [
        (Push(1, (1.0,), piece=PIECES), 0.0, EACH, f"There are {PIECES} pieces here, and no number {PIECES}"),
        (Push(1, (1.0,), piece=-1), 0.0, EACH, "no number -1"),
        (Push(1, (1.0,), piece=2**62), 0.0, EACH, "no number"),
        (Push(1, (1.0,), piece=1), 0.0, EACH - 1, "bytes"),
        (Push(1, (1.0,), piece=1), 0.0, EACH * PIECES, "bytes"),
        (Push(1, (1.0,), "float64", piece=1), 0.0, EACH, "is sent as"),
        (Push(1, (1.0, 1.0), piece=1), 0.0, EACH, "learning rates"),
        (Push(1, (float("nan"),), piece=1), 0.0, EACH, "learning rates"),
        (Push(1, (1.0,), piece=1), float("nan"), EACH, "NaN"),
        (Push(1, (1.0,), piece=1), float("-inf"), EACH, "NaN or infinity"),
    ],
    ids=[
        *("one-too-many", "negative", "far-beyond", "too-few", "the-whole-part", "float64"),
        *("two-rates", "nan-rate", "nan", "infinity"),
    ],
)
def test_bad_pieces_are_refused(target: Target, push: Push, fill: float, elements: int, why: str) -> None:
    """A good piece was applied before. Nothing more of the update is applied, and no worker waits for it."""
    channel, welcome, granted = target.member()
    channel.send(ready(welcome, granted))
    shard = target.at_shard(welcome)
    shard.send(Push(1, (1.0,), piece=0), body())
    assert receive(shard, UpdatedPiece) == UpdatedPiece(1, 0)
    shard.send(push, body(fill, elements))
    assert_refused(shard, why)
    leave(channel)


def test_a_piece_without_a_body_is_refused(target: Target) -> None:
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(Push(1, (1.0,), piece=3))
    assert_refused(shard, "must have a body")
    leave(channel)


def test_pieces_that_arrive_early_and_twice_count_once(target: Target) -> None:
    """They arrive before the log names their update, and again over another connection."""
    channel, welcome, granted = target.member()
    first = [target.at_shard(welcome, number) for number in (0, 1)]
    for shard in first:
        for piece in (0, 1, 1, 5):
            shard.send(Push(1, (1.0,), piece=piece), body())
    shards = [target.at_shard(welcome, number) for number in (0, 1)]
    for shard in shards:
        for piece in (*range(PIECES), 2, 2, 0):
            shard.send(Push(1, (1.0,), piece=piece), body())
    channel.send(ready(welcome, granted))
    for shard in shards:
        assert returned(shard, 1) == list(range(PIECES))
    assert receive_until(channel, GrantIteration).iteration == 2
    for shard in shards:  # once more, after the update: the piece is returned as it is, and nothing is applied
        shard.send(Push(1, (1.0,), piece=4), body(-1000.0))
        assert receive(shard, UpdatedPiece).iteration == 1
    leave(channel)


@pytest.mark.parametrize("iteration", [-1, 0, 2, 2**62])
def test_pieces_that_were_not_granted_are_not_applied(target: Target, iteration: int) -> None:
    """The log never names their update."""
    channel, welcome, granted = target.member()
    for number in (0, 1):
        shard = target.at_shard(welcome, number)
        for piece in range(PIECES):
            shard.send(Push(iteration, (1.0,), piece=piece), body(-1000.0))
    channel.send(ready(welcome, granted))
    target.honest.assert_progress()
    leave(channel)


def test_a_worker_that_leaves_during_a_push_is_dropped(target: Target) -> None:
    channel, welcome, granted = target.member()
    channel.send(ready(welcome, granted))
    shard = target.at_shard(welcome)
    shard.send(Push(1, (1.0,), piece=0), body())
    leave(channel)
    assert_dropped(shard)


@pytest.mark.parametrize(
    "started",
    [
        GradientStarted(2, 0, 1),
        GradientStarted(0, 0, 1),
        GradientStarted(1, 0, 0),
        GradientStarted(1, 2**62, 1),
        GradientStarted(1, -1, 1),
    ],
    ids=str,
)
def test_an_absurd_gradient_started_is_refused(target: Target, started: GradientStarted) -> None:
    channel, _, _ = target.member()
    channel.send(started)
    assert_refused(
        channel, "was not granted" if started.iteration != 1 or started.batch_size < 1 else "There is no version"
    )


def test_an_update_without_gradient_ready_does_not_count(target: Target) -> None:
    """All its pieces are pushed and applied, but its worker never sends GradientReady."""
    channel, welcome, granted = target.member()
    for _ in range(2):  # repeated, as after a lost connection
        channel.send(GradientStarted(1, granted.version, 1))
    for number in (0, 1):
        shard = target.at_shard(welcome, number)
        for piece in range(PIECES):
            shard.send(Push(1, (1.0,), piece=piece), body())
        assert returned(shard, 1) == list(range(PIECES))
    leave(channel)


@pytest.mark.parametrize(
    "message",
    [
        StreamUpdates(10**9, (Identity(0, 1, 1),), (1.0,)),
        DropUpdate(Identity(0, 1, 1)),
        Fence(0, 10**9),
        UpdatedPiece(1, 0),
        AllowPush(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_worker_cannot_give_orders_to_a_shard(target: Target, message: Any) -> None:
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(message)
    assert_refused(shard, "not accepted here")
    leave(channel)


def test_request_push_is_answered_even_where_it_is_not_needed(target: Target) -> None:
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    for _ in range(3):
        shard.send(RequestPush())
        assert receive(shard, AllowPush) == AllowPush()
    leave(channel)


def test_unrequested_initial_weights_are_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.shard.shard.NAMING_SECONDS", 0.2)
    channel, welcome, _ = target.member()
    for piece, why in ((1, "was not asked"), (PIECES, "no number")):
        shard = target.at_shard(welcome)
        shard.send(InitialWeights(piece), body())
        assert_refused(shard, why)
    leave(channel)


def test_a_pull_of_a_future_version_is_answered_at_once(target: Target) -> None:
    """Every update that the coordinator counts is applied already, so there is nothing to wait for."""
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(Pull(2**62))
    assert [receive(shard, Weights).piece for _ in range(PIECES)] == list(range(PIECES))
    leave(channel)


@pytest.mark.parametrize("expected", [-1, MAX_STALENESS + 1, 10**9, 2**62])
def test_an_absurd_expected_staleness_is_refused(target: Target, expected: int) -> None:
    channel, welcome, granted = target.member()
    shard = target.at_shard(welcome)
    shard.send(Pull(granted.version, expected))
    assert_refused(shard, f"0 to {MAX_STALENESS} versions stale, not {expected}")
    leave(channel)


def test_a_worker_that_pulls_and_does_not_read_is_not_served_further(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shard stops reading from it, so the answers that wait for it are bounded."""
    connections: list[WorkerConnection] = []

    class Recorded(WorkerConnection):
        def run(self) -> None:
            self.channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # so that the kernel buffers little
            connections.append(self)
            super().run()

    channel, welcome, _ = target.member()
    monkeypatch.setattr("paceline.serve.shard.worker_listener.WorkerConnection", Recorded)
    shard = target.at_shard(welcome)
    shard._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # so that the kernel buffers little
    shard._socket.setblocking(False)
    bound, most, end = MAX_UNREAD * PIECES, 0, time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            shard._socket.send(encode(Pull(0)) * 1000)
        except BlockingIOError:
            time.sleep(0.001)  # the shard's threads run in this process too
        most = max([most, *(connection._out.qsize() for connection in connections)])
        if most > bound:  # all buffers are full, and the queue must not grow any more
            end = min(end, time.monotonic() + 0.3)
            bound = SIZE**3
    assert MAX_UNREAD * PIECES < most <= (MAX_UNREAD + 1) * PIECES
    shard._socket.setblocking(True)
    shard.close()
    leave(channel)
