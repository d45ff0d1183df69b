"""The sources of a page's events: a running job, or the trace of a recorded one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from paceline.observe.trace import Began, Event, Joined, from_line
from paceline.page.state import PageState
from paceline.serve.watch import inspect, watch
from paceline.serve.wire.endpoint import Endpoint

AGAIN = 0.5  # seconds between two attempts to reach the job's server
INSPECT = 5.0  # seconds between two questions for the workers that the policy leaves out
WHOLE = 60.0  # seconds in which a recorded run is shown if no speed is given
CHUNK = 2000  # events of a recorded run that are told without a pause


async def follow(state: PageState, endpoint: Endpoint) -> None:
    """Tell the state of every event of a running job, whenever its server answers."""
    inspecting = asyncio.ensure_future(_inspect(state, endpoint))
    try:
        while True:
            problem = ""
            try:
                async for event in watch(endpoint):
                    state.tell(event)
            except ConnectionRefusedError:
                pass
            except OSError as error:
                problem = f"The job cannot be watched: {str(error).rstrip('.')}."
            state.lose(problem)
            await asyncio.sleep(AGAIN)
    finally:
        inspecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await inspecting


async def _inspect(state: PageState, endpoint: Endpoint) -> None:
    """Ask now and then which workers the policy leaves out, if it leaves out any."""
    while True:
        await asyncio.sleep(INSPECT)
        try:
            found = await inspect(endpoint)
        except OSError:
            continue
        if not found.filters:
            return
        state.happenings.exclude(state.now(), {worker: _reason(cosines) for worker, cosines in found.blacklist})


def _reason(cosines: tuple[float, ...]) -> str:
    named = ", ".join(f"{cosine:.2f}" for cosine in cosines[:5])
    return f"its updates have little in common with those of the others (cosines {named})"


def events_of(path: Path) -> Iterator[Event]:
    """Yield the events of a trace file. Raise ValueError if it is not one."""
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                event = from_line(line)
                if not isinstance(getattr(event, "worker", 0), int):
                    raise ValueError(line)
                yield event
            except (ValueError, TypeError, KeyError, AttributeError):
                raise ValueError(f"{path} is not a trace: line {number} is not an event of paceline.") from None


def timed(path: Path) -> Iterator[tuple[Event, float]]:
    """Yield every event of a trace, and the seconds that its runs have taken by then, one after another.

    The time of a run begins when its first worker joins. What it waited before is left out.
    """
    before, at, joined = 0.0, 0.0, None
    for event in events_of(path):
        if isinstance(event, Began):
            before, joined = at, None
        elif isinstance(event, Joined) and joined is None:
            joined = event.time
        if joined is not None:
            at = before + event.time - joined
        yield event, at


def duration(path: Path) -> float:
    """Return the seconds that the runs in a trace take one after another. Raise ValueError if it is not a trace."""
    last = deque(timed(path), maxlen=1)
    if not last:
        raise ValueError(f"{path} is empty: it is not a trace.")
    return last[0][1]


async def replay(
    state: PageState, path: Path, speed: float | None, clock: Callable[[], float] = time.monotonic
) -> None:
    """Tell the state of every event of a trace, at `speed` times the speed of the run. 0: all at once.

    By default the whole trace takes a minute.
    """
    whole = duration(path)
    pace = max(1.0, whole / WHOLE) if speed is None else speed
    state.replay = {"speed": pace, "shown": 0.0, "of": whole}
    async for event, at in _paced(path, pace, clock):
        state.tell(event)
        state.replay["shown"] = at
    state.replay = {"speed": 0.0, "shown": whole, "of": whole}


async def _paced(path: Path, pace: float, clock: Callable[[], float]) -> AsyncIterator[tuple[Event, float]]:
    """Yield every event when it is due, and the seconds of all runs up to it."""
    begin = clock()
    for number, (event, at) in enumerate(timed(path)):
        if pace > 0:
            while (early := at / pace - (clock() - begin)) > 0:
                await asyncio.sleep(min(early, 0.5))
        if number % CHUNK == 0:
            await asyncio.sleep(0)
        yield event, at
