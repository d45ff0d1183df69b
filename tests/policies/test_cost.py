"""The cost of a decision must not grow with the number of workers. It is counted in executed lines, not in seconds.

A barrier makes as many decisions as it has members when it closes, so the count is divided by decisions and events.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from paceline.policies import Decision, make, names
from policies.cluster import run

VARIANTS = ["bsp:tune_batches=true", "r2sp:tune_batches=true", "r2sp:groups=4", "r2sp:groups=auto", "groups:outer=ssp"]
VARIANTS += ["dssp:bound=staleness", "dssp:low=0,high=0,bound=staleness"]


def lines_per_decision(spec: str, workers: int, rounds: int = 3) -> float:
    """Return the number of executed lines per decision and event."""
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
    updates = rounds * workers if spec not in ("ksync", "kbatch") else 100  # each of these grants all workers
    story = run(make(spec), seconds, updates, tell=counted)
    return lines / (story.events + story.decisions)


@pytest.mark.parametrize("spec", [*names(), *VARIANTS])
def test_the_cost_of_a_decision_does_not_grow_with_the_number_of_workers(spec: str) -> None:
    few, many = lines_per_decision(spec, 16), lines_per_decision(spec, 256)
    assert many <= 1.5 * few
