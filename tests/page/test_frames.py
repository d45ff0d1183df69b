"""Frames: few for each viewer, and none that waits for a slow one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from paceline.page.frames import FRAME, MAX_VIEWERS, SLOW, Frames, Viewer
from paceline.page.state import PageState
from page.test_state import a_job, one_iteration
from page.viewing import state_of


class Bench:
    """Frames under a clock that the test moves."""

    def __init__(self) -> None:
        self.time = SimpleNamespace(now=0.0)
        self.state: PageState = state_of(a_job())
        self.frames = Frames(self.state, clock=lambda: self.time.now)
        self.iteration = 10

    def advance(self, count: int = 1) -> None:
        """Let a frame's time pass, and events happen."""
        for _ in range(count):
            self.iteration += 1
            for event in one_iteration(0, self.iteration, float(self.iteration)):
                self.state.tell(event)
            self.time.now += FRAME
            self.frames.make()

    async def ask(self, viewer: Viewer) -> asyncio.Future[bytes]:
        asked = asyncio.ensure_future(self.frames.next(viewer))
        await asyncio.sleep(0)
        return asked


def run(test: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        await test(Bench())

    asyncio.run(main())


def entered(bench: Bench) -> Viewer:
    viewer = bench.frames.enter()
    assert viewer is not None
    return viewer


def read(asked: asyncio.Future[bytes]) -> dict[str, Any]:
    frame: dict[str, Any] = json.loads(asked.result())
    return frame


def test_a_viewer_gets_everything_first_and_then_the_changes() -> None:
    async def test(bench: Bench) -> None:
        viewer = entered(bench)
        asked = await bench.ask(viewer)
        bench.advance()
        await asyncio.sleep(0)
        first = read(asked)
        assert first["full"]
        assert len(first["iterations"]) == 21
        asked = await bench.ask(viewer)
        bench.advance()
        await asyncio.sleep(0)
        second = read(asked)
        assert "full" not in second
        assert len(second["iterations"]) == 1
        assert second["n"] == first["n"] + 1

    run(test)


def test_a_slow_viewer_misses_frames_and_then_gets_everything() -> None:
    async def test(bench: Bench) -> None:
        viewer = entered(bench)
        asked = await bench.ask(viewer)
        bench.advance()
        await asyncio.sleep(0)
        read(asked)
        bench.advance(30)  # the viewer has not asked again
        assert bench.frames.dropped == 30
        assert viewer.ready is None, "nothing is kept for it"
        asked = await bench.ask(viewer)
        bench.advance()
        await asyncio.sleep(0)
        assert read(asked)["full"]
        assert len(read(asked)["iterations"]) == 20 + 32

    run(test)


def test_viewers_that_keep_up_get_the_same_bytes() -> None:
    async def test(bench: Bench) -> None:
        viewers = [entered(bench) for _ in range(20)]
        for _ in range(2):
            asked = [await bench.ask(viewer) for viewer in viewers]
            bench.advance()
            await asyncio.sleep(0)
        assert len({id(each.result()) for each in asked}) == 1

    run(test)


def test_nothing_is_sent_while_nothing_happens() -> None:
    async def test(bench: Bench) -> None:
        viewer = entered(bench)
        asked = await bench.ask(viewer)
        bench.advance()
        await asyncio.sleep(0)
        read(asked)
        asked = await bench.ask(viewer)
        bench.time.now += FRAME
        bench.frames.make()
        await asyncio.sleep(0)
        assert not asked.done()
        bench.time.now += SLOW
        bench.frames.make()
        await asyncio.sleep(0)
        assert read(asked)["figures"], "the figures are renewed: time passes"

    run(test)


def test_the_last_frame_holds_everything_and_is_the_last() -> None:
    async def test(bench: Bench) -> None:
        waiting, late = entered(bench), entered(bench)
        asked = await bench.ask(waiting)
        bench.frames.finish()
        await asyncio.sleep(0)
        assert read(asked)["over"]
        assert await bench.frames.next(waiting) == b""
        assert json.loads(await bench.frames.next(late))["over"]
        assert await bench.frames.next(late) == b""

    run(test)


def test_viewers_are_limited() -> None:
    async def test(bench: Bench) -> None:
        viewers = [bench.frames.enter() for _ in range(MAX_VIEWERS)]
        assert None not in viewers
        assert bench.frames.enter() is None
        first = viewers[0]
        assert first
        bench.frames.leave(first)
        assert bench.frames.enter() is not None

    run(test)
