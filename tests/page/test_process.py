"""The process of a page: the secrets that it gets, and how it ends."""

from __future__ import annotations

import base64
import json
import socket
import sys
from pathlib import Path

import pytest

from paceline.page.process import PageProcess, PageSetup
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.tokens import token_for
from page.viewing import TIMEOUT

TOKEN = b"a token of a job"
ECHO = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
FAILING = """
import runpy, sys
from paceline.page import sources

async def follow(*_):
    raise RuntimeError("a bug in the page")

sources.follow = follow
runpy.run_module("paceline.page", run_name="__main__", alter_sys=True)
"""


@pytest.mark.core
def test_the_process_gets_no_token_but_that_for_watching(tmp_path: Path) -> None:
    file = tmp_path / "given"
    setup = PageSetup(title="a job", token=TOKEN)
    with PageProcess(
        socket.create_server(("127.0.0.1", 0)), setup, lambda _: [sys.executable, "-c", ECHO, str(file)]
    ) as page:
        page.follow(Endpoint("127.0.0.1", 1, TOKEN))
        page.follow(Endpoint("127.0.0.1", 2, token_for("watch", TOKEN)))
    shown, *jobs = map(json.loads, file.read_text().splitlines())
    watch = base64.b64encode(token_for("watch", TOKEN)).decode()
    assert shown["token"] == watch
    assert [job["endpoint"]["token"] for job in jobs] == [watch, watch]


def test_a_page_without_a_password_stays_without_one(tmp_path: Path) -> None:
    file = tmp_path / "given"
    with PageProcess(
        socket.create_server(("127.0.0.1", 0)), PageSetup(), lambda _: [sys.executable, "-c", ECHO, str(file)]
    ) as page:
        page.follow(Endpoint("127.0.0.1", 1))
    assert json.loads(file.read_text().splitlines()[0])["token"] == ""


def test_an_error_ends_the_process_and_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with PageProcess(
        socket.create_server(("127.0.0.1", 0)),
        PageSetup(),
        lambda command: [sys.executable, "-c", FAILING, command[-1]],
    ) as page:
        page.follow(Endpoint("127.0.0.1", 1))
        assert page._process
        assert page._process.wait(TIMEOUT) == 1
    assert "RuntimeError: a bug in the page" in capfd.readouterr().err
