"""The three sentences at the top of the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.observe.stall import LEAST_SECONDS
from paceline.page.advice import Situation, advice, health, seconds, speed
from paceline.simulate import limit_seconds, load_cluster
from page.viewing import recorded, report_of, state_of

SHARES = {"computing": 0.3, "pushing": 0.1, "pulling": 0.1, "waiting": 0.5}
MOSTLY_MOVING = {"computing": 0.1, "pushing": 0.4, "pulling": 0.4, "waiting": 0.1}
RUNNING = Situation(
    "bsp", members=8, updates=800, quiet=0.1, gap=0.2, loss=0.5, iteration_seconds=0.5, shares=SHARES, staleness=0.0
)


@pytest.mark.parametrize(
    ("changed", "level", "text"),
    [
        ({}, "good", "Healthy: 8 workers train, none was lost."),
        ({"lost": 1}, "good", "Healthy: 8 workers train, 1 was lost on the way."),
        ({"lost_now": {3: 12.0}}, "warn", "Worker 3 was lost 12 s ago; 8 workers go on."),
        ({"lost_now": {3: 300.0}, "lost": 1}, "good", "Healthy: 8 workers train, 1 was lost on the way."),
        ({"quiet": 40.0, "awaited": [3]}, "bad", "Stalled: no update was applied for 40 s; waiting for worker 3."),
        (
            {"quiet": 40.0, "awaited": [3], "clients": True},
            "bad",
            "Stalled: no update was applied for 40 s; waiting for client 3.",
        ),
        ({"lost_now": {3: 12.0}, "clients": True}, "warn", "Client 3 was lost 12 s ago; 8 clients go on."),
        ({"members": 0, "updates": 0, "clients": True}, "idle", "Waiting for the first client to join."),
        ({"quiet": LEAST_SECONDS - 1}, "good", "Healthy: 8 workers train, none was lost."),
        ({"quiet": 40.0, "gap": 30.0}, "good", "Healthy: 8 workers train, none was lost."),
        ({"loss": float("inf")}, "bad", "The loss is not a number any more: the training has diverged."),
        ({"state": "lost"}, "bad", "The job's server does not answer; this is the last that was seen of it."),
        ({"state": "ended"}, "idle", "Done: 800 updates."),
        ({"members": 0, "updates": 0}, "idle", "Waiting for the first worker to join."),
        ({"members": 0}, "idle", "All workers have left, after 800 updates."),
        (
            {"members": 0, "joined_early": 1, "missing": 2, "updates": 0},
            "idle",
            "Waiting to begin: 1 worker joined, 2 more workers must join.",
        ),
        (
            {"state": "recorded", "members": 0, "joined_early": 1, "missing": 2, "updates": 0},
            "idle",
            "This run did not begin: 1 worker joined, 2 more workers did not.",
        ),
        ({"state": "recorded", "members": 0, "updates": 0}, "idle", "No worker has joined this run."),
    ],
)
def test_health(changed: dict[str, object], level: str, text: str) -> None:
    assert health(replace(RUNNING, **changed)) == (level, text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "Workers wait 50% of the time at the barrier: try r2sp."),
        (
            {"shares": MOSTLY_MOVING},
            "Workers compute only 10% of the time; all send at once: try r2sp.",
        ),
        ({"policy": "ssp:staleness=3"}, "Workers wait 50% of the time for the slowest worker: try r2sp."),
        ({"clients": True}, "Clients wait 50% of the time at the barrier: try fl-r2sp."),
        (
            {"clients": True, "policy": "ssp:staleness=3"},
            "Clients wait 50% of the time for the slowest client: try fl-r2sp.",
        ),
        (
            {"slowest": (3, 2.1)},
            "Worker 3 computes 2.1 × as long as the others: r2sp:tune_batches=true gives it less.",
        ),
        ({"floor": 0.49}, "Nothing: only faster links, faster workers or a smaller model would help."),
        (
            {"shares": {"computing": 0.9, "pushing": 0.1, "pulling": 0.0, "waiting": 0.0}},
            "Nothing stands out: workers compute 90% of the time.",
        ),
        (
            {"policy": "r2sp", "links": {"in": 0.99}},
            "Workers wait 50% of the time for their turn, and the links are full: "
            "faster links or more servers would help.",
        ),
        ({"policy": "asp", "staleness": 7.0}, "Updates are 7.0 versions old when they are applied: r2sp bounds that."),
        (
            {"policy": "r2sp"},
            "Workers wait 50% of the time for their turn: "
            "`paceline advise` measures whether the links or the workers are the limit.",
        ),
        ({"policy": "fl-r2sp", "clients": True}, "Clients wait 50% of the time for their group's turn."),
        (
            {"policy": "fl-r2sp", "clients": True, "shares": MOSTLY_MOVING},
            "Sending and receiving take 80% of the time.",
        ),
        (
            {"policy": "fedbuff", "clients": True, "staleness": 7.0},
            "Updates are 7.0 versions old when they are applied: fl-r2sp bounds that.",
        ),
        ({"policy": "asp"}, "Nothing stands out: `paceline advise` compares this policy with the others."),
        ({"policy": "safa", "clients": True}, "Nothing stands out."),
        ({"updates": 3}, "Come back after a few rounds."),
        ({"loss": float("nan")}, "Lower the learning rate, and continue from a checkpoint."),
    ],
)
def test_advice(changed: dict[str, object], text: str) -> None:
    assert advice(replace(RUNNING, **changed)).text == text  # type: ignore[arg-type]


def test_speed_beside_the_floor() -> None:
    assert speed(replace(RUNNING, floor=0.25)).text == (
        "0.5 s per iteration: 2.00 × the shortest that any policy allows here (0.25 s)."
    )
    assert speed(replace(RUNNING, floor=0.5)).level == "good"
    assert speed(replace(RUNNING, links={"in": 1.0, "out": 0.2})).text == (
        "0.5 s per iteration: 30% computing, 20% sending and receiving, 50% waiting, "
        "and the servers' links in are full."
    )
    assert speed(replace(RUNNING, updates=3)).text == "Too early to say: the first rounds are not over."


def test_the_simulated_runs_of_the_readme() -> None:
    """BSP is more than twice as slow as it could be, and R²SP is not. The page says both."""
    floor = limit_seconds(load_cluster("r2sp-a-vgg16"), False)
    bsp, r2sp = (state_of(recorded(policy), floors=[floor]).situation() for policy in ("bsp", "r2sp"))
    ratio = report_of(recorded("bsp")).mean_iteration_seconds / floor
    assert f"{ratio:.2f} ×" in speed(bsp).text
    assert advice(bsp).text.endswith("try r2sp.")
    assert speed(r2sp).level == advice(r2sp).level == "good"


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "12.3 ms"), (0.5, "0.5 s"), (99.0, "99 s"), (300.0, "300 s"), (1200.0, "20 min")]
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text
