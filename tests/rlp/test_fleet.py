"""A fleet trains exactly what the simulated cluster trains, only many at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from paceline.model.optimizer import OptimizerSpec
from paceline.policies import Policy, make
from paceline.rlp.evaluate import FIXED
from paceline.rlp.features import StateFeatures
from paceline.rlp.fleet import Fleet
from paceline.rlp.fleet_state import FleetState
from paceline.rlp.instance import Instance, drawn, unseen
from paceline.rlp.network_file import SHIPPED
from paceline.rlp.network_file import load as load_weights
from paceline.rlp.policy import RLP
from paceline.rlp.rollout import Guard, play, replay
from paceline.rlp.rule_network import RulePlayer, greedy, network_of
from paceline.rlp.rules import RULES, Rule
from paceline.rlp.update_order import update_order
from paceline.simulate.cluster import Cluster
from paceline.simulate.task import Task
from paceline.simulate.training import Shares, Training
from paceline.workloads.data import Data, load

DIGITS = load("digits")
SLEEPS = ((0.3, 1.0, 0.3), (1.0, 0.1, 0.05), (1.0, 2.0, 0.5), (1.0, 0.1, 0.05))


def instance(seed: int = 5, momentum: float = 0.0, hidden: int = 1) -> Instance:
    return Instance(
        seed, (1.0, 1.05, 0.95, 1.1), SLEEPS, hidden, rate=0.02, momentum=momentum, dataset="digits", budget=60
    )


def trained(what: Instance, policy: Policy, rounds: int, data: Data = DIGITS) -> tuple[Training, float]:
    """The same on the simulated cluster."""
    settings = {"lr": what.rate, "momentum": what.momentum}
    task = Task(f"dnn{what.hidden}", data, OptimizerSpec("SGD", (settings,)), what.seed)
    chosen = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(what.seed))
    chosen = chosen[: int(what.share * len(data.labels))]
    shares = Shares([chosen[worker :: what.workers] for worker in range(what.workers)], what.seed)
    training = Training(task, what.workers, shares=shares)
    result = Cluster(what.cluster(), policy, rounds, what.seed, model=training).run()
    return training, result.simulated_seconds


def flat(fleet: Fleet, row: int = 0) -> torch.Tensor:
    """Its model as the simulator has it: weights (outputs, inputs), then biases, layer by layer."""
    pairs = zip(fleet.layers[::2], fleet.layers[1::2], strict=True)
    return torch.cat([each for weight, bias in pairs for each in (weight[row].T.reshape(-1), bias[row].reshape(-1))])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("spec", ["bsp", "asp", "ssp:staleness=2", "dssp:low=1,high=3", "r2sp"])
def test_following_a_policys_order_trains_what_the_cluster_trains(spec: str, momentum: float) -> None:
    what = instance(momentum=momentum)
    training, _ = trained(what, make(spec), 10)
    noted = update_order(what, make(spec))
    worker, seconds, whole, given = (torch.from_numpy(each)[None] for each in noted.arrays(what.budget, what.workers))
    fleet = Fleet([what], DIGITS)
    applied = training.outcome.updates
    for at in range(applied):
        fleet.take(worker[:, at], seconds[:, at])
        fleet.apply(whole[:, at])
        fleet.go(given[:, at])
    assert applied >= 30
    torch.testing.assert_close(flat(fleet), training.slice.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("rule", "spec"), [(Rule(0), "asp"), (Rule(1), "bsp"), (Rule(bound=1), "ssp:staleness=1")])
def test_rules_are_the_policies_that_they_are_named_after(rule: Rule, spec: str, momentum: float) -> None:
    if rule.bound >= 0 and momentum:
        pytest.skip("SSP applies an update that is let wait for by itself, and momentum sees the difference")
    what = instance(momentum=momentum)
    training, seconds = trained(what, make(spec), 8)
    fleet, guard = Fleet([what], DIGITS), Guard(Fleet([what], DIGITS))
    chooser = RulePlayer(None, (rule,), torch.zeros(1, dtype=torch.int64))
    while fleet.updates < training.outcome.updates:
        tick = fleet.arrive()
        action, _ = chooser(torch.zeros(1, 1), fleet, tick, torch.zeros(1, dtype=torch.int64))
        who = guard.let_go(action, fleet, tick)
        fleet.apply(who.any(1))
        fleet.go(who)
    assert float(fleet.now) <= seconds + 1e-9
    fleet.apply(torch.tensor([rule.bound >= 0]))  # what SSP has applied already
    torch.testing.assert_close(flat(fleet), training.slice.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spec", FIXED)
def test_an_order_lasts_until_the_budget_is_spent(spec: str, seed: int) -> None:
    """Also where two workers are so unsteady that what has come in waits for its turn when the simulation ends."""
    unsteady = Instance(seed, (0.9, 1.05), ((0.3, 4.5, 1.5),) * 2, budget=1500)
    for each in update_order(unsteady, make(spec)).arrays(1500, 2):
        assert len(each) == 1500


@pytest.mark.parametrize("hidden", [0, 2])
def test_the_policy_does_on_the_cluster_what_its_network_does_in_a_fleet(hidden: int) -> None:
    """Features, rules and the order of updates are the same in both, to the last update."""
    what = instance(hidden=hidden, momentum=0.5)
    policy = make("rlp")
    assert isinstance(policy, RLP)
    choices: list[int] = []
    states: list[list[float]] = []
    told = policy.arrived

    def noted(*arguments):  # type: ignore[no-untyped-def]
        decisions = told(*arguments)
        choices.append(policy.rule)
        states.append(policy.sight.state(what.workers, StateFeatures()))
        return decisions

    policy.arrived = noted  # type: ignore[method-assign]
    training, _ = trained(what, policy, 12)
    fleet = Fleet([what], DIGITS)
    watch, guard = FleetState(fleet, StateFeatures()), Guard(fleet)
    chooser = greedy(network_of(load_weights(SHIPPED)), RULES, 1, "cpu")
    ours: list[int] = []
    while fleet.updates < len(choices):
        tick = fleet.arrive()
        seen = watch.see(fleet, tick)
        torch.testing.assert_close(seen[0], torch.tensor(states[len(ours)]), rtol=1e-3, atol=1e-4)
        action, rule = chooser(seen, fleet, tick, torch.zeros(1, dtype=torch.int64))
        ours.append(int(rule))
        who = guard.let_go(action, fleet, tick)
        if fleet.updates < len(choices):
            fleet.apply(who.any(1))
            fleet.go(who)
    assert len(choices) >= 48
    assert ours == choices
    fleet.apply(who.any(1))
    torch.testing.assert_close(flat(fleet), training.slice.weights, rtol=1e-3, atol=1e-4)


def test_a_cluster_does_not_feel_the_others_beside_it() -> None:
    some = [replace(instance(seed), target=0.6, budget=200) for seed in (1, 2, 3)]
    rules = torch.tensor([0, 9, 10])
    together = play(some, DIGITS, RulePlayer(None, RULES, rules), StateFeatures())
    for at, each in enumerate(some):
        alone = play([each], DIGITS, RulePlayer(None, RULES, rules[at : at + 1]), StateFeatures())
        assert bool(alone.reached) == bool(together.reached[at])
        assert int(alone.updates) == int(together.updates[at])
        assert float(alone.seconds) == pytest.approx(float(together.seconds[at]))
    assert len(set(together.updates.tolist())) > 1, "they were to end at different times"


def test_what_can_never_be_reached_ends_at_the_budget_and_says_so() -> None:
    hopeless = replace(instance(), target=1.01)
    ended = play([hopeless], DIGITS, RulePlayer(None, RULES, torch.zeros(1, dtype=torch.int64)), StateFeatures())
    assert not bool(ended.reached)
    assert int(ended.updates) == hopeless.budget
    again = replay([hopeless], [update_order(hopeless, make("asp"))], DIGITS)
    assert not bool(again.reached)
    assert int(again.updates) == hopeless.budget
    assert float(again.seconds) == pytest.approx(float(ended.seconds))


def test_a_training_that_diverges_is_over() -> None:
    wild = replace(instance(hidden=2), rate=1e6)
    ended = play([wild], DIGITS, RulePlayer(None, RULES, torch.zeros(1, dtype=torch.int64)), StateFeatures())
    assert not bool(ended.reached)
    assert float(ended.seconds) > 0


@pytest.mark.parametrize("action", range(4))
def test_whatever_is_chosen_somebody_runs_and_nobody_waits_for_ever(action: int) -> None:
    fleet = Fleet([instance()], DIGITS)
    guard = Guard(fleet)
    begun = fleet.steps.clone()
    since = dict.fromkeys(range(4), 0)
    for _ in range(120):
        tick = fleet.arrive()
        since[int(tick.worker)] = fleet.updates
        who = guard.let_go(torch.tensor([action]), fleet, tick)
        assert bool((who | ~fleet.idle).any())
        waiting = (fleet.idle & ~who)[0].nonzero()[:, 0].tolist()
        assert all(fleet.updates - since[worker] < 3 * 4 for worker in waiting)
        fleet.apply(who.any(1))
        fleet.go(who)
    assert bool((fleet.steps > begun + 4).all())


def test_the_unseen_instances_are_as_they_were_drawn() -> None:
    """One seed after the other: nobody has picked them, and nobody is to put them right afterwards."""
    every = [*unseen(1), *unseen(2), *unseen(3)]
    assert len(every) == 300
    for number, each in enumerate(every):
        again = drawn(number)
        assert each.steps == pytest.approx(again.steps, abs=1e-4)
        assert each.sleeps == tuple(pytest.approx(sleep, abs=1e-4) for sleep in again.sleeps)
        assert (each.hidden, each.momentum, each.budget) == (again.hidden, again.momentum, again.budget)
        assert each.rate == pytest.approx(again.rate, rel=1e-3)
