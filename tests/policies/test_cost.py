"""What a decision costs must not grow with the number of workers: counted in lines of Python, not in seconds.

A barrier that closes makes as many decisions as there are members; so the count is shared among decisions and events.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from paceline.policies import Decision, make, names
from policies.cluster import run

VARIANTS = ["bsp:tune_batches=true", "r2sp:tune_batches=true", "r2sp:groups=4", "r2sp:groups=auto", "groups:outer=ssp"]


def lines_a_decision(spec: str, workers: int, rounds: int = 4) -> float:
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return trace

    def counted(method: Callable[..., list[Decision]], *arguments: object) -> list[Decision]:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return method(*arguments)
        finally:
            sys.settrace(before)

    seconds = {worker: (lambda batch, worker=worker: 1.0 + worker * 7 % 10 / 20) for worker in range(workers)}
    updates = rounds * workers if spec not in ("ksync", "kbatch") else 100  # each of which grants everyone
    story = run(make(spec), seconds, updates, tell=counted)
    return lines / (story.events + story.decisions)


@pytest.mark.parametrize("spec", [*names(), *VARIANTS])
def test_a_decision_costs_as_much_among_many_as_among_few(spec: str) -> None:
    few, many = lines_a_decision(spec, 16), lines_a_decision(spec, 512)
    assert many <= 1.5 * few
