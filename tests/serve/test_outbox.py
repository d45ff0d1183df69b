"""A session delivers each message once, in order, however often its connection is lost."""

from __future__ import annotations

import pytest

pytest.importorskip("msgspec")

from hypothesis import given
from hypothesis import strategies as st

from paceline.serve.wire.frames import WireError
from paceline.serve.wire.outbox import Outbox


class Side:
    """One side of a session: its outbox, the messages that it has received, and those on their way to it."""

    def __init__(self) -> None:
        self.outbox, self.received = Outbox(), list[int]()
        self.on_the_way: list[int] = []  # sent by the other side over the present connection


STEPS = st.sampled_from(["send", "arrive", "acknowledge", "lose"])


@given(st.lists(st.tuples(st.booleans(), STEPS), max_size=60))
def test_each_message_arrives_once_and_in_order(steps: list[tuple[bool, str]]) -> None:
    sides, is_connected = (Side(), Side()), True

    def reconnect() -> None:
        """Each side tells the other what it has received, and sends the rest again."""
        for here, there in (sides, sides[::-1]):
            here.outbox.acknowledge(len(there.received))
            there.on_the_way = [message for message, _ in here.outbox.unacknowledged()]

    for first, step in steps:
        here, there = sides if first else sides[::-1]
        if step == "send":
            here.outbox.add(here.outbox.sent)
            if is_connected:
                there.on_the_way.append(here.outbox.sent - 1)
        elif step == "arrive" and here.on_the_way:
            here.received.append(here.on_the_way.pop(0))
        elif step == "acknowledge" and is_connected:  # a heartbeat
            here.outbox.acknowledge(len(there.received))
        elif step == "lose":
            is_connected = not is_connected
            if is_connected:
                reconnect()
            else:
                here.on_the_way, there.on_the_way = [], []
    reconnect()
    for here, there in (sides, sides[::-1]):
        assert here.received + here.on_the_way == list(range(there.outbox.sent))


def test_what_is_acknowledged_is_forgotten() -> None:
    outbox = Outbox()
    for message in "abc":
        outbox.add(message, b"body")
    outbox.acknowledge(2)
    outbox.acknowledge(1)  # late
    assert outbox.unacknowledged() == [("c", b"body")]


def test_a_peer_cannot_have_received_more_than_was_sent() -> None:
    outbox = Outbox()
    outbox.add("a")
    with pytest.raises(WireError, match="only 1"):
        outbox.acknowledge(2)
