"""Learns Q: how much earlier than usual an episode reaches its target if it follows a rule from a state on.

The effect of a single action among hundreds is lost in the noise. So an action lasts: the learner explores a rule for
several rounds. It plays each instance many times, under different rules. For every choice, it compares the time that
was left after it with the usual time that is left on the same instance from the same loss on. The network learns the
logarithm of this ratio for the chosen rule.

In pre-training, the first iteration, each episode follows one fixed rule and then another, so that every rule is seen
after every other. In later iterations, episodes follow the network, except while they explore a rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from paceline.rlp.features import StateFeatures, is_due
from paceline.rlp.instance import Instance, drawn
from paceline.rlp.process_pool import table
from paceline.rlp.rollout import Episodes, play
from paceline.rlp.rule_network import QNetwork, RulePlayer
from paceline.rlp.rules import RING, RULES, Rule
from paceline.workloads.data import Data

Tensor = torch.Tensor

LEVELS = 20  # levels of the loss at which the usual time left is computed
SOONEST = 0.2  # share of an instance's best time that is added to the time left, since the exact end is noise
PART = 32  # instances of ten workers to play at once; memory is the limit
FIXED = (Rule(0), Rule(1), Rule(bound=2), Rule(running=3))  # rules under which every instance is played


@dataclass(frozen=True)
class LearnerSettings:
    """The hyperparameters of a learner."""

    seed: int = 0
    state: StateFeatures = field(default_factory=StateFeatures)
    ring: bool = False  # whether the network can also choose turns in the order of a ring
    links: bool = True  # whether the workers of some instances share a link
    instances: int = 128  # per iteration
    times: int = 16  # episodes of each instance
    greedy: int = 3  # of these episodes, the number that follow the network throughout
    budget: int = 800  # updates of an episode
    kept: int = 6  # number of recent iterations whose episodes are learned from: the replay pool
    fits: int = 1200  # optimizer steps in an iteration
    batch: int = 16_384
    rate: float = 2e-3
    failed: float = 1.5  # time that a failed episode counts, in budgets
    pretrained: bool = True
    depths: tuple[int, ...] = (0, 1, 2, 3)  # numbers of hidden layers; instances take turns
    size: str = "tiny"
    workers: tuple[int, ...] = (10,)  # numbers of workers; instances take turns

    @property
    def rules(self) -> tuple[Rule, ...]:
        return (*RULES, RING) if self.ring else RULES


class Lessons(NamedTuple):
    """Training examples: a state, the rule that was chosen in it, and the value of that choice."""

    states: Tensor
    rules: Tensor
    worth: Tensor  # logarithm of the usual time left, divided by the actual time left


class EpisodeShare(NamedTuple):
    """The outcomes of a part of an iteration's episodes."""

    lessons: Lessons
    log: Tensor  # logarithm of the seconds of each episode (instances, times)
    failed: Tensor


@dataclass(frozen=True)
class LearningProgress:
    """The results of an iteration. Times are relative to the best rule of FIXED, and noisy.

    The best rule of an instance is partly best by chance.
    """

    iteration: int
    episodes: int  # so far
    network: float  # mean time of episodes that follow the network
    trying: float  # mean time of episodes that explore
    fixed: dict[str, float]  # mean time under each rule of FIXED
    failed: float  # share of the episodes that follow the network and fail
    error: float  # root mean square error of Q


