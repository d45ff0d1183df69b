"""Watching a job from outside."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("torch")

from paceline.observe.events import Began, Event
from paceline.serve.door import Door
from paceline.serve.variables import address
from paceline.serve.watch import watch
from serve.workers import work
from train.jobs import job


def test_a_subscriber_is_told_all_that_the_trace_says() -> None:
    seen: list[Event] = []
    subscribed = threading.Event()

    async def look(door: Door) -> None:
        async for event in watch(door):
            seen.append(event)
            subscribed.set()

    with job("ssp", shards=1, workers=2, token=b"secret") as running:
        door = Door(*address(running.address), token=b"secret")
        watching = threading.Thread(target=lambda: asyncio.run(look(door)))
        watching.start()
        assert subscribed.wait(20.0)
        running.work(*[lambda where: work(where, 40, token=b"secret")] * 2)
        running.finish()
    watching.join(20.0)
    assert isinstance(seen[0], Began)
    assert seen[0].policy == "ssp"
    assert seen[1:] == running.events


def test_a_stranger_may_not_watch() -> None:
    async def look(door: Door) -> None:
        async for _ in watch(door):
            raise AssertionError("something was told")

    with job("asp", token=b"secret") as running:
        door = Door(*address(running.address), token=b"guess")
        with pytest.raises(ConnectionError, match="token is wrong"):
            asyncio.run(look(door))
