"""Our deep Q-learning compared with that of Stable-Baselines3, if it is installed (pip install stable-baselines3)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("gymnasium")
baselines = pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed")

import torch
from stable_baselines3.common.logger import configure

from paceline.rlp import dqn
from paceline.rlp.environment import SynchronizationEnv
from paceline.rlp.instance import Instance, drawn
from paceline.workloads.data import load

DIGITS = load("digits")
SETTINGS = dqn.DqnSettings(memory=32, copy_every=10**9, budget=40, size="bundled", workers=4)
STEPS = 5


def small(seed: int) -> Instance:
    """Return an instance that reaches its target within ten to twenty updates."""
    return replace(drawn(seed, 4, 1, size="bundled"), budget=60, target=0.3, rate=0.05, momentum=0.0)


def oracle(environment: SynchronizationEnv, **settings: object):  # type: ignore[no-untyped-def]
    """Return a Stable-Baselines3 learner with the paper's settings, without its own limit on gradients."""
    kwargs = {"net_arch": [64, 32], "activation_fn": torch.nn.LeakyReLU, "optimizer_kwargs": {"eps": 0.5e-8}}
    usual = {"learning_rate": SETTINGS.rate, "gamma": SETTINGS.discount, "batch_size": 32, "max_grad_norm": 1e9}
    model = baselines.DQN("MlpPolicy", environment, policy_kwargs=kwargs, device="cpu", **{**usual, **settings})
    model.set_logger(configure(format_strings=[]))
    return model


def test_our_learner_makes_the_same_steps_as_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle has Huber's loss: half the square below one. With half of eps, Adam makes the same steps."""
    environment = SynchronizationEnv(DIGITS, small, SETTINGS.state)
    model, learner = oracle(environment, buffer_size=32, learning_starts=0), dqn.DqnLearner(SETTINGS, DIGITS)
    ours = [layer for layer in learner.network if isinstance(layer, torch.nn.Linear)]
    theirs = [layer for layer in model.q_net.q_net if isinstance(layer, torch.nn.Linear)]
    with torch.no_grad():
        for one, other in zip(ours, theirs, strict=True):
            one.weight.copy_(other.weight)
            one.bias.copy_(other.bias)
    learner.target.load_state_dict(learner.network.state_dict())
    # Both learn from the same mini-batch in the same order: the whole replay pool.
    monkeypatch.setattr("torch.randint", lambda *_, **__: torch.arange(32))
    monkeypatch.setattr(model.replay_buffer, "sample", lambda *_, **__: model.replay_buffer._get_samples(np.arange(32)))
    chance = np.random.default_rng(0)
    state, _ = environment.reset(seed=1)
    ends = 0
    for _ in range(32):
        action = chance.integers(3)
        after, reward, reached, truncated, _ = environment.step(action)
        reward *= 0.1
        done = np.array([reached or truncated], np.float32)
        notes = [{"TimeLimit.truncated": truncated}]  # the oracle bootstraps from such a state
        model.replay_buffer.add(state[None], after[None], np.array([[action]]), np.array([reward]), done, notes)
        learner.store(
            torch.from_numpy(state)[None],
            torch.tensor([int(action)]),
            torch.tensor([reward], dtype=torch.float32),
            torch.from_numpy(after)[None],
            torch.tensor([float(reached)]),
        )
        ends += reached
        state = environment.reset(seed=2 + ends)[0] if reached or truncated else after
    assert ends > 0, "an episode has reached its target"
    before = [layer.weight.detach().clone() for layer in theirs]
    for _ in range(STEPS - 1):  # the first one came with the last transition
        learner._train()
    model.train(gradient_steps=STEPS, batch_size=32)
    for one, other, was in zip(ours, theirs, before, strict=True):
        assert not torch.allclose(other.weight, was, atol=1e-3), "the steps have an effect"
        torch.testing.assert_close(one.weight, other.weight, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one.bias, other.bias, rtol=1e-3, atol=1e-4)


def test_the_oracle_can_learn_in_our_environment() -> None:
    environment = SynchronizationEnv(DIGITS, small, SETTINGS.state)
    model = oracle(environment, buffer_size=50, learning_starts=32, train_freq=1, target_update_interval=5)
    model.learn(total_timesteps=100)
    action, _ = model.predict(environment.reset(seed=3)[0])
    assert int(action) in (0, 1, 2)
