"""A worker can be asked to leave by a call, where another program handles SIGTERM."""

from __future__ import annotations

import threading

import pytest

from paceline.serve.worker import departure
from paceline.serve.worker.departure import Departed, Departure


def test_a_call_asks_the_worker_to_leave_and_those_that_join_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departure, "_asked", threading.Event())
    first, woken = Departure.at_sigterm(), threading.Event()
    first.wakes(woken.set)
    first.check()
    departure.ask_to_leave("The node is drained")
    later = Departure.at_sigterm()
    for each in (first, later):
        each.release()
        with pytest.raises(Departed):
            each.check()
    assert woken.is_set()
