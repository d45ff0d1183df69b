"""Replies that take long to arrive: nobody else waits for them, and none is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; `make test-flower` installs it")

from flwr.app import Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from on_flower.runs import VirtualRun, nodes_of
from on_flower.virtual import VirtualClock, VirtualGrid
from paceline.flower.reply_inbox import ReplyInbox
from paceline.observe.trace import Granted

TIMEOUT = 60.0  # seconds before a test gives up


class UploadingGrid(VirtualGrid):
    """A grid on which one node's replies arrive slowly: a call that has found one waits until the upload is over."""

    def __init__(self, clock: VirtualClock, nodes: Any, uploader: int) -> None:
        super().__init__(clock, nodes)
        self.uploader = nodes[uploader]
        self.uploaded = threading.Event()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        if any(reply.metadata.src_node_id == self.uploader.identity for reply in replies):
            assert self.uploaded.wait(TIMEOUT)
        return replies


@pytest.mark.parametrize("policy", ["asp", "fedbuff", "fl-r2sp:groups=4,fraction=1,patience=1"])
def test_nobody_waits_for_a_reply_that_is_still_on_its_way(policy: str) -> None:
    nodes = nodes_of()
    grid = UploadingGrid(VirtualClock(), nodes, uploader=0)
    run = VirtualRun(policy, nodes, grid=grid, threads=4)
    grid.clock.at(120.0, grid.uploaded.set)
    run.start(rounds=12)
    granted = [(event.worker, event.time) for event in run.events if isinstance(event, Granted)]
    others = [time for worker, time in granted if worker == 5 and 20 < time < 120]
    assert len(others) >= 3, "the others go on during the upload"
    assert max(time for worker, time in granted if worker == 0) > 120, "its reply counts in the end"


class ScriptedGrid:
    """A grid whose calls return what the test tells them to. The superlink forgets a message once it is pulled."""

    def __init__(self, *calls: Callable[[], list[Message]]) -> None:
        self._calls = list(calls)
        self.asked: list[list[str]] = []

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.asked.append(list(message_ids))
        return self._calls.pop(0)() if self._calls else []


def reply_to(message: str, failed: bool = False) -> Message:
    sent = Message(RecordDict(), 1, MessageType.TRAIN)
    sent.metadata.__dict__["_message_id"] = message
    return Message(Error(code=1, reason="there is no such message") if failed else RecordDict(), reply_to=sent)


def collected(inbox: ReplyInbox, messages: list[str]) -> list[str]:
    """Ask until something has come. Return the messages that were replied to, an error with an exclamation mark."""
    end = time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        if found := inbox.collect(messages):
            return [each.metadata.reply_to_message_id + "!" * each.has_error() for each in found]
    raise AssertionError("nothing came")


def test_an_error_counts_only_if_no_earlier_call_brings_the_reply() -> None:
    over = threading.Event()

    def slow() -> list[Message]:
        assert over.wait(TIMEOUT)
        return [reply_to("a")]

    grid = ScriptedGrid(slow, lambda: [reply_to("a", failed=True), reply_to("b")])
    inbox = ReplyInbox(cast(Grid, grid), threads=4)
    assert inbox.collect(["a", "b"]) == []
    assert collected(inbox, ["a", "b"]) == ["b"], "the error about a is not believed yet"
    inbox.collect(["a", "c"])
    assert grid.asked[-1] == ["c"], "it is not asked for again"
    over.set()
    assert collected(inbox, ["a", "c"]) == ["a"]


def test_an_error_that_no_call_refutes_is_a_reply() -> None:
    over = threading.Event()

    def slow() -> list[Message]:
        assert over.wait(TIMEOUT)
        return [reply_to("b")]

    grid = ScriptedGrid(slow, lambda: [reply_to("a", failed=True)])
    inbox = ReplyInbox(cast(Grid, grid), threads=4)
    assert inbox.collect(["a", "b"]) == []
    assert inbox.collect(["a", "b"]) == []
    over.set()
    assert collected(inbox, ["a", "b"]) == ["a!", "b"]


def test_no_more_calls_are_under_way_than_there_are_threads() -> None:
    over = threading.Event()

    def slow() -> list[Message]:
        assert over.wait(TIMEOUT)
        return []

    grid = ScriptedGrid(slow, slow)
    inbox = ReplyInbox(cast(Grid, grid), threads=2)
    for _ in range(5):
        assert inbox.collect(["a"]) == []
    assert len(grid.asked) == 2
    over.set()


def test_an_error_of_the_grid_reaches_the_run() -> None:
    def broken() -> list[Message]:
        raise ConnectionError("the superlink is gone")

    with pytest.raises(ConnectionError, match="superlink is gone"):
        ReplyInbox(cast(Grid, ScriptedGrid(broken)), threads=2).collect(["a"])
