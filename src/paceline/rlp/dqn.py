"""Deep Q-learning as in the paper (algorithm 2): a step of learning for every update, over single actions.

Kept beside `learner.py` to compare with. The paper's settings are the default ones; what is usual elsewhere (a larger
memory, a longer view, double Q) can be set. Several episodes are played at once, and share one network and one memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from paceline.rlp.features import StateFeatures
from paceline.rlp.fleet import Fleet, FleetTick, Tensor
from paceline.rlp.instance import Instance, drawn
from paceline.rlp.rollout import play
from paceline.rlp.rule_network import QNetwork, RulePlayer
from paceline.rlp.rules import ACTIONS, RING, RULES, Rule
from paceline.workloads.data import Data

PRETRAINED_BY = (Rule(1), Rule(0), Rule(bound=2), Rule(bound=5), Rule(bound=8))


@dataclass(frozen=True)
class DqnSettings:
    """The paper's, but for the number of episodes that are played at once."""

    seed: int = 0
    state: StateFeatures = field(default_factory=lambda: StateFeatures(scene=False, validated=True))
    ring: bool = False
    memory: int = 50  # N: transitions in the replay pool
    batch: int = 32  # |B|
    copied: int = 5  # C: steps after which the target network is the other one's copy
    discount: float = 0.8  # γ
    explore: float = 0.1  # ε
    rate: float = 0.01
    double: bool = False  # the action is chosen by one network and valued by the other (van Hasselt et al. 2016)
    pretraining: int = 100  # instances, under each of five policies; 0: none
    together: int = 32  # episodes
    budget: int = 800  # updates
    depths: tuple[int, ...] = (0, 1, 2, 3)
    size: str = "tiny"
    workers: int = 10

    @property
    def rules(self) -> tuple[Rule, ...]:
        return (*ACTIONS, RING) if self.ring else ACTIONS


class DqnLearner:
    """Q, Q*, and the replay pool."""

    def __init__(self, settings: DqnSettings, data: Data) -> None:
        self.settings, self._data = settings, data
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.network, self.target = (QNetwork(settings.state.size, len(settings.rules)) for _ in range(2))
        self.target.load_state_dict(self.network.state_dict())
        self._optimizer = torch.optim.Adam(self.network.parameters(), settings.rate)
        self._chance = torch.Generator().manual_seed(settings.seed)
        size = settings.state.size
        self._before, self._after = (torch.zeros(settings.memory, size) for _ in range(2))
        self._action = torch.zeros(settings.memory, dtype=torch.int64)
        self._reward = torch.zeros(settings.memory)
        self._stored = self._steps = self._played = 0
        self.episodes = 0

    def pretrain(self) -> float:
        """Regress Q on the true time left, under five fixed policies; the mean square of what is left unexplained."""
        s = self.settings
        states, actions, lefts = [], [], []
        for instances in self._instances(s.pretraining):
            rules = (*RULES, Rule(bound=8))
            again = [instance for instance in instances for _ in PRETRAINED_BY]
            numbers = torch.tensor([rules.index(rule) for rule in PRETRAINED_BY]).repeat(len(instances))
            ended = play(
                again, self._data, _ByAction(RulePlayer(None, rules, numbers)), s.state, record=lambda *_: True
            )
            for moment in ended.moments:
                some = moment.episode >= 0
                episode = moment.episode[some]
                states.append(moment.state[some])
                actions.append(moment.choice[some])
                lefts.append(moment.seconds[some] - ended.seconds[episode].float())
        state, action, left = torch.cat(states), torch.cat(actions), torch.cat(lefts)
        error = torch.zeros(())
        for _ in range(len(state) // s.batch):
            index = torch.randint(len(state), (s.batch,), generator=self._chance)
            error = self._step(state[index], action[index], left[index])
        self.target.load_state_dict(self.network.state_dict())
        return float(error)

    def learn(self, episodes: int, told: Callable[[int, float], None] | None = None) -> None:
        """Play and learn; `told` hears the number of episodes so far, and the mean seconds of the newest ones."""
        for instances in self._instances(episodes):
            chooser = _Learning(self, len(instances))
            ended = play(instances, self._data, chooser, self.settings.state)
            self.episodes += len(instances)
            if told:
                told(self.episodes, float(ended.seconds.mean()))

    def store(self, before: Tensor, action: Tensor, reward: Tensor, after: Tensor) -> None:
        """Transitions, of which the oldest make room; and a step of learning for each."""
        s = self.settings
        for row in range(len(before)):
            at = self._stored % s.memory
            self._before[at], self._action[at] = before[row], action[row]
            self._reward[at], self._after[at] = reward[row], after[row]
            self._stored += 1
            if self._stored >= s.batch:
                self._learn()

    def _learn(self) -> None:
        s = self.settings
        index = torch.randint(min(self._stored, s.memory), (s.batch,), generator=self._chance)
        with torch.no_grad():
            after = self.target(self._after[index])
            if s.double:
                best = self.network(self._after[index]).argmax(1, keepdim=True)
                value = after.gather(1, best)[:, 0]
            else:
                value = after.max(1).values
        self._step(self._before[index], self._action[index], self._reward[index] + s.discount * value)
        self._steps += 1
        if self._steps % s.copied == 0:
            self.target.load_state_dict(self.network.state_dict())

    def _step(self, state: Tensor, action: Tensor, worth: Tensor) -> Tensor:
        q = self.network(state).gather(1, action[:, None])[:, 0]
        loss = (q - worth).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        found: Tensor = loss.detach()
        return found

    def _instances(self, count: int) -> Iterator[list[Instance]]:
        """So many new ones, in lots of one depth that are played at once."""
        s = self.settings
        for at in range(0, count, s.together):
            depth = s.depths[at // s.together % len(s.depths)]
            first = 2_000_000 + s.seed * 10_000_019 + self._played
            seeds = range(first, first + min(s.together, count - at))
            self._played += len(seeds)
            yield [replace(drawn(seed, s.workers, depth, size=s.size), budget=s.budget) for seed in seeds]


class _ByAction:
    """Says which action is taken, instead of by which rule."""

    def __init__(self, inner: RulePlayer) -> None:
        self._inner = inner

    def __call__(self, state: Tensor, fleet: Fleet, tick: FleetTick, rows: Tensor) -> tuple[Tensor, Tensor]:
        action, _ = self._inner(state, fleet, tick, rows)
        return action, action


class _Learning:
    """ε-greedy by the target network, with a lesson from every update."""

    def __init__(self, learner: DqnLearner, episodes: int) -> None:
        self._learner = learner
        self._state = torch.zeros(episodes, learner.settings.state.size)
        self._action = torch.zeros(episodes, dtype=torch.int64)

    def __call__(self, state: Tensor, fleet: Fleet, tick: FleetTick, rows: Tensor) -> tuple[Tensor, Tensor]:
        learner, s = self._learner, self._learner.settings
        if fleet.updates > 1:
            learner.store(self._state[rows], self._action[rows], -tick.seconds.float(), state)
        with torch.no_grad():
            action = learner.target(state).argmax(1)
        anything = torch.randint(len(s.rules), (fleet.E,), generator=learner._chance)
        explores = torch.rand(fleet.E, generator=learner._chance) < s.explore
        action = torch.where(explores, anything, action)
        self._state[rows], self._action[rows] = state, action
        return action, action
