"""A fleet trains exactly the models that the simulated cluster trains, but many at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from paceline.model.correction import CorrectionOption
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.policies import Policy, make
from paceline.rlp.evaluate import CORRECTED, YARDSTICK
from paceline.rlp.features import StateFeatures
from paceline.rlp.fleet import Fleet
from paceline.rlp.fleet_correction import CorrectedFleet
from paceline.rlp.fleet_state import FleetState
from paceline.rlp.instance import PUSH, Instance, drawn, unseen
from paceline.rlp.network_file import SHIPPED, save
from paceline.rlp.network_file import load as load_weights
from paceline.rlp.policy import RLP
from paceline.rlp.rollout import Guard, follow, play
from paceline.rlp.rule_network import QNetwork, RulePlayer, greedy, weights_of
from paceline.rlp.rules import RULES, Rule, named_rule
from paceline.rlp.update_order import update_order
from paceline.simulate.cluster import Cluster
from paceline.simulate.task import Task
from paceline.simulate.training import Shares, Training
from paceline.workloads.data import Data, load
from pairs import parametrize_pairs

DIGITS = load("digits")
SLEEPS = ((0.3, 1.0, 0.3), (1.0, 0.1, 0.05), (1.0, 2.0, 0.5), (1.0, 0.1, 0.05))


def instance(seed: int = 5, momentum: float = 0.0, hidden: int = 1, transfer: float = 0.0) -> Instance:
    steps = (1.0, 1.05, 0.95, 1.1)
    made = Instance(seed, steps, SLEEPS, hidden, rate=0.02, momentum=momentum, dataset="digits", budget=60)
    return replace(made, transfer=transfer)


def trained(
    what: Instance, policy: Policy, rounds: int, data: Data = DIGITS, corrected: bool = False
) -> tuple[Training, float]:
    """Train an instance on the simulated cluster. Return the training, and the simulated seconds."""
    settings = {"lr": what.rate, "momentum": what.momentum}
    correct: CorrectionOption = "auto" if corrected else "none"
    task = Task(f"dnn{what.hidden}", data, OptimizerSpec("SGD", (settings,)), what.seed, correct=correct)
    chosen = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(what.seed))
    chosen = chosen[: int(what.share * len(data.labels))]
    shares = Shares([chosen[worker :: what.workers] for worker in range(what.workers)], what.seed)
    training = Training(task, what.workers, shares=shares)
    result = Cluster(what.cluster(), policy, rounds, what.seed, model=training).run()
    return training, result.simulated_seconds


def flat(fleet: Fleet, row: int = 0) -> torch.Tensor:
    """Return a model in the simulator's layout: for each layer, weights (outputs, inputs) and then biases."""
    pairs = zip(fleet.layers[::2], fleet.layers[1::2], strict=True)
    return torch.cat([each for weight, bias in pairs for each in (weight[row].T.reshape(-1), bias[row].reshape(-1))])


@parametrize_pairs(
    ("spec", "transfer", "momentum"),
    [
        *("bsp", "asp", "ssp:staleness=2", "dssp:low=1,high=3", "ksync:k=2", "kbatch:k=3", "r2sp", "r2sp:groups=2"),
        *("r2sp corrected", "r2sp:groups=2 corrected"),
    ],
    (0.0, 0.4),
    (0.0, 0.9),
)
def test_following_a_policys_order_trains_what_the_cluster_trains(spec: str, transfer: float, momentum: float) -> None:
    what, plain = instance(momentum=momentum, transfer=transfer), spec.removesuffix(CORRECTED)
    training, _ = trained(what, make(plain), 10, corrected=plain != spec)
    order = update_order(what, make(plain))
    worker, step, seconds, completes, turns, pulled_by = (
        torch.from_numpy(each)[None] for each in order.arrays(what.budget, what.workers)
    )
    fleet = Fleet([what], DIGITS) if plain == spec else CorrectedFleet([what], DIGITS)
    applied = training.outcome.updates
    for at in range(applied):
        fleet.draw(int(step[0, at]) + 1)
        fleet.receive(worker[:, at], seconds[:, at], step[:, at])
        if isinstance(fleet, CorrectedFleet):
            fleet.turns, fleet.ahead = turns[:, at].float(), pulled_by[:, at].clamp(min=0).float()
        fleet.apply(completes[:, at])
        fleet.pull(pulled_by[:, at] >= 0)
    assert applied >= 30
    torch.testing.assert_close(flat(fleet), training.slice.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("rule", "spec"), [(Rule(0), "asp"), (Rule(1), "bsp"), (Rule(bound=1), "ssp:staleness=1")])
