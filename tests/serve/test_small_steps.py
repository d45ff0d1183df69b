"""What keeps small steps cheap: few messages, no waiting for samples, no CPU time spent on waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from observe.test_trace import ONE_OF_EACH
from paceline.observe.trace import Event, Pulling
from paceline.serve.coordinator.subscribers import MAX_BYTES, Subscribers
from paceline.serve.coordinator.timer import Timer
from paceline.serve.environment import LINK, address
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.frames import Channel
from paceline.serve.wire.link import EmulatedLinks
from paceline.serve.wire.messages import TraceEvents, Welcome
from paceline.serve.wire.packed_events import pack, unpack
from paceline.serve.wire.transfer_messages import NEARLY_DONE
from paceline.serve.worker.client import Client
from paceline.serve.worker.endings import Ending
from paceline.serve.worker.shard_link import ShardLink
from paceline.serve.worker.transfers import Transfers
from serve.workers import described
from train.jobs import job

LARGE = NEARLY_DONE // 4 + 1  # elements of a push that is not short


def test_a_timer_takes_no_cpu_time_while_it_waits() -> None:
    async def spent() -> float:
        fired = asyncio.Event()
        timer = Timer(asyncio.get_running_loop(), fired.set)
        before = time.process_time()
        for _ in range(100):
            fired.clear()
            timer.set(time.monotonic() + 0.0015)
            await fired.wait()
        timer.close()
        return time.process_time() - before

    assert asyncio.run(spent()) < 0.03, "a timer that polls the clock spends a third of its 0.15 s"


class Peer:
    """A subscriber's connection that keeps what is sent over it."""

    def __init__(self) -> None:
        self.sent: list[TraceEvents] = []
        self.hung_up = asyncio.Event()

    def send(self, message: TraceEvents) -> None:
        self.sent.append(message)

    async def receive(self) -> None:
        await self.hung_up.wait()
        raise ConnectionError

    @property
    def events(self) -> list[Event]:
        return [unpack(packed) for message in self.sent for packed in message.events]


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: type(event).__name__)
def test_an_event_can_be_unpacked(event: Event) -> None:
    again = unpack(pack(event))
    assert again == event
    assert type(again) is type(event)


def test_events_are_collected_and_sent_together_in_order() -> None:
    async def collect() -> None:
        subscribers, first, late = Subscribers(), Peer(), Peer()
        serving = [asyncio.create_task(subscribers.serve(first, []))]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        many = [Pulling(float(time), 0) for time in range(2000)]
        for event in many:
            subscribers.broadcast(event)
        subscribers.flush()
        assert first.events == many
        assert len(first.sent) < 10
        assert max(sum(len(fields) for _, fields in message.events) for message in first.sent) <= MAX_BYTES
        subscribers.broadcast(many[0])
        serving.append(asyncio.create_task(subscribers.serve(late, [])))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert first.events == [*many, many[0]], "a new subscriber must not receive earlier events"
        subscribers.broadcast(many[1])
        await asyncio.sleep(0.3)
        assert late.events == [many[1]], "collected events are sent soon"
        for peer in (first, late):
            peer.hung_up.set()
        await asyncio.gather(*serving, return_exceptions=True)

    asyncio.run(collect())


def messages_of(policy: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Train with two workers. Return the names of the messages that each of their threads sent, in order."""
    sent: dict[int, list[str]] = {}
    send = Channel.send

    def note(channel: Channel, message: Any, body: memoryview | None = None) -> None:
        sent.setdefault(threading.get_ident(), []).append(type(message).__name__)
        send(channel, message, body)

    monkeypatch.setattr(Channel, "send", note)

    def run(where: str) -> int:
        weights, gradient = np.zeros(elements, np.float32), np.ones(elements, np.float32)
        client = Client(address(where), described(elements))
        client.begin(weights.data.cast("B"))
        taken = 0
        while (given := client.take(2, 40, 2)).start < given.stop:
            taken += given.stop - given.start
            client.exchange(
                gradient.data.cast("B"), weights.data.cast("B"), batch_size=2, rates=(1.0,), taken=[given.number]
            )
        assert client.finish(weights.data.cast("B"))
        client.close()
        return taken

    with job(policy, shards=1, workers=2) as running:
        assert sum(running.work(*[run] * 2)) == 80, "each sample is taken once an epoch"
        running.finish()
    return [names for names in sent.values() if "Pull" in names]


def test_a_worker_does_not_ask_for_its_turn_on_a_link_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Counter(name for names in messages_of("r2sp:patience=1000", LARGE, monkeypatch) for name in names)
    assert sent["Push"] == 40
    assert sent["RequestPush"] == 0


@pytest.mark.parametrize(
    ("host", "size", "is_emulated", "asks"),
    [
        ("10.0.0.2", NEARLY_DONE + 1, False, True),
        ("10.0.0.2", NEARLY_DONE, False, False),
        ("127.0.0.1", NEARLY_DONE + 1, False, False),
        ("::1", NEARLY_DONE + 1, False, False),
        ("127.0.0.1", NEARLY_DONE + 1, True, True),
    ],
)
def test_a_push_that_shares_a_link_takes_turns(
    host: str, size: int, is_emulated: bool, asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_emulated:
        EmulatedLinks.create(tmp_path / "links", 1e6, workers=1, servers=1)
        monkeypatch.setenv(LINK, str(tmp_path / "links"))
    else:
        monkeypatch.delenv(LINK, raising=False)
    welcome = Welcome(0, 1, ((host, 1, ((0, 1),)),), 30.0, False, b"")
    transfers = Transfers(Endpoint("127.0.0.1", 1), welcome, "", 1.0, Ending())
    assert transfers._shares_link(ShardLink(0, Endpoint(host, 1), ((0, 1),)), size) is asks


def test_samples_are_requested_before_the_pull_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in messages_of("asp", 100, monkeypatch):
        pushes = [at for at, name in enumerate(names) if name == "Push"]
        for at in pushes:
            assert names[at + 1 : at + 3] == ["RequestSamples", "Pull"], "the samples arrive during the pull"
        assert not pushes or names.count("RequestSamples") == len(pushes) + 2, (
            "the first one, and one to be sure that none are left"
        )
