"""Deep Q-learning as in the paper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from paceline.policies import make
from paceline.rlp.dqn import DqnLearner, DqnSettings
from paceline.rlp.features import ALL, ITSELF, WAIT, StateFeatures
from paceline.rlp.instance import Instance, drawn
from paceline.rlp.network_file import save
from paceline.rlp.rollout import play
from paceline.rlp.rule_network import network_of
from paceline.rlp.rules import ACTIONS
from paceline.workloads.data import load

DIGITS = load("digits")
SMALL = DqnSettings(pretraining=4, parallel=4, budget=40, depths=(0, 1), size="bundled", workers=4)


def test_the_defaults_are_the_papers() -> None:
    s = DqnSettings()
    assert (s.memory, s.batch, s.copy_every, s.discount, s.epsilon, s.rate) == (50, 32, 5, 0.8, 0.1, 0.01)
    assert s.state == StateFeatures(history=10, scene=False, validated=True)
    assert [rule.action(10, 3, 1) for rule in s.rules] == [WAIT, ITSELF, ALL]


@pytest.mark.slow
def test_a_seed_determines_the_network_and_the_network_is_a_policy(tmp_path: Path) -> None:
    def learned(seed: int) -> DqnLearner:
        learner = DqnLearner(replace(SMALL, seed=seed), DIGITS)
        learner.pretrain()
        learner.learn(8)
        assert learner.episodes == 8
        return learner

    one, again, other = learned(0), learned(0), learned(1)
    weights = [torch.cat([each.flatten() for each in learner.network.parameters()]) for learner in (one, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    path = tmp_path / "paper.safetensors"
    save(one.weights(), path)
    policy = make(f"rlp:network={path}")
    assert policy.joined(0, 0.0)


def test_q_approaches_the_papers_target() -> None:
    """The target is r + γ max Q*. That of double Q is Q* of the action that Q prefers, which is never more."""
    chance = torch.Generator().manual_seed(0)
    previous, state = (torch.rand(32, SMALL.state.size, generator=chance) for _ in range(2))
    action, reward = torch.randint(3, (32,), generator=chance), -torch.rand(32, generator=chance)
    values = {}
    for double in (False, True):
        settings = replace(SMALL, memory=32, rate=3e-3, double=double, copy_every=10**9, discount=0.9)
        learner = DqnLearner(settings, DIGITS)
        with torch.no_grad():
            learner.target[-1].weight.mul_(4)  # type: ignore[operator]  # so that the values of Q* differ
            target = reward + 0.9 * learner.target(state).max(1).values
            first = learner.network(previous).gather(1, action[:, None])[:, 0]
        for _ in range(15):
            learner.store(previous, action, reward, state, torch.zeros(32))
        with torch.no_grad():
            values[double] = learner.network(previous).gather(1, action[:, None])[:, 0]
    assert float((values[False] - target).square().mean()) < 0.1 * float((first - target).square().mean())
    assert float(values[True].mean()) < float(values[False].mean())


def test_q_is_copied_to_the_target_network_every_c_steps() -> None:
    learner = DqnLearner(replace(SMALL, memory=32, batch=32), DIGITS)
    row = torch.rand(1, SMALL.state.size)

    def same() -> bool:
        pairs = zip(learner.network.parameters(), learner.target.parameters(), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    for _ in range(31):
        learner.store(row, torch.tensor([0]), torch.tensor([-1.0]), row, torch.zeros(1))
    assert same(), "training starts with the first whole mini-batch"
    seen = []
    for _ in range(10):
        learner.store(row, torch.tensor([0]), torch.tensor([-1.0]), row, torch.zeros(1))
        seen.append(same())
    assert seen == [False] * 4 + [True] + [False] * 4 + [True]
    assert len(ACTIONS) == 3


def test_algorithm_2_returns_the_target_network() -> None:
    learner = DqnLearner(replace(SMALL, memory=32, copy_every=10**9), DIGITS)
    row = torch.rand(1, SMALL.state.size)
    for _ in range(40):
        learner.store(row, torch.tensor([0]), torch.tensor([-1.0]), row, torch.zeros(1))
    with torch.no_grad():
        values = network_of(learner.weights())(row)
        torch.testing.assert_close(values, learner.target(row))
        assert not torch.allclose(values, learner.network(row), atol=1e-2)


@pytest.mark.slow
def test_nothing_follows_the_target() -> None:
    """Q of the action that reaches the target is its reward alone, and Q of the action before it the sum of two.

    Without a terminal state, every Q would approach the sum of an endless series of rewards.
    """
    settings = replace(SMALL, memory=48, rate=3e-3, discount=0.9)
    learner = DqnLearner(settings, DIGITS)
    first, last = torch.eye(settings.state.size)[:1], torch.eye(settings.state.size)[1:2]
    every, reward = torch.arange(3), torch.ones(3)
    for _ in range(150):
        learner.store(first.expand(3, -1), every, -reward, last.expand(3, -1), torch.zeros(3))
        learner.store(last.expand(3, -1), every, -0.5 * reward, last.expand(3, -1), torch.ones(3))
    with torch.no_grad():
        q = learner.network(torch.cat([first, last]))[:, 0]
    assert q[1].item() == pytest.approx(-0.5, abs=0.03)
    assert q[0].item() == pytest.approx(-1.0 + 0.9 * -0.5, abs=0.03)


@pytest.mark.parametrize("target", [0.3, 1.01])
def test_an_episode_feeds_the_pool_until_it_ends_and_only_the_target_is_terminal(
    target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some episodes end sooner than others, and are played on with the others for a while."""
    stored: list[tuple[int, int]] = []  # number of transitions, and of terminal ones
    updates: list[int] = []
    reached: list[int] = []

    def easy(seed: int, workers: int, hidden: int, size: str) -> Instance:
        return replace(drawn(seed, workers, hidden, size=size), target=target, rate=0.002 * (1 + seed % 4))

    def played(*arguments, **options):  # type: ignore[no-untyped-def]
        episodes = play(*arguments, **options)
        updates.extend(episodes.updates.tolist())
        reached.extend(episodes.reached.long().tolist())
        return episodes

    monkeypatch.setattr("paceline.rlp.dqn.drawn", easy)
    monkeypatch.setattr("paceline.rlp.dqn.play", played)
    learner = DqnLearner(replace(SMALL, depths=(0,), parallel=12), DIGITS)
    monkeypatch.setattr(learner, "store", lambda *each: stored.append((len(each[0]), int(each[4].sum()))))
    learner.learn(12)
    assert sum(count for count, _ in stored) == sum(updates) - 12 + sum(reached)
    assert sum(terminal for _, terminal in stored) == sum(reached)
    assert sum(reached) == (12 if target < 1 else 0)
    assert len(set(updates)) > 1 or target > 1, "they end at different times"
