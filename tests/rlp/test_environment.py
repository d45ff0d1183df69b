"""The Gymnasium environment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
gymnasium = pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env

from paceline.rlp.environment import SynchronizationEnv
from paceline.rlp.features import ALL, ITSELF, WAIT, StateFeatures
from paceline.rlp.instance import Instance, drawn
from paceline.workloads.data import load

DIGITS = load("digits")


def small(number: int) -> Instance:
    return replace(drawn(number, workers=4, hidden=0, size="bundled"), target=0.7, budget=150)


def played(environment: SynchronizationEnv, action: int, number: int) -> tuple[float, dict[str, float], bool, bool]:
    """Play an episode with always the same action. Return its return, the last info, terminated and truncated."""
    environment.reset(options={"instance": small(number)})
    total, over = 0.0, (False, False)
    while not any(over):
        _, reward, *over, info = environment.step(np.int64(action))  # type: ignore[assignment]
        total += reward
    return total, info, *over


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("ring", [False, True])
def test_gymnasiums_checker_accepts_the_environment(ring: bool, validated: bool) -> None:
    environment = SynchronizationEnv(DIGITS, small, StateFeatures(validated=validated), ring)
    check_env(environment, skip_render_check=True)
    assert environment.action_space.n == 3 + ring  # type: ignore[attr-defined]
    assert environment.observation_space.shape == (57,)


def test_the_return_is_minus_the_time_it_took() -> None:
    environment = SynchronizationEnv(DIGITS, small)
    for number in range(3):
        first, _ = environment.reset(options={"instance": small(number)})
        began = environment._info(environment._fleet)["seconds"]  # type: ignore[arg-type]
        total, info, reached, spent = played(environment, ITSELF, number)
        assert reached != spent
        assert -total == pytest.approx(info["seconds"] - began)
        assert first.shape == (57,)


def test_one_action_keeps_workers_idle_and_another_lets_all_run() -> None:
    environment = SynchronizationEnv(DIGITS, small)
    environment.reset(options={"instance": small(1)})
    assert [environment.step(np.int64(WAIT))[-1]["idle"] for _ in range(2)] == [2, 3]
    assert environment.step(np.int64(ALL))[-1]["idle"] == 1
    # When all four are idle, they run whatever the action.
    assert [environment.step(np.int64(WAIT))[-1]["idle"] for _ in range(4)] == [2, 3, 4, 1]


def test_an_episode_is_truncated_when_its_budget_is_spent() -> None:
    environment = SynchronizationEnv(DIGITS)
    environment.reset(options={"instance": replace(small(0), target=1.01, budget=30)})
    for _ in range(28):
        assert environment.step(np.int64(ITSELF))[2:4] == (False, False)
    assert environment.step(np.int64(ITSELF))[2:4] == (False, True)


def test_the_same_seed_gives_the_same_cluster() -> None:
    one, other = SynchronizationEnv(DIGITS, small), SynchronizationEnv(DIGITS, small)
    assert np.array_equal(one.reset(seed=3)[0], other.reset(seed=3)[0])
    for _ in range(20):
        a, b = one.step(np.int64(ALL)), other.step(np.int64(ALL))
        assert np.array_equal(a[0], b[0])
        assert a[1:] == b[1:]
    one.reset(seed=4)
    other.reset(seed=3)
    assert one.step(np.int64(ALL))[1] != other.step(np.int64(ALL))[1]
