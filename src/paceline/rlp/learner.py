"""Learning Q: how much sooner than usual the target is reached from a state on, if one goes by a rule.

One action among hundreds makes no difference that chance would not drown. So what is tried is kept to, for some
rounds. An instance is played many times, going by different rules; of every choice, the time that was left after it is
compared with what is usual on that very instance from such a loss on. The network learns the logarithm of that, for
the rule that was chosen.

First of all (pre-training) instances are played by fixed rules, each changed once for another, so that every rule is
seen after every other. From then on they are played as the network says, but for rules that are tried for a while.
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

LEVELS = 20  # of the loss
SOONEST = 0.2  # of the time an instance takes at best: what is added to the time left, since its end is chance
PART = 32  # instances of ten workers that are played at once: memory is what counts
FIXED = (Rule(0), Rule(1), Rule(bound=2), Rule(bound=5))  # that every instance is played by


@dataclass(frozen=True)
class LearnerSettings:
    """How to learn."""

    seed: int = 0
    state: StateFeatures = field(default_factory=StateFeatures)
    ring: bool = False  # may the network also choose to let workers go in the order of a ring?
    instances: int = 128  # of an iteration
    times: int = 16  # each is played
    greedy: int = 3  # of these times, as the network says all through
    budget: int = 800  # updates
    kept: int = 6  # iterations' episodes are learned from
    fits: int = 1200  # steps of the optimizer in an iteration
    batch: int = 16_384
    rate: float = 2e-3
    failed: float = 1.5  # what a failure counts, in budgets
    pretrained: bool = True
    depths: tuple[int, ...] = (0, 1, 2, 3)
    size: str = "tiny"
    workers: tuple[int, ...] = (10,)  # of one instance after the other

    @property
    def rules(self) -> tuple[Rule, ...]:
        return (*RULES, RING) if self.ring else RULES


class Lessons(NamedTuple):
    """What was chosen when, and what that was worth: in logarithms, how much sooner than usual the end came."""

    states: Tensor
    rules: Tensor
    worth: Tensor


class EpisodeShare(NamedTuple):
    """What a part of an iteration's episodes came to."""

    lessons: Lessons
    log: Tensor  # of each episode's seconds, (instances, times)
    failed: Tensor


@dataclass(frozen=True)
class LearningProgress:
    """How good it was in an iteration: times beside those of the best of FIXED, which is chance in part."""

    iteration: int
    episodes: int
    network: float
    trying: float
    fixed: dict[str, float]
    failed: float  # share of the episodes that went as the network said
    error: float  # of Q


