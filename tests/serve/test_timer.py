"""An alarm: it rings once, and on time."""

from __future__ import annotations

import asyncio
import time

from paceline.serve.coordinator.timer import Timer


def test_an_alarm_rings_once_at_the_moment_that_was_set_last_and_never_before() -> None:
    async def rings() -> list[float]:
        heard: list[float] = []
        timer = Timer(asyncio.get_running_loop(), lambda: heard.append(time.monotonic()))
        moments = []
        for pause in (0.0123, 0.0004, -1.0):
            timer.set(time.monotonic() + 100)
            moments.append(time.monotonic() + pause)
            timer.set(moments[-1])
            await asyncio.sleep(0.05)
        timer.set(time.monotonic() + 0.01)
        timer.cancel()
        await asyncio.sleep(0.03)
        assert len(heard) == len(moments)
        return [rang - moment for rang, moment in zip(heard, moments, strict=True)]

    assert min(asyncio.run(rings())) >= 0
