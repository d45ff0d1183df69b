"""Watching a job from outside, as a subscriber."""

from __future__ import annotations

import asyncio
import io
import threading
import time

import pytest

pytest.importorskip("torch")

from paceline.observe.live_state import Live
from paceline.observe.observer import Tee, replay
from paceline.observe.perfetto import write
from paceline.observe.summary import Summary
from paceline.observe.trace import Applied, Began, Event, Joined
from paceline.serve.environment import address
from paceline.serve.watch import watch
from paceline.serve.wire.endpoint import Endpoint
from serve.workers import work
from train.jobs import job


def test_a_subscriber_receives_every_trace_event() -> None:
    seen: list[Event] = []
    subscribed = threading.Event()

    async def collect(endpoint: Endpoint) -> None:
        async for event in watch(endpoint):
            seen.append(event)
            subscribed.set()

    with job("ssp", shards=1, workers=2, token=b"secret") as running:
        endpoint = Endpoint(*address(running.address), token=b"secret")
        watching = threading.Thread(target=lambda: asyncio.run(collect(endpoint)))
        watching.start()
        assert subscribed.wait(20.0)
        running.work(*[lambda where: work(where, 40, token=b"secret")] * 2)
        running.finish()
    watching.join(20.0)
    assert isinstance(seen[0], Began)
    assert seen[0].policy == "ssp"
    assert seen[1][1:] == (0, 2), "two workers are awaited"
    assert seen[2:] == running.events


@pytest.mark.slow
def test_a_late_subscriber_learns_which_workers_there_are() -> None:
    """Then a summary, the live table and a Perfetto trace can be made from the events that it receives."""
    seen: list[Event] = []

    async def collect(endpoint: Endpoint) -> None:
        seen.extend([event async for event in watch(endpoint)])

    def watch_later(where: str) -> float:
        end = time.monotonic() + 30.0
        while sum(isinstance(event, Applied) for event in list(running.events)) < 20:
            assert time.monotonic() < end, "no update is applied"
            time.sleep(0.002)
        watching.start()
        return 0.0

    with job("r2sp", shards=1, workers=2) as running:
        endpoint = Endpoint(*address(running.address))
        watching = threading.Thread(target=lambda: asyncio.run(collect(endpoint)))
        running.work(watch_later, *[lambda where: work(where, 4000)] * 2)
        running.finish()
    watching.join(20.0)
    assert {event.worker for event in seen[:8] if isinstance(event, Joined)} == {0, 1}
    summary, live = Summary(), Live()
    replay(seen, Tee(summary, live))
    assert 0 < summary.report().updates == live.updates < 1000
    write(seen, io.StringIO())


def test_an_observer_without_the_token_is_refused() -> None:
    async def collect(endpoint: Endpoint) -> None:
        async for _ in watch(endpoint):
            raise AssertionError("an event was sent")

    with job("asp", token=b"secret") as running:
        endpoint = Endpoint(*address(running.address), token=b"guess")
        with pytest.raises(ConnectionError, match="token is wrong"):
            asyncio.run(collect(endpoint))
