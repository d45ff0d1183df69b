"""Progress bars of scripts in a log: a line now and then, and the last state."""

from __future__ import annotations

import asyncio

import pytest

from paceline.cli import output
from paceline.cli.output import Output


def test_a_log_shows_a_bar_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "LINE", 0.02)

    async def show() -> None:
        shown = Output()
        async with shown.running():
            for state in ("1 of 9", "2 of 9", "3 of 9"):  # too fast for the log
                shown.say(state, aside=True, source="0", stays=False)
            await asyncio.sleep(0.1)
            shown.say("4 of 9", aside=True, source="0", stays=False)
            shown.say("another line", aside=True, source="1")
            await asyncio.sleep(0.1)
            shown.say("5 of 9", aside=True, source="0", stays=False)
            shown.say("", aside=True, source="0", stays=False)  # the bar is erased
            await asyncio.sleep(0.1)
            shown.say("9 of 9", aside=True, source="0")

    asyncio.run(show())
    assert capsys.readouterr().err.splitlines() == ["3 of 9", "another line", "4 of 9", "9 of 9"]
