"""The Gymnasium environment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
gymnasium = pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env

from paceline.rlp.environment import ALL, ITSELF, WAIT, SynchronizationEnv
from paceline.rlp.features import StateFeatures
from paceline.rlp.instance import Instance, drawn
from paceline.workloads.data import load

DIGITS = load("digits")


def small(number: int) -> Instance:
    return replace(drawn(number, workers=4, hidden=0, size="bundled"), target=0.7, budget=150)


def returned(environment: SynchronizationEnv, choose: int, number: int) -> tuple[float, dict[str, float], bool, bool]:
    environment.reset(options={"instance": small(number)})
    total, over = 0.0, (False, False)
    while not any(over):
        _, reward, *over, info = environment.step(np.int64(choose))  # type: ignore[assignment]
        total += reward
    return total, info, *over


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("ring", [False, True])
def test_it_is_what_gymnasium_takes_for_an_environment(ring: bool, validated: bool) -> None:
    environment = SynchronizationEnv(DIGITS, small, StateFeatures(validated=validated), ring)
    check_env(environment, skip_render_check=True)
    assert environment.action_space.n == 3 + ring  # type: ignore[attr-defined]
    assert environment.observation_space.shape == (53,)


def test_the_return_is_minus_the_time_it_took() -> None:
    environment = SynchronizationEnv(DIGITS, small)
    for number in range(3):
        first, _ = environment.reset(options={"instance": small(number)})
        began = environment._about(environment._fleet)["seconds"]  # type: ignore[arg-type]
        total, info, reached, spent = returned(environment, ITSELF, number)
        assert reached != spent
        assert -total == pytest.approx(info["seconds"] - began)
        assert first.shape == (53,)


def test_waiting_and_letting_all_go_are_what_they_say() -> None:
    environment = SynchronizationEnv(DIGITS, small)
    environment.reset(options={"instance": small(1)})
    assert [environment.step(np.int64(WAIT))[-1]["idle"] for _ in range(2)] == [2, 3]
    assert environment.step(np.int64(ALL))[-1]["idle"] == 1
    # When all four are idle they are let go, whatever was said.
    assert [environment.step(np.int64(WAIT))[-1]["idle"] for _ in range(4)] == [2, 3, 4, 1]


def test_what_cannot_be_reached_is_cut_off() -> None:
    environment = SynchronizationEnv(DIGITS)
    environment.reset(options={"instance": replace(small(0), target=1.01, budget=30)})
    for _ in range(28):
        assert environment.step(np.int64(ITSELF))[2:4] == (False, False)
    assert environment.step(np.int64(ITSELF))[2:4] == (False, True)


def test_the_same_seed_is_the_same_cluster() -> None:
    one, other = SynchronizationEnv(DIGITS, small), SynchronizationEnv(DIGITS, small)
    assert np.array_equal(one.reset(seed=3)[0], other.reset(seed=3)[0])
    for _ in range(20):
        a, b = one.step(np.int64(ALL)), other.step(np.int64(ALL))
        assert np.array_equal(a[0], b[0])
        assert a[1:] == b[1:]
    one.reset(seed=4)
    other.reset(seed=3)
    assert one.step(np.int64(ALL))[1] != other.step(np.int64(ALL))[1]
