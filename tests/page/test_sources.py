"""Where a page's events come from: a recorded run, or a running job."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.observe.trace import Awaited, Began, Event, Granted, Joined, Left, as_line
from paceline.page.process import PageProcess, PageSetup
from paceline.page.sources import duration, replay
from paceline.page.state import PageState, Shown
from paceline.serve.environment import address
from paceline.serve.wire.endpoint import Endpoint
from page.viewing import TIMEOUT, recorded, report_of


def written(path: Path, events: list[Event]) -> Path:
    path.write_text("".join(f"{as_line(event)}\n" for event in events))
    return path


@pytest.mark.parametrize("speed", [0.0, None, 1000.0])
def test_a_recorded_run_is_shown_at_any_speed(tmp_path: Path, speed: float | None, monkeypatch: Any) -> None:
    events = [*recorded("bsp"), *recorded("r2sp")]
    path, state, clock = (
        written(tmp_path / "trace.jsonl", events),
        PageState(Shown(recorded=True)),
        SimpleNamespace(now=0),
    )

    async def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(replay(state, path, speed, clock=lambda: clock.now))
    assert state.summary.report() == report_of(recorded("r2sp"))
    assert [run["policy"] for run in state.runs] == ["bsp"]
    whole = recorded("bsp")[-1].time + recorded("r2sp")[-1].time
    assert duration(path) == pytest.approx(whole)
    assert clock.now == pytest.approx({0.0: 0.0, None: 60.0, 1000.0: whole / 1000}[speed], rel=0.01)


def test_a_replay_skips_the_wait_for_the_first_worker(tmp_path: Path, monkeypatch: Any) -> None:
    """Each run waits five seconds for its workers. Nothing could be seen of it but that it waits."""
    run: list[Event] = [Began(0.0, "", "asp", "whole", 0), Awaited(0.1, 0, 1), Awaited(5.0, 1, 0)]
    run += [Joined(5.0, 0), Granted(6.0, 0, None, 0), Left(8.0, 0)]
    path, state = written(tmp_path / "trace.jsonl", [*run, *run]), PageState(Shown(recorded=True))
    clock, waiting = SimpleNamespace(now=0.0), [0.0]

    async def sleep(seconds: float) -> None:
        clock.now += seconds
        if not state.live.workers:
            waiting.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(replay(state, path, None, clock=lambda: clock.now))
    assert duration(path) == pytest.approx(6.0)
    assert clock.now == pytest.approx(6.0)
    assert sum(waiting) == 0.0
    assert state.replay == {"speed": 0.0, "shown": pytest.approx(6.0), "of": pytest.approx(6.0)}


@pytest.mark.parametrize("text", ["", "not json\n", '{"event":"unknown"}\n', '{"event":"joined","when":1}\n', "[]\n"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"trace\.jsonl is (not a trace: line 1|empty)"):
        duration(path)


@pytest.mark.core
def test_the_page_of_a_running_job_agrees_with_its_trace() -> None:
    """The page runs in a process of its own, watches the job, and ends with it."""
    pytest.importorskip("torch")
    from serve.workers import work
    from train.jobs import job

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    token = b"a token of the job"
    page = PageProcess(listening, PageSetup(title="a job"))
    with job("r2sp", shards=1, workers=2, token=token) as running:
        page.follow(Endpoint(*address(running.address), token))
        connection = opened(port)
        stream = connection.getresponse()
        assert next_frame(stream)["job"]["title"] == "a job"
        running.work(*[lambda where: work(where, 40, token=token)] * 2)
        running.finish()
    last = None
    pid = page.pid
    assert pid
    page.stop()
    while (frame := next_frame(stream)) is not None:
        last = frame
    assert last and last["over"]
    stream.close()
    connection.close()
    report = report_of(running.events)
    assert last["figures"]["updates"] == report.updates > 0
    assert last["figures"]["mean_staleness"] == report.mean_staleness
    assert last["sentences"]["health"] == ["idle", f"Done: {report.updates} updates."]
    assert page.pid == 0


def opened(port: int) -> http.client.HTTPConnection:
    end = time.monotonic() + TIMEOUT
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
            connection.request("GET", "/events")
            return connection
        except ConnectionError:
            connection.close()
            assert time.monotonic() < end
            time.sleep(0.05)


def next_frame(stream: http.client.HTTPResponse) -> Any:
    while line := stream.readline():
        if line.startswith(b"event: over"):
            return None
        if line.startswith(b"data: "):
            return json.loads(line[6:])
    return None