class RuleLearner:
    """Learns in iterations. The same settings give the same network on the same device."""

    def __init__(
        self, settings: LearnerSettings, data: Data, device: str = "cpu", pool: Executor | None = None
    ) -> None:
        """pool: processes that play episodes in parallel (`paceline.rlp.process_pool`)."""
        self.settings, self._data, self._device, self._pool = settings, data, device, pool
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.network = QNetwork(settings.state.size, len(settings.rules)).to(device)
        self.kept: deque[Lessons] = deque(maxlen=settings.kept)
        self.iteration = 0

    def iterate(self, progress: Callable[[int, int], None] | None = None) -> LearningProgress:
        """Play the episodes of one iteration, and learn from them and from recent ones.

        progress: called with the number of parts that are done, and of all parts.
        """
        s = self.settings
        shares = []
        parts = list(self._parts())
        for done, share in enumerate(self._play(parts), 1):
            shares.append(share)
            if progress:
                progress(done, len(parts))
        lessons = Lessons(*(torch.cat(each) for each in zip(*(share.lessons for share in shares), strict=True)))
        self.kept.append(lessons)
        error = self._fit()
        self.iteration += 1
        log, failed = (torch.cat(each) for each in zip(*((share.log, share.failed) for share in shares), strict=True))
        fixed = log[:, s.greedy : s.greedy + len(FIXED)]
        best = fixed.min(1, keepdim=True).values
        ratios = {str(rule): float(each.exp().mean()) for rule, each in zip(FIXED, (fixed - best).T, strict=True)}
        greedy, trying = log[:, : s.greedy] - best, log[:, s.greedy + len(FIXED) :] - best
        return LearningProgress(
            self.iteration,
            self.iteration * s.instances * s.times,
            float(greedy.exp().mean()),
            float(trying.exp().mean()),
            ratios,
            float(failed[:, : s.greedy].float().mean()),
            error,
        )

    def _parts(self) -> Iterator[tuple[int, list[Instance]]]:
        """Yield the instances of this iteration in numbered parts, the largest first.

        The instances of a part have the same shape, so that they can be played at once.
        """
        s = self.settings
        first = s.seed * 10_000_019 + 1_000_000 + self.iteration * s.instances
        shapes: dict[tuple[int, int], list[int]] = {}
        for at in range(s.instances):
            shape = s.depths[at % len(s.depths)], s.workers[at // len(s.depths) % len(s.workers)]
            shapes.setdefault(shape, []).append(first + at)
        number = 0
        for (depth, workers), seeds in sorted(shapes.items(), reverse=True):
            at_once = max(1, PART * 10 // workers) if s.size == "whole" and depth else 4 * PART
            for begin in range(0, len(seeds), at_once):
                instances = [
                    drawn(seed, workers, depth, size=s.size, links=s.links) for seed in seeds[begin : begin + at_once]
                ]
                yield number, [replace(instance, budget=s.budget) for instance in instances]
                number += 1

    def _play(self, parts: list[tuple[int, list[Instance]]]) -> Iterator[EpisodeShare]:
        """Play these parts, in the pool if there is one."""
        weights = {name: each.cpu().numpy() for name, each in self.network.state_dict().items()}
        tasks = [
            (self.settings, self.iteration, number, instances, weights, self._device) for number, instances in parts
        ]
        if self._pool:
            for lessons, log, failed in self._pool.map(_play_in_pool, repeat(self._data.name), tasks):
                yield EpisodeShare(
                    Lessons(*map(torch.from_numpy, lessons)), torch.from_numpy(log), torch.from_numpy(failed)
                )
        else:
            for task in tasks:
                yield _play_part(self._data, *task)

    def _fit(self) -> float:
        """Fit the network to the kept lessons. Return the root mean square error of the last steps."""
        s = self.settings
        states, rules, worth = (torch.cat(each).to(self._device) for each in zip(*self.kept, strict=True))
        chance = torch.Generator().manual_seed(s.seed * 1_000_003 + self.iteration)
        optimizer = torch.optim.Adam(self.network.parameters(), s.rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, s.fits)
        total = 0.0
        for step in range(s.fits):
            index = torch.randint(len(states), (min(s.batch, len(states)),), generator=chance).to(self._device)
            q = self.network(states[index].float()).gather(1, rules[index].long()[:, None])[:, 0]
            loss = (q - worth[index]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step >= s.fits - 50:
                total += float(loss.detach()) / min(50, s.fits)
        return math.sqrt(total)


PartTask = tuple[LearnerSettings, int, int, list[Instance], dict[str, NDArray[Any]], str]
PartArrays = tuple[tuple[NDArray[Any], ...], NDArray[Any], NDArray[Any]]


def _play_in_pool(name: str, task: PartTask) -> PartArrays:
    """Play a part in a process of the pool.

    The result consists of arrays, since torch would send tensors through shared files that have to be removed.
    """
    share = _play_part(table(name), *task)
    return tuple(each.numpy() for each in share.lessons), share.log.numpy(), share.failed.numpy()


def _play_part(
    data: Data,
    s: LearnerSettings,
    iteration: int,
    part: int,
    instances: list[Instance],
    weights: dict[str, NDArray[Any]],
    device: str,
) -> EpisodeShare:
    """Play each instance `times` times: following the network, under fixed rules, and exploring."""
    chance = torch.Generator().manual_seed((s.seed * 100_003 + iteration) * 101 + part)
    network = QNetwork(s.state.size, len(s.rules)).to(device)
    network.load_state_dict({name: torch.from_numpy(each) for name, each in weights.items()})
    shape = (len(instances), s.times)
    first, second = (torch.randint(len(s.rules), shape, generator=chance) for _ in range(2))
    switch = (torch.rand(shape, generator=chance) * 300).long()
    ends = torch.full(shape, s.budget + 1)
    if iteration or not s.pretrained:  # explore one rule for some updates, from the start or from later on
        later = torch.rand(shape, generator=chance) < 0.5
        first, second = torch.where(later, -1, first), torch.where(later, second, first)
        switch = torch.where(later, switch, 0)
        ends = switch + (20 + torch.rand(shape, generator=chance) ** 2 * 300).long()
        first[:, : s.greedy] = second[:, : s.greedy] = -1
    at = slice(s.greedy, s.greedy + len(FIXED))
    first[:, at] = second[:, at] = torch.tensor([s.rules.index(rule) for rule in FIXED])
    ends[:, at] = s.budget + 1
    first, second, switch, ends = (each.flatten().to(device) for each in (first, second, switch, ends))
    chooser = RulePlayer(network, s.rules, first, second, switch, ends, averages=s.state.links)
    repeated = [instance for instance in instances for _ in range(s.times)]
    episodes = play(repeated, data, chooser, s.state, device, record=is_due)
    seconds = torch.where(episodes.reached, episodes.seconds, s.failed * episodes.seconds).float()
    lessons = Lessons(*(each.cpu() for each in _lessons(episodes, seconds, s.times)))
    return EpisodeShare(lessons, seconds.log().view(shape).cpu(), ~episodes.reached.view(shape).cpu())


def _lessons(episodes: Episodes, ends: Tensor, times: int) -> Lessons:
    """Return the lessons of episodes. ends: the time of each episode."""
    instances = len(ends) // times
    best = ends.view(instances, times).sort(1).values[:, 1]  # the second best is hardly ever the best by chance alone
    states, rules, lefts, groups = [], [], [], []
    for record in episodes.records:
        running = record.episode >= 0
        episode = record.episode[running]
        level = (-4 * record.loss[running].clamp(1e-3, 10).log()).round().long().clamp(-4, LEVELS - 5) + 4
        states.append(record.state[running])
        rules.append(record.choice[running])
        lefts.append(((ends[episode] - record.seconds[running]) / best[episode // times] + SOONEST).log())
        groups.append((episode // times) * LEVELS + level)
    group, left = torch.cat(groups), torch.cat(lefts)
    sums = torch.zeros(instances * LEVELS, device=left.device).index_add_(0, group, left)
    counts = torch.zeros_like(sums).index_add_(0, group, torch.ones_like(left))
    usual = (sums / counts.clamp(min=1))[group]
    return Lessons(torch.cat(states).half(), torch.cat(rules).to(torch.int8), usual - left)
