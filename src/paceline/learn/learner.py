"""Learning Q: what is left to wait, in logarithms, from a state on if one keeps to an action.

One action among hundreds makes no difference that chance would not drown. So what is tried is kept to: every episode
leans towards some actions from its first update to its last, or follows a rule. An instance is played many times under
different leanings; of each update, the time that was left is compared with what is usual on that very instance from
such a loss on. The network learns that, for the action that was taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from paceline.learn.behaviour import RULES, Network, Rule, Trying
from paceline.learn.instance import Instance, drawn
from paceline.learn.rollout import Episodes, State, play
from paceline.learn.watch import size
from paceline.workloads.data import Data

Tensor = torch.Tensor


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    state: State = State()
    instances: int = 96  # an iteration's
    times: int = 16  # each is played
    greedy: int = 3  # of these times, as the network says all through
    budget: int = 1000  # updates
    kept: int = 4  # iterations' episodes are learned from
    fits: int = 1200  # steps of the optimizer in an iteration
    batch: int = 8192
    rate: float = 2e-3
    failed: float = 1.5  # what a failure counts, in budgets
    levels: float = 0.25  # what loss levels differ by, in logarithms
    worst: float = 4.0
    depths: tuple[int, ...] = (0, 1, 2, 3)
    small: bool = True


FIXED = tuple(RULES.index(rule) for rule in (Rule(0), Rule(1), Rule(bound=2), Rule(bound=5)))  # played every time


class Learner:
    def __init__(self, settings: Settings, data: Data, device: str = "cpu") -> None:
        self.settings, self._data, self._device = settings, data, device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.network = Network(size(settings.state.history, settings.state.scene), len(RULES)).to(device)
        self._chance = torch.Generator().manual_seed(settings.seed)
        self._kept: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=settings.kept)
        self._first = None
        self.iteration = 0
        self.episodes = 0

    def iterate(self, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """Play, and learn from it."""
        s = self.settings
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        logs: list[Tensor] = []
        failures: list[Tensor] = []
        seeds = [s.seed * 10_000_019 + 1_000_000 + self.iteration * s.instances + each for each in range(s.instances)]
        by_depth: dict[int, list[Instance]] = {}
        for number, seed in enumerate(seeds):
            instance = replace(drawn(seed, hidden=s.depths[number % len(s.depths)], small=s.small), budget=s.budget)
            by_depth.setdefault(instance.hidden, []).append(instance)
        for instances in by_depth.values():
            episodes = self._play(instances)
            found.append(self._lessons(episodes, len(instances)))
            logs.append(torch.where(episodes.reached, episodes.seconds, s.failed * episodes.seconds).log().view(-1, s.times))
            failures.append((~episodes.reached).float().view(-1, s.times))
        new = tuple(torch.cat(each) for each in zip(*found, strict=True))
        if self.iteration == 0:
            self._first = new
        else:
            self._kept.append(new)
        error = self._fit()
        self.iteration += 1
        self.episodes += s.instances * s.times
        log, failed = torch.cat(logs), torch.cat(failures)
        fixed = log[:, s.greedy : s.greedy + len(FIXED)]
        best = fixed.min(1).values
        one = lambda which: float((which - best[:, None]).mean().exp())  # noqa: E731
        return {
            "greedy": one(log[:, : s.greedy]),
            "trying": one(log[:, s.greedy + len(FIXED) :]),
            **{str(RULES[rule]): one(fixed[:, index : index + 1]) for index, rule in enumerate(FIXED)},
            "failed": float(failed[:, : s.greedy].mean()),
            "error": error,
        }

    def _play(self, instances: list[Instance]) -> Episodes:
        """Each: as the network says, by fixed rules, and trying others for a while; at first, by rules alone."""
        s, M = self.settings, len(instances)
        shape = (M, s.times)
        rule = torch.randint(len(RULES), shape, generator=self._chance)
        begins = torch.zeros(shape, dtype=torch.int64)
        ends = torch.full(shape, s.budget + 1)
        if self.iteration:
            lasts = 20 + 200 * torch.rand(shape, generator=self._chance)
            begins = (torch.rand(shape, generator=self._chance) ** 2 * 400 - 50).clamp(min=0).long()
            ends = begins + lasts.long()
            ends[:, : s.greedy] = 0
        at = slice(s.greedy, s.greedy + len(FIXED))
        rule[:, at] = torch.tensor(FIXED)
        begins[:, at], ends[:, at] = 0, s.budget + 1
        device = self._device
        chooser = Trying(self.network, *(each.flatten().to(device) for each in (rule, begins, ends)))
        repeated = [instance for instance in instances for _ in range(s.times)]
        return play(repeated, self._data, chooser, s.state, device, record=True)

    def _lessons(self, episodes: Episodes, instances: int) -> tuple[Tensor, Tensor, Tensor]:
        """States, rules, and what they were worth: time saved after them, in times that the instance usually takes."""
        s = self.settings
        ends = torch.where(episodes.reached, episodes.seconds, s.failed * episodes.seconds).float()
        usual_end = ends.view(instances, s.times).sort(1).values[:, 1]  # hardly ever chance alone
        states, rules, lefts, groups = [], [], [], []
        for moment in episodes.moments:
            some = moment.episode >= 0
            episode = moment.episode[some]
            level = (-moment.loss[some].clamp(1e-3, 10).log() / s.levels).round().long().clamp(-4, 15) + 4
            states.append(moment.state[some])
            rules.append(moment.choice[some])
            lefts.append((ends[episode] - moment.seconds[some]) / usual_end[episode // s.times])
            groups.append((episode // s.times) * 20 + level)
        group, left = torch.cat(groups), torch.cat(lefts)
        sums = torch.zeros(instances * 20, device=left.device).index_add_(0, group, left)
        counts = torch.zeros_like(sums).index_add_(0, group, torch.ones_like(left))
        usual = (sums / counts.clamp(min=1))[group]
        return torch.cat(states), torch.cat(rules), (usual - left).clamp(-s.worst, s.worst)

    def _fit(self) -> float:
        s = self.settings
        kept = list(self._kept) + ([self._first] if self._first else [])
        states, actions, worth = (torch.cat(each) for each in zip(*kept, strict=True))
        optimizer = torch.optim.Adam(self.network.parameters(), s.rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, s.fits)
        total = 0.0
        for step in range(s.fits):
            index = torch.randint(len(states), (s.batch,), generator=self._chance).to(states.device)
            q = self.network(states[index]).gather(1, actions[index][:, None])[:, 0]
            loss = (q - worth[index]).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            if step >= s.fits - 50:
                total += float(loss.detach()) / 50
        return math.sqrt(total)