def test_rules_act_as_the_policies_they_are_named_after(rule: Rule, spec: str, momentum: float) -> None:
    if rule.bound >= 0 and momentum:
        pytest.skip("SSP applies the update of a waiting worker at once, which makes a difference with momentum")
    what = instance(momentum=momentum)
    training, seconds = trained(what, make(spec), 8)
    fleet, guard = Fleet([what], DIGITS), Guard(Fleet([what], DIGITS))
    chooser = RulePlayer(None, (rule,), torch.zeros(1, dtype=torch.int64))
    while fleet.updates < training.outcome.updates:
        tick = fleet.next_arrivals()
        action, _ = chooser(torch.zeros(1, 1), fleet, tick, torch.zeros(1, dtype=torch.int64))
        granted = guard.granted(action, fleet, tick)
        fleet.apply(granted.any(1))
        fleet.grant(granted)
    assert float(fleet.now) <= seconds + 1e-9
    fleet.apply(torch.tensor([rule.bound >= 0]))  # SSP has applied the pending updates already
    torch.testing.assert_close(flat(fleet), training.slice.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spec", [each for each in YARDSTICK if not each.startswith("rlp")])
def test_an_order_lasts_until_the_budget_is_spent(spec: str, seed: int) -> None:
    """Two workers with so much jitter that updates still wait for their turn when the simulation ends are included."""
    unsteady = Instance(seed, (0.9, 1.05), ((0.3, 4.5, 1.5),) * 2, budget=1500)
    for each in update_order(unsteady, make(spec.removesuffix(CORRECTED))).arrays(1500, 2):
        assert len(each) == 1500


@parametrize_pairs(
    ("rule", "transfer", "hidden"),
    ("shipped", "sees links", "asp", "50%", "bsp", "ssp-2", "run-3"),
    (0.0, 0.03, 0.3, 2.0),
    (0, 2),
)
def test_the_policy_on_a_cluster_and_its_network_in_a_fleet_agree(
    hidden: int, transfer: float, rule: str, tmp_path: Path
) -> None:
    """Features, rules and the order of updates are the same, to the last update."""
    what = instance(hidden=hidden, momentum=0.5, transfer=transfer)
    follows = rule in ("shipped", "sees links")
    name = SHIPPED
    if rule == "sees links":
        torch.manual_seed(3)
        save(weights_of(QNetwork(StateFeatures().size, len(RULES)), StateFeatures(), RULES), tmp_path / "network")
        name = str(tmp_path / "network")
    policy = make(f"rlp:network={name}" if follows else f"rlp:rule={rule}")
    seen = load_weights(name).state
    assert isinstance(policy, RLP)
    choices: list[int] = []
    states: list[list[float]] = []
    times: list[float] = []
    arrived = policy.arrived

    def recorded(*arguments):  # type: ignore[no-untyped-def]
        decisions = arrived(*arguments)
        choices.append(policy.choice if follows else RULES.index(named_rule(rule)))
        states.append(policy.cluster_state.vector(what.workers, seen))
        times.append(arguments[1])
        return decisions

    policy.arrived = recorded  # type: ignore[method-assign]
    training, _ = trained(what, policy, 12)
    fleet = Fleet([what], DIGITS)
    fleet_state, guard = FleetState(fleet, seen), Guard(fleet)
    if follows:
        chooser = greedy(load_weights(name), 1, "cpu")
    else:
        chooser = RulePlayer(None, RULES, torch.tensor([RULES.index(named_rule(rule))]))
    fleet_choices: list[int] = []
    while fleet.updates < len(choices):
        tick = fleet.next_arrivals()
        assert float(fleet.now) == pytest.approx(times[len(fleet_choices)], rel=1e-9)
        state = fleet_state.observe(fleet, tick)
        torch.testing.assert_close(state[0], torch.tensor(states[len(fleet_choices)]), rtol=1e-3, atol=1e-4)
        action, number = chooser(state, fleet, tick, torch.zeros(1, dtype=torch.int64))
        fleet_choices.append(int(number))
        granted = guard.granted(action, fleet, tick)
        if fleet.updates < len(choices):
            fleet.apply(granted.any(1))
            fleet.grant(granted)
    assert len(choices) >= 48
    assert fleet_choices == choices
    fleet.apply(granted.any(1))
    torch.testing.assert_close(flat(fleet), training.slice.weights, rtol=1e-3, atol=1e-4)


def test_workers_that_are_granted_together_pull_one_by_one() -> None:
    """Four workers compute for 1 s, and a pull takes 1 s. In a queue, the first pushes while the last still pulls."""
    even = replace(instance(transfer=1.0), steps=(1.0,) * 4, sleeps=((0.0, 0.0, 0.0),) * 4)
    queued, shared = (
        Cluster(even.cluster(), make(spec), 40, 1).run().simulated_seconds / 40 for spec in ("rlp:rule=bsp", "bsp")
    )
    assert make("rlp").one_by_one
    assert not make("bsp").one_by_one
    assert queued == pytest.approx(1 + 1 + 4 * PUSH, rel=0.01)
    assert shared == pytest.approx(4 + 1 + 4 * PUSH, rel=0.01)


def test_the_clusters_of_a_fleet_do_not_influence_each_other() -> None:
    some = [replace(instance(seed), target=0.6, budget=200) for seed in (1, 2, 3)]
    rules = torch.tensor([0, 9, 10])
    together = play(some, DIGITS, RulePlayer(None, RULES, rules), StateFeatures())
    for at, each in enumerate(some):
        alone = play([each], DIGITS, RulePlayer(None, RULES, rules[at : at + 1]), StateFeatures())
        assert bool(alone.reached) == bool(together.reached[at])
        assert int(alone.updates) == int(together.updates[at])
        assert float(alone.seconds) == pytest.approx(float(together.seconds[at]))
    assert len(set(together.updates.tolist())) > 1, "they end at different times"


def test_an_episode_that_cannot_reach_its_target_fails_when_its_budget_is_spent() -> None:
    hopeless = replace(instance(), target=1.01)
    ended = play([hopeless], DIGITS, RulePlayer(None, RULES, torch.zeros(1, dtype=torch.int64)), StateFeatures())
    assert not bool(ended.reached)
    assert int(ended.updates) == hopeless.budget
    again = follow([hopeless], [update_order(hopeless, make("asp"))], DIGITS)
    assert not bool(again.reached)
    assert int(again.updates) == hopeless.budget
    assert float(again.seconds) == pytest.approx(float(ended.seconds))


def test_a_training_that_diverges_fails() -> None:
    wild = replace(instance(hidden=2), rate=1e6)
    ended = play([wild], DIGITS, RulePlayer(None, RULES, torch.zeros(1, dtype=torch.int64)), StateFeatures())
    assert not bool(ended.reached)
    assert float(ended.seconds) > 0


@pytest.mark.parametrize("action", range(4))
def test_whatever_the_action_a_worker_runs_and_none_waits_forever(action: int) -> None:
    fleet = Fleet([instance()], DIGITS)
    guard = Guard(fleet)
    begun = fleet.steps.clone()
    since = dict.fromkeys(range(4), 0)
    for _ in range(120):
        tick = fleet.next_arrivals()
        since[int(tick.worker)] = fleet.updates
        granted = guard.granted(torch.tensor([action]), fleet, tick)
        assert bool((granted | ~fleet.idle).any())
        waiting = (fleet.idle & ~granted)[0].nonzero()[:, 0].tolist()
        assert all(fleet.updates - since[worker] < 3 * 4 for worker in waiting)
        fleet.apply(granted.any(1))
        fleet.grant(granted)
    assert bool((fleet.steps > begun + 4).all())


def test_the_unseen_instances_are_as_they_were_drawn() -> None:
    """They are the instances of consecutive seeds, so none was selected, and none may be corrected afterwards."""
    every = [*unseen(1), *unseen(2), *unseen(3)]
    assert len(every) == 300
    for number, each in enumerate(every):
        again = drawn(number)
        assert each.steps == pytest.approx(again.steps, abs=1e-4)
        assert each.sleeps == tuple(pytest.approx(sleep, abs=1e-4) for sleep in again.sleeps)
        assert (each.hidden, each.momentum, each.budget) == (again.hidden, again.momentum, again.budget)
        assert each.rate == pytest.approx(again.rate, rel=1e-3)
