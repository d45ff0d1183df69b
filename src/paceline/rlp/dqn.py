"""Deep Q-learning as in the paper (algorithm 2): single actions, and one training step for every update.

It is the baseline for `learner.py`. The defaults are the paper's settings; common changes (a larger replay pool, a
larger discount factor, double Q) are options. Several episodes are played at once, and share the networks and the pool.

The paper's return is minus the time until the target accuracy. So the state in which the target is reached is terminal:
no reward follows, and Q of the action that leads there is not bootstrapped. An episode that spends its budget of
updates, or diverges, has not reached the target. It is cut off, not ended: its last transition is bootstrapped as any
other. Without a terminal state, the sum of −Δt would only reward many updates per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from paceline.rlp.features import StateFeatures
from paceline.rlp.fleet import Fleet, FleetTick, Tensor
from paceline.rlp.instance import Instance, drawn
from paceline.rlp.network_file import NetworkWeights
from paceline.rlp.rollout import play
from paceline.rlp.rule_network import QNetwork, RulePlayer, weights_of
from paceline.rlp.rules import ACTIONS, RING, Rule
from paceline.workloads.data import Data

#: BSP, ASP, and SSP with s = 2, 5 and 8. The paper's SSP waits at a lead of s, and these rules beyond their bound.
PRETRAINED_BY = (Rule(1), Rule(0), *(Rule(bound=s - 1) for s in (2, 5, 8)))


@dataclass(frozen=True)
class DqnSettings:
    """The hyperparameters. The defaults are the paper's, except `parallel`."""

    seed: int = 0
    state: StateFeatures = field(default_factory=lambda: StateFeatures(scene=False, validated=True))
    ring: bool = False
    memory: int = 50  # N: the size of the replay pool
    batch: int = 32  # |B|
    copy_every: int = 5  # C: training steps between copies of Q to the target network Q*
    discount: float = 0.8  # γ
    epsilon: float = 0.1  # ε
    rate: float = 0.01
    double: bool = False  # Q chooses the action that Q* evaluates (van Hasselt et al. 2016)
    pretraining: int = 100  # instances for pre-training, each under five policies; 0: none
    parallel: int = 32  # episodes that are played at once
    budget: int = 800  # updates of an episode
    depths: tuple[int, ...] = (0, 1, 2, 3)
    size: str = "tiny"
    workers: int = 10

    @property
    def rules(self) -> tuple[Rule, ...]:
        return (*ACTIONS, RING) if self.ring else ACTIONS