class RuleLearner:
    """Learns, an iteration at a time. The same settings and the same device learn the same."""

    def __init__(
        self, settings: LearnerSettings, data: Data, device: str = "cpu", pool: Executor | None = None
    ) -> None:
        """pool: processes to play in, side by side (`paceline.rlp.process_pool`)."""
        self.settings, self._data, self._device, self._pool = settings, data, device, pool
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.network = QNetwork(settings.state.size, len(settings.rules)).to(device)
        self.kept: deque[Lessons] = deque(maxlen=settings.kept)
        self.iteration = 0

    def iterate(self, progress: Callable[[int, int], None] | None = None) -> LearningProgress:
        """Play, and learn from it. `progress` hears how many parts have been played, of how many."""
        s = self.settings
        shares = []
        parts = list(self._parts())
        for done, share in enumerate(self._shares(parts), 1):
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
        own, trying = log[:, : s.greedy] - best, log[:, s.greedy + len(FIXED) :] - best
        return LearningProgress(
            self.iteration,
            self.iteration * s.instances * s.times,
            float(own.exp().mean()),
            float(trying.exp().mean()),
            ratios,
            float(failed[:, : s.greedy].float().mean()),
            error,
        )

    def _parts(self) -> Iterator[tuple[int, list[Instance]]]:
        """The iteration's instances, those of one shape together since they are played at once; the most work first."""
        s = self.settings
        first = s.seed * 10_000_019 + 1_000_000 + self.iteration * s.instances
        shapes: dict[tuple[int, int], list[int]] = {}
        for at in range(s.instances):
            shape = s.depths[at % len(s.depths)], s.workers[at // len(s.depths) % len(s.workers)]
            shapes.setdefault(shape, []).append(first + at)
        number = 0
        for (depth, workers), seeds in sorted(shapes.items(), reverse=True):
            several = max(1, PART * 10 // workers) if s.size == "whole" and depth else 4 * PART
            for begin in range(0, len(seeds), several):
                instances = [drawn(seed, workers, depth, size=s.size) for seed in seeds[begin : begin + several]]
                yield number, [replace(instance, budget=s.budget) for instance in instances]
                number += 1

    def _shares(self, parts: list[tuple[int, list[Instance]]]) -> Iterator[EpisodeShare]:
        weights = {name: each.cpu().numpy() for name, each in self.network.state_dict().items()}
        asked = [
            (self.settings, self.iteration, number, instances, weights, self._device) for number, instances in parts
        ]
        if self._pool:
            for told in self._pool.map(_there, repeat(self._data.name), asked):
                lessons, log, failed = told
                yield EpisodeShare(
                    Lessons(*map(torch.from_numpy, lessons)), torch.from_numpy(log), torch.from_numpy(failed)
                )
        else:
            for each in asked:
                yield _played(self._data, *each)

    def _fit(self) -> float:
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


Asked = tuple[LearnerSettings, int, int, list[Instance], dict[str, NDArray[Any]], str]
Told = tuple[tuple[NDArray[Any], ...], NDArray[Any], NDArray[Any]]


def _there(name: str, asked: Asked) -> Told:
    """Played in another process. Tensors would be shared between processes, by files that have to be cleared away."""
    share = _played(table(name), *asked)
    return tuple(each.numpy() for each in share.lessons), share.log.numpy(), share.failed.numpy()


def _played(
    data: Data,
    s: LearnerSettings,
    iteration: int,
    part: int,
    instances: list[Instance],
    weights: dict[str, NDArray[Any]],
    device: str,
) -> EpisodeShare:
    """Each instance: as the network says, by fixed rules, and trying others for a while."""
    chance = torch.Generator().manual_seed((s.seed * 100_003 + iteration) * 101 + part)
    network = QNetwork(s.state.size, len(s.rules)).to(device)
    network.load_state_dict({name: torch.from_numpy(each) for name, each in weights.items()})
    shape = (len(instances), s.times)
    first, second = (torch.randint(len(s.rules), shape, generator=chance) for _ in range(2))
    switch = (torch.rand(shape, generator=chance) * 300).long()
    ends = torch.full(shape, s.budget + 1)
    if iteration or not s.pretrained:  # one rule for a while: from the start on, or later
        later = torch.rand(shape, generator=chance) < 0.5
        first, second = torch.where(later, -1, first), torch.where(later, second, first)
        switch = torch.where(later, switch, 0)
        ends = switch + (20 + torch.rand(shape, generator=chance) ** 2 * 300).long()
        first[:, : s.greedy] = second[:, : s.greedy] = -1
    at = slice(s.greedy, s.greedy + len(FIXED))
    first[:, at] = second[:, at] = torch.tensor([s.rules.index(rule) for rule in FIXED])
    ends[:, at] = s.budget + 1
    chooser = RulePlayer(network, s.rules, *(each.flatten().to(device) for each in (first, second, switch, ends)))
    again = [instance for instance in instances for _ in range(s.times)]
    episodes = play(again, data, chooser, s.state, device, record=is_due)
    seconds = torch.where(episodes.reached, episodes.seconds, s.failed * episodes.seconds).float()
    shown = EpisodeShare(_lessons(episodes, seconds, s.times), seconds.log().view(shape), ~episodes.reached.view(shape))
    return EpisodeShare(Lessons(*(each.cpu() for each in shown.lessons)), shown.log.cpu(), shown.failed.cpu())


def _lessons(episodes: Episodes, ends: Tensor, times: int) -> Lessons:
    instances = len(ends) // times
    best = ends.view(instances, times).sort(1).values[:, 1]  # the second best is hardly ever chance alone
    states, rules, lefts, groups = [], [], [], []
    for moment in episodes.moments:
        some = moment.episode >= 0
        episode = moment.episode[some]
        level = (-4 * moment.loss[some].clamp(1e-3, 10).log()).round().long().clamp(-4, LEVELS - 5) + 4
        states.append(moment.state[some])
        rules.append(moment.choice[some])
        lefts.append(((ends[episode] - moment.seconds[some]) / best[episode // times] + SOONEST).log())
        groups.append((episode // times) * LEVELS + level)
    group, left = torch.cat(groups), torch.cat(lefts)
    sums = torch.zeros(instances * LEVELS, device=left.device).index_add_(0, group, left)
    counts = torch.zeros_like(sums).index_add_(0, group, torch.ones_like(left))
    usual = (sums / counts.clamp(min=1))[group]
    return Lessons(torch.cat(states).half(), torch.cat(rules).to(torch.int8), usual - left)
