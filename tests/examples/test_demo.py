"""The demo: its command is valid, and where links cannot be emulated it shows a prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("msgspec")

from scripts import demo

from paceline.serve.wire import link
from shell import Shell
from test_docs import check_paceline


def test_the_demo_trains_over_links_of_a_limited_rate(capsys: pytest.CaptureFixture[str]) -> None:
    command = demo.command()
    check_paceline(command, "scripts/demo.py")
    assert {"--link", "--target", "--plot"} <= set(command)
    assert Path(command[-3]).is_file()
    assert "emulated link of 200Mbit/s" in capsys.readouterr().out


def test_without_emulated_links_the_demo_shows_a_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "fcntl", None)
    command = demo.command()
    assert capsys.readouterr().out == (
        "No training, because links cannot be emulated on this system, which has no record locks. "
        "This is the simulator's prediction.\n"
    )
    ran = Shell(tmp_path, capsys, monkeypatch)(*command)
    assert ran.code == 0
    assert "bsp" in ran.out and "r2sp" in ran.out and "× floor" in ran.out
