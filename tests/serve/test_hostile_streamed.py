"""Hostile and broken peers where updates are streamed: each gets a clear error or is dropped, and nobody else notices.

As in `test_hostile.py`, two honest workers train all the while, and what they count in the end must be exact. What
attackers get applied is a gradient of zeros.
"""

from __future__ import annotations

import contextlib
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
    hears,
    is_dropped,
    is_refused,
    others_go_on,
    under_attack,
)

assert others_go_on  # it looks on here too
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


def leaves(channel: Channel) -> None:
    channel.send(Leave())
    hears(channel, Leave)


def takes(channel: Channel, kind: type) -> Any:
    """The next message of a kind, and its body is let go."""
    while not isinstance(message := channel.receive(lambda _message, size: memoryview(bytearray(size))), kind):
        pass
    return message


def returned(channel: Channel, iteration: int) -> list[int]:
    """The pieces of an update that come back, each for the first time."""
    pieces: set[int] = set()
    while len(pieces) < PIECES:
        message = takes(channel, UpdatedPiece)
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
def test_bad_pieces(target: Target, push: Push, fill: float, elements: int, why: str) -> None:
    """A good piece before it, in mid-push: nothing more of it is applied, and nobody waits for it."""
    channel, welcome, granted = target.member()
    channel.send(ready(welcome, granted))
    shard = target.at_shard(welcome)
    shard.send(Push(1, (1.0,), piece=0), body())
    assert takes(shard, UpdatedPiece) == UpdatedPiece(1, 0)
    shard.send(push, body(fill, elements))
    is_refused(shard, why)
    leaves(channel)


def test_a_piece_without_a_body(target: Target) -> None:
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(Push(1, (1.0,), piece=3))
    is_refused(shard, "must have a body")
    leaves(channel)


def test_pushed_before_anything_is_ordered_and_twice_over(target: Target) -> None:
    """The log has not named it yet, and some pieces come again over another connection: it counts once."""
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
    assert hears(channel, GrantIteration).iteration == 2
    for shard in shards:  # once more, when it is over: what there is comes back, and nothing is applied
        shard.send(Push(1, (1.0,), piece=4), body(-1000.0))
        assert takes(shard, UpdatedPiece).iteration == 1
    leaves(channel)


@pytest.mark.parametrize("iteration", [-1, 0, 2, 2**62])
def test_pieces_that_were_not_granted(target: Target, iteration: int) -> None:
    """The log never names them, so they are never applied."""
    channel, welcome, granted = target.member()
    for number in (0, 1):
        shard = target.at_shard(welcome, number)
        for piece in range(PIECES):
            shard.send(Push(iteration, (1.0,), piece=piece), body(-1000.0))
    channel.send(ready(welcome, granted))
    target.honest.goes_on()
    leaves(channel)


def test_one_who_leaves_in_mid_push(target: Target) -> None:
    channel, welcome, granted = target.member()
    channel.send(ready(welcome, granted))
    shard = target.at_shard(welcome)
    shard.send(Push(1, (1.0,), piece=0), body())
    leaves(channel)
    is_dropped(shard)


@pytest.mark.parametrize(
    "soon",
    [
        GradientStarted(2, 0, 1),
        GradientStarted(0, 0, 1),
        GradientStarted(1, 0, 0),
        GradientStarted(1, 2**62, 1),
        GradientStarted(1, -1, 1),
    ],
    ids=str,
)
def test_absurd_announcements(target: Target, soon: GradientStarted) -> None:
    channel, _, _ = target.member()
    channel.send(soon)
    is_refused(
        channel, "was not granted" if soon.iteration != 1 or soon.batch_size < 1 else "of a version that there was"
    )


def test_announced_and_never_ready(target: Target) -> None:
    """All of it is pushed and applied, but it does not count, since its worker does not say so."""
    channel, welcome, granted = target.member()
    for _ in range(2):  # said twice, as over a lost connection
        channel.send(GradientStarted(1, granted.version, 1))
    for number in (0, 1):
        shard = target.at_shard(welcome, number)
        for piece in range(PIECES):
            shard.send(Push(1, (1.0,), piece=piece), body())
        assert returned(shard, 1) == list(range(PIECES))
    leaves(channel)


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
def test_orders_from_a_worker(target: Target, message: Any) -> None:
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(message)
    is_refused(shard, "not taken here")
    leaves(channel)


def test_one_who_asks_where_nobody_need(target: Target) -> None:
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    for _ in range(3):
        shard.send(RequestPush())
        assert takes(shard, AllowPush) == AllowPush()
    leaves(channel)


def test_first_weights_that_nobody_asked_for(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.shard.shard.NAMING_SECONDS", 0.2)
    channel, welcome, _ = target.member()
    for piece, why in ((1, "was not asked"), (PIECES, "no number")):
        shard = target.at_shard(welcome)
        shard.send(InitialWeights(piece), body())
        is_refused(shard, why)
    leaves(channel)


def test_a_pull_of_a_version_to_come_is_answered_with_what_there_is(target: Target) -> None:
    """All that the coordinator counts is applied here already, so there is nothing to wait for."""
    channel, welcome, _ = target.member()
    shard = target.at_shard(welcome)
    shard.send(Pull(2**62))
    assert [takes(shard, Weights).piece for _ in range(PIECES)] == list(range(PIECES))
    leaves(channel)


@pytest.mark.parametrize("expected", [-1, MAX_STALENESS + 1, 10**9, 2**62])
def test_absurd_staleness(target: Target, expected: int) -> None:
    channel, welcome, granted = target.member()
    shard = target.at_shard(welcome)
    shard.send(Pull(granted.version, expected))
    is_refused(shard, f"0 to {MAX_STALENESS} versions stale, not {expected}")
    leaves(channel)


def test_one_who_pulls_and_pulls_and_does_not_read(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon nothing more is heard of it, so what waits for it is bounded."""
    push_order: list[WorkerConnection] = []

    class Seen(WorkerConnection):
        def run(self) -> None:
            push_order.append(self)
            super().run()

    channel, welcome, _ = target.member()
    monkeypatch.setattr("paceline.serve.shard.worker_listener.WorkerConnection", Seen)
    shard = target.at_shard(welcome)
    shard._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel holds little for it
    shard._socket.setblocking(False)
    bound, most, end = MAX_UNREAD * PIECES, 0, time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
            shard._socket.send(encode(Pull(0)) * 1000)
        most = max([most, *(visit._out.qsize() for visit in push_order)])
        if most > bound:  # all buffers are full; it must stay so
            end = min(end, time.monotonic() + 0.3)
            bound = SIZE**3
    assert MAX_UNREAD * PIECES < most <= (MAX_UNREAD + 1) * PIECES
    shard._socket.setblocking(True)
    shard.close()
    leaves(channel)
