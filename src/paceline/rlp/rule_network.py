"""The Q-network, and how it chooses rules for many clusters at once."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from paceline.rlp.features import ALL, CHOICE_WEIGHT, ITSELF, NEXT, WAIT, StateFeatures, is_due
from paceline.rlp.fleet import Fleet, FleetTick, Tensor
from paceline.rlp.network_file import NetworkWeights
from paceline.rlp.rules import Rule, last_a_round


class QNetwork(nn.Sequential):
    """Q, as in the paper: two hidden layers of 64 and 32 units with leaky rectifiers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Linear(inputs, 64), nn.LeakyReLU(), nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, outputs)
        )


def network_of(weights: NetworkWeights) -> QNetwork:
    """Return the network with the weights of a file."""
    network = QNetwork(weights.state.size, len(weights.rules))
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer, (weight, bias) in zip(layers, weights.layers, strict=True):
            layer.weight.copy_(torch.from_numpy(weight.T.copy()))
            layer.bias.copy_(torch.from_numpy(bias))
    return network


def weights_of(network: QNetwork, state: StateFeatures, rules: tuple[Rule, ...]) -> NetworkWeights:
    """Return the weights of a network, as a file holds them."""
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    pairs = ((layer.weight.detach().cpu().T.contiguous(), layer.bias.detach().cpu()) for layer in layers)
    return NetworkWeights(state, rules, tuple((weight.numpy(), bias.numpy()) for weight, bias in pairs))


def actions_of(rule: Tensor, rules: tuple[Rule, ...], fleet: Fleet, tick: FleetTick) -> Tensor:
    """Return the actions (E,) that the rules with these numbers (E,) take now: `Rule.action` for each cluster."""
    quorum, bound, only, limit = (table[rule] for table in _tables(rules, fleet.N, fleet.device))
    done = fleet.steps - (~fleet.idle).long()
    lead = done.gather(1, tick.worker[:, None])[:, 0] - done.min(1).values
    idle = fleet.idle.sum(1)
    by_count = torch.where(idle >= quorum, ALL, WAIT)
    by_lead = torch.where(lead > bound, WAIT, torch.where(lead == 0, ALL, ITSELF))
    action = torch.where(only >= 0, only, torch.where(bound >= 0, by_lead, by_count))
    wanted = limit - (fleet.N - idle)
    return torch.where(limit >= 0, torch.where(wanted > 0, NEXT + wanted, WAIT), action)


@lru_cache
def _tables(rules: tuple[Rule, ...], workers: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the quorums, bounds, fixed actions and limits of these rules."""
    table = [(rule.quorum(workers), rule.bound, rule.only, rule.running) for rule in rules]
    return tuple(torch.tensor(each, device=device) for each in zip(*table, strict=True))


class RulePlayer:
    """Chooses rules: the network's choice, or a rule to explore. A choice lasts a round; of single actions, one update.

    Episode e plays rule first[e] until update switch[e], then second[e] until update ends[e], and then the network's
    choice. −1 in first or second also stands for the network's choice.
    """

    def __init__(
        self,
        network: nn.Module | None,
        rules: tuple[Rule, ...],
        first: Tensor,
        second: Tensor | None = None,
        switch: Tensor | None = None,
        ends: Tensor | None = None,
        averages: bool = False,
    ) -> None:
        """averages: choose by a mean of Q over recent rounds, which has less noise than Q."""
        self._averages = averages
        self._rules, self._lasts = rules, last_a_round(rules)
        self._network, self._first = network, first
        self._second = first if second is None else second
        self._switch = torch.zeros_like(first) if switch is None else switch
        self._ends = torch.full_like(first, 2**40) if ends is None else ends
        self._rule = first.clone()
        self._q = torch.zeros(len(first), len(rules), device=first.device)  # means over rounds
        self._choices = 0

    def __call__(self, state: Tensor, fleet: Fleet, tick: FleetTick, rows: Tensor) -> tuple[Tensor, Tensor]:
        if is_due(fleet.updates, fleet.N, self._lasts):
            chosen = torch.where(fleet.updates < self._switch[rows], self._first[rows], self._second[rows])
            chosen = torch.where(fleet.updates < self._ends[rows], chosen, -1)
            if self._network is not None:
                chosen = torch.where(chosen < 0, self._best(state, rows), chosen)
            self._rule[rows] = chosen
        rule = self._rule[rows]
        return actions_of(rule, self._rules, fleet, tick), rule

    def _best(self, state: Tensor, rows: Tensor) -> Tensor:
        """Return the rules with the highest Q."""
        assert self._network is not None
        self._choices += 1
        with torch.no_grad():
            q: Tensor = self._network(state)
        if self._averages:
            self._q[rows] += max(CHOICE_WEIGHT, 1 / self._choices) * (q - self._q[rows])
            q = self._q[rows]
        return q.argmax(1)


def greedy(weights: NetworkWeights, episodes: int, device: str | torch.device) -> RulePlayer:
    """Return a player that always follows the network."""
    first = torch.full((episodes,), -1, device=device)
    return RulePlayer(network_of(weights).to(device), weights.rules, first, averages=weights.averages)
