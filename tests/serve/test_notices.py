"""What a worker tells its user: that it has joined, whom it waits for, and that the server is lost or back."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from paceline.serve.environment import JOINED, LAUNCHED, UPDATED, address, tell_launcher
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.worker import incarnation, notices
from paceline.serve.worker.client import Client
from train.jobs import job

EMPTY = memoryview(b"")


def test_a_worker_tells_that_it_waits_for_others_and_that_the_job_begins() -> None:
    said: dict[int, list[str]] = {0: [], 1: []}
    with job("bsp", shards=0, workers=2) as running:
        first = Client(address(running.address), b"", tell=said[0].append)
        waiting = threading.Thread(target=first.begin, args=(EMPTY,))
        waiting.start()
        second = Client(address(running.address), b"", tell=said[1].append)
        second.begin(EMPTY)
        waiting.join(20.0)
        for client in (first, second):
            client.close()
        running.finish()
    assert said[0] == [
        "Joined the job as worker 0; waiting for 1 more worker.",
        "All workers have joined; the job begins.",
    ]
    assert said[1] == ["Joined the job as worker 1."]


def test_a_worker_that_is_interrupted_while_it_waits_leaves_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the job would wait for it until its lease ends."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with job("bsp", shards=0, workers=2) as running:
        client = Client(address(running.address), b"")
        state = running.coordinator.state
        assert (len(state.roster.training), state.missing) == (1, 1)
        monkeypatch.setattr(client, "go_on", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.begin(EMPTY)
        assert not state.roster.training
        assert not state.roster.awaited


@pytest.mark.parametrize("restored", [False, True], ids=["the same generation", "a restored server"])
def test_a_worker_tells_that_its_server_is_lost_and_back(
    restored: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = [ConnectionRefusedError("nobody listens")] * 3
    opened = Endpoint.open

    def refuse(self: Endpoint, *arguments: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return opened(self, *arguments)

    with job("asp", shards=0) as running, caplog.at_level(logging.WARNING):
        client = Client(address(running.address), b"")
        client.begin(EMPTY)
        monkeypatch.setattr(Endpoint, "open", refuse)
        monkeypatch.setattr(incarnation, "NOTICED_PAUSE", 0.0)
        if restored:
            client._incarnation.generation = "an earlier one"
        client._incarnation._control.cut()
        for _ in range(3):
            client.exchange(EMPTY, EMPTY, batch_size=1, rates=())
        client.close()
        running.finish()
    where = f"The server at {running.address}"
    back = "The server is back, and worker 0 has joined again." if restored else f"{where} is back."
    assert [record.getMessage() for record in caplog.records if record.name.startswith("paceline.serve.worker")] == [
        f"{where} is lost (nobody listens). Retrying for 60 s.",
        back,
    ]


def test_a_notice_is_a_line_on_standard_error_or_a_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(LAUNCHED, raising=False)
    root, records = logging.getLogger(), list[logging.LogRecord]()
    handlers, root.handlers, level = root.handlers, [], root.level
    try:
        notices.notice("Joined the job.")
        assert capsys.readouterr().err == "Joined the job.\n"
        monkeypatch.setenv(LAUNCHED, "1")
        notices.notice("Joined the job.")
        assert capsys.readouterr().err == "", "`paceline run` shows the job itself"
        handler = logging.Handler()
        monkeypatch.setattr(handler, "emit", records.append)
        root.handlers = [handler]
        root.setLevel(logging.INFO)
        notices.notice("Joined the job.")
        assert [record.getMessage() for record in records] == ["Joined the job."]
        assert capsys.readouterr().err == ""
    finally:
        root.handlers = handlers
        root.setLevel(level)


def test_only_a_launcher_is_told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(LAUNCHED, raising=False)
    tell_launcher(JOINED)
    assert capfd.readouterr().err == ""
    monkeypatch.setenv(LAUNCHED, "1")
    tell_launcher(JOINED)
    assert capfd.readouterr().err == f"\r{JOINED}\n"


def test_a_worker_tells_its_launcher_that_it_joined_and_that_its_first_update_is_done(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LAUNCHED, "1")
    with job("asp", shards=0) as running:
        client = Client(address(running.address), b"")
        client.begin(EMPTY)
        assert capfd.readouterr().err == f"\r{JOINED}\n"
        for _ in range(3):
            client.exchange(EMPTY, EMPTY, batch_size=1, rates=())
        client.close()
        running.finish()
    assert capfd.readouterr().err == f"\r{UPDATED}\n"
