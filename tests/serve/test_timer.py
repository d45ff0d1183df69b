"""A timer fires once, and on time."""

from __future__ import annotations

import asyncio
import time

from paceline.serve.coordinator.timer import Timer


def test_a_timer_fires_once_at_the_deadline_that_was_set_last_and_never_before() -> None:
    async def delays() -> list[float]:
        fired: list[float] = []
        timer = Timer(asyncio.get_running_loop(), lambda: fired.append(time.monotonic()))
        deadlines = []
        for pause in (0.0123, 0.0004, -1.0):
            timer.set(time.monotonic() + 100)
            deadlines.append(time.monotonic() + pause)
            timer.set(deadlines[-1])
            await asyncio.sleep(0.05)
        timer.set(time.monotonic() + 0.01)
        timer.cancel()
        await asyncio.sleep(0.03)
        assert len(fired) == len(deadlines)
        return [at - deadline for at, deadline in zip(fired, deadlines, strict=True)]

    assert min(asyncio.run(delays())) >= 0
