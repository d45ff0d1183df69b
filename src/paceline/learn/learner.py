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

from paceline.learn.behaviour import Greedy, Mixed, Network, Rules
from paceline.learn.instance import Instance, drawn
from paceline.learn.rollout import Episodes, State, play
from paceline.learn.watch import size
from paceline.workloads.data import Data

Tensor = torch.Tensor


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    state: State = State()
    actions: int = 3
    instances: int = 96  # an iteration's
    times: int = 16  # each is played
    greedy: int = 3  # of these times, as the network says
    rules: int = 7  # of these times, by fixed rules
    lean: float = 0.15  # deviation of what the others lean by
    budget: int = 1000  # updates
    kept: int = 4  # iterations' episodes are learned from
    share: float = 0.3  # of the updates
    fits: int = 1200  # steps of the optimizer in an iteration
    batch: int = 8192
    rate: float = 2e-3
    failed: float = 1.5  # what a failure counts, in budgets
    levels: float = 0.25  # what loss levels differ by, in logarithms
    pretrained: bool = True


class Learner:
    def __init__(self, settings: Settings, data: Data, device: str = "cpu") -> None:
        self.settings, self._data, self._device = settings, data, device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.network = Network(size(settings.state.history, settings.state.scene), settings.actions).to(device)
        self._chance = torch.Generator().manual_seed(settings.seed)
        self._kept: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=settings.kept)
        self.iteration = 0
        self.episodes = 0

    def iterate(self, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """Play, and learn from it."""
        s = self.settings
        first = self.iteration == 0 and s.pretrained
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        logs: list[Tensor] = []
        failures: list[Tensor] = []
        seeds = [s.seed * 10_000_019 + 1_000_000 + self.iteration * s.instances + each for each in range(s.instances)]
        by_depth: dict[int, list[Instance]] = {}
        for seed in seeds:
            instance = replace(drawn(seed), budget=s.budget)
            by_depth.setdefault(instance.hidden, []).append(instance)
        for instances in by_depth.values():
            episodes = self._play(instances, first)
            found.append(self._lessons(episodes, len(instances)))
            logs.append(torch.where(episodes.reached, episodes.seconds, s.failed * episodes.seconds).log().view(-1, s.times))
            failures.append((~episodes.reached).float().view(-1, s.times))
        self._kept.append(tuple(torch.cat(each) for each in zip(*found, strict=True)))  # type: ignore[arg-type]
        error = self._fit()
        self.iteration += 1
        self.episodes += s.instances * s.times
        log, failed = torch.cat(logs), torch.cat(failures)
        r = s.times - s.rules
        base = log[:, r : r + 5].min(1).values
        one = lambda columns: float((log[:, columns] - base[:, None]).mean().exp())  # noqa: E731
        return {
            "greedy": one(slice(0, s.greedy)),
            "leaning": one(slice(s.greedy, r)),
            "asp": one(slice(r, r + 1)),
            "bsp": one(slice(r + 1, r + 2)),
            "ssp2": one(slice(r + 2, r + 3)),
            "failed": float(failed[:, : s.greedy].mean()),
            "error": error,
        }

    def _play(self, instances: list[Instance], first: bool) -> Episodes:
        """Every instance in a row: greedy, leaning, then ASP, BSP, SSP (2, 5, 8) and rules that change."""
        s, N, M = self.settings, instances[0].workers, len(instances)
        shape = (M, s.times)
        rules = s.times if first else s.rules
        by_network = torch.arange(s.times).expand(shape) < s.times - rules
        k = torch.randint(1, N + 1, shape, generator=self._chance)
        bound = torch.full(shape, -1)
        at = s.times - rules
        k[:, at], k[:, at + 1] = 1, N
        bound[:, at + 2], bound[:, at + 3], bound[:, at + 4] = 2, 5, 8
        lean = s.lean * torch.randn(*shape, s.actions, generator=self._chance)
        lean[:, : s.greedy] = 0
        device = self._device
        self._rules = Rules(k.flatten().to(device), bound.flatten().to(device))
        greedy = Greedy(self.network, lean.flatten(0, 1).to(device))
        chooser = Mixed(greedy, self._rules, by_network.flatten().to(device))
        repeated = [instance for instance in instances for _ in range(s.times)]
        return play(repeated, self._data, chooser, s.state, device, record=True)

    def _lessons(self, episodes: Episodes, instances: int) -> tuple[Tensor, Tensor, Tensor]:
        s = self.settings
        ends = torch.where(episodes.reached, episodes.seconds, s.failed * episodes.seconds).float()
        states, actions, lefts, groups = [], [], [], []
        for state, action, seconds, loss, rows in episodes.ticks:
            # A share of them is enough: one update is much like the next.
            valid = rows >= 0
            rows = rows.clamp(min=0)
            left = (ends[rows] - seconds).clamp(min=0.3).log()
            level = (-loss.clamp(1e-3, 10).log() / s.levels).round().long().clamp(-4, 15) + 4
            group = (rows // s.times) * 20 + level
            some = (torch.rand(len(rows), generator=self._chance).to(rows.device) < s.share) & valid
            states.append(state[some])
            actions.append(action[some])
            lefts.append(left[some])
            groups.append(group[some])
        group, left = torch.cat(groups), torch.cat(lefts)
        sums = torch.zeros(instances * 20, device=left.device).index_add_(0, group, left)
        counts = torch.zeros_like(sums).index_add_(0, group, torch.ones_like(left))
        usual = (sums / counts.clamp(min=1))[group]
        return torch.cat(states), torch.cat(actions).long(), (usual - left).clamp(-2, 2)

    def _fit(self) -> float:
        s = self.settings
        states, actions, worth = (torch.cat(each) for each in zip(*self._kept, strict=True))
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