class DqnLearner:
    """Q, the target network Q*, and the replay pool D."""

    def __init__(self, settings: DqnSettings, data: Data) -> None:
        self.settings, self._data = settings, data
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.network, self.target = (QNetwork(settings.state.size, len(settings.rules)) for _ in range(2))
        self.target.load_state_dict(self.network.state_dict())
        self._optimizer = torch.optim.Adam(self.network.parameters(), settings.rate)
        self._chance = torch.Generator().manual_seed(settings.seed)
        size = settings.state.size
        # The replay pool D holds transitions (S′, a, r, S), and whether S is terminal. S′ is the state before S.
        self._previous, self._state = (torch.zeros(settings.memory, size) for _ in range(2))
        self._action = torch.zeros(settings.memory, dtype=torch.int64)
        self._reward, self._done = (torch.zeros(settings.memory) for _ in range(2))
        self._stored = self._steps = self._played = 0
        self.episodes = 0

    def pretrain(self) -> float:
        """Fit Q to the true cumulative reward −t under five fixed policies. Return the last squared loss.

        t is the time left until the end of the episode.
        """
        s = self.settings
        states, actions, rewards = [], [], []
        for instances in self._instances(s.pretraining):
            repeated = [instance for instance in instances for _ in PRETRAINED_BY]
            numbers = torch.arange(len(PRETRAINED_BY)).repeat(len(instances))
            chooser = _ActionsOf(RulePlayer(None, PRETRAINED_BY, numbers))
            episodes = play(repeated, self._data, chooser, s.state, record=lambda *_: True)
            for record in episodes.records:
                running = record.episode >= 0
                episode = record.episode[running]
                states.append(record.state[running])
                actions.append(record.choice[running])
                rewards.append(record.seconds[running] - episodes.seconds[episode].float())
        state, action, cumulative_reward = torch.cat(states), torch.cat(actions), torch.cat(rewards)
        error = torch.zeros(())
        for _ in range(len(state) // s.batch):
            index = torch.randint(len(state), (s.batch,), generator=self._chance)
            error = self._fit(state[index], action[index], cumulative_reward[index])
        self.target.load_state_dict(self.network.state_dict())
        return float(error)

    def learn(self, episodes: int, report: Callable[[int, float], None] | None = None) -> None:
        """Play episodes and learn from every update.

        report: called with the number of episodes so far, and the mean seconds of the newest ones.
        """
        for instances in self._instances(episodes):
            chooser = _EpsilonGreedy(self, len(instances))
            episodes_ended = play(instances, self._data, chooser, self.settings.state, ended=chooser.ended)
            self.episodes += len(instances)
            if report:
                report(self.episodes, float(episodes_ended.seconds.mean()))

    def weights(self) -> NetworkWeights:
        """Return the weights of Q*, which algorithm 2 returns for inference."""
        return weights_of(self.target, self.settings.state, self.settings.rules)

    def store(self, previous: Tensor, action: Tensor, reward: Tensor, state: Tensor, done: Tensor) -> None:
        """Store transitions in the replay pool, in place of the oldest. Train Q once for each.

        done: whether the target was reached, so that `state` is terminal.
        """
        s = self.settings
        for row in range(len(previous)):
            at = self._stored % s.memory
            self._previous[at], self._action[at] = previous[row], action[row]
            self._reward[at], self._state[at], self._done[at] = reward[row], state[row], done[row]
            self._stored += 1
            if self._stored >= s.batch:
                self._train()

    def _train(self) -> None:
        """Train Q on a mini-batch B of the replay pool. Copy Q to Q* every C steps."""
        s = self.settings
        index = torch.randint(min(self._stored, s.memory), (s.batch,), generator=self._chance)
        with torch.no_grad():
            values = self.target(self._state[index])
            if s.double:
                best = self.network(self._state[index]).argmax(1, keepdim=True)
                value = values.gather(1, best)[:, 0]
            else:
                value = values.max(1).values
        value = s.discount * value * (1 - self._done[index])
        self._fit(self._previous[index], self._action[index], self._reward[index] + value)
        self._steps += 1
        if self._steps % s.copy_every == 0:
            self.target.load_state_dict(self.network.state_dict())

    def _fit(self, state: Tensor, action: Tensor, target: Tensor) -> Tensor:
        """Make one optimizer step of Q(S, a) towards a target. Return the squared loss."""
        q = self.network(state).gather(1, action[:, None])[:, 0]
        loss = (q - target).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        detached: Tensor = loss.detach()
        return detached

    def _instances(self, count: int) -> Iterator[list[Instance]]:
        """Yield `count` new instances, in lots that have the same depth and are played at once."""
        s = self.settings
        for at in range(0, count, s.parallel):
            depth = s.depths[at // s.parallel % len(s.depths)]
            first = 2_000_000 + s.seed * 10_000_019 + self._played
            seeds = range(first, first + min(s.parallel, count - at))
            self._played += len(seeds)
            yield [replace(drawn(seed, s.workers, depth, size=s.size), budget=s.budget) for seed in seeds]


class _ActionsOf:
    """A chooser that follows rules and reports the actions instead of the rules as its choices."""

    def __init__(self, inner: RulePlayer) -> None:
        self._inner = inner

    def __call__(self, state: Tensor, fleet: Fleet, tick: FleetTick, rows: Tensor) -> tuple[Tensor, Tensor]:
        action, _ = self._inner(state, fleet, tick, rows)
        return action, action


class _EpsilonGreedy:
    """Chooses ε-greedily by the target network, and stores a transition at every update of a running episode."""

    def __init__(self, learner: DqnLearner, episodes: int) -> None:
        self._learner = learner
        self._previous = torch.zeros(episodes, learner.settings.state.size)
        self._action = torch.zeros(episodes, dtype=torch.int64)
        self._runs = torch.ones(episodes, dtype=torch.bool)

    def __call__(self, state: Tensor, fleet: Fleet, tick: FleetTick, rows: Tensor) -> tuple[Tensor, Tensor]:
        learner, s = self._learner, self._learner.settings
        if fleet.updates > 1:
            runs = self._runs[rows]
            reward, which = -tick.seconds.float()[runs], rows[runs]
            learner.store(self._previous[which], self._action[which], reward, state[runs], torch.zeros(len(which)))
        with torch.no_grad():
            action = learner.target(state).argmax(1)
        random_action = torch.randint(len(s.rules), (fleet.E,), generator=learner._chance)
        explores = torch.rand(fleet.E, generator=learner._chance) < s.epsilon
        action = torch.where(explores, random_action, action)
        self._previous[rows], self._action[rows] = state, action
        return action, action

    def ended(self, episodes: Tensor, reached: Tensor) -> None:
        """Store the last transitions of episodes that have reached their targets. They took no further time."""
        self._runs[episodes] = False
        which = episodes[reached]
        last, nothing = self._previous[which], torch.zeros(len(which))
        self._learner.store(last, self._action[which], nothing, last, torch.ones(len(which)))
