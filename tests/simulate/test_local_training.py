"""Clients that train by themselves: the same as torch's SGD, whichever way they are computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.model.optimizer_spec import OptimizerSpec
from paceline.policies import make
from paceline.simulate import load_cluster
from paceline.simulate.cluster_spec import ClusterSpec
from paceline.simulate.task import Goal, LocalSettings, Task
from paceline.simulate.training import Shares, Training, train
from paceline.workloads import networks
from paceline.workloads.data import load

DIGITS = load("digits")
CLIENTS = 8


def federation(clients: int = CLIENTS) -> ClusterSpec:
    spec = load_cluster("fl-cnn")
    return replace(spec, workers=spec.workers[:clients])


def task(network: str = "mlp", local: LocalSettings | None = None, **settings: float) -> Task:
    optimizer = OptimizerSpec("SGD", ({"lr": 0.05} | settings,))
    return Task(network, DIGITS, optimizer, seed=1, local=local or LocalSettings(5, 8))


def by_hand(of: Task, begins: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """What torch's own SGD makes of it."""
    assert of.local
    torch.manual_seed(of.seed)
    network = networks.make(of.network, of.data).train()
    torch.nn.utils.vector_to_parameters(begins.clone(), network.parameters())
    (settings,) = of.optimizer.settings_of_groups
    optimizer = torch.optim.SGD(network.parameters(), **settings)  # type: ignore[arg-type]
    for step in samples:
        optimizer.zero_grad()
        output = network(of.data.prepared(of.data.inputs[step]))
        loss = networks.loss(output, of.data.labels[step])
        if of.local.proximal:
            now = torch.nn.utils.parameters_to_vector(network.parameters())
            loss = loss + of.local.proximal / 2 * (now - begins).square().sum()
        torch.autograd.backward(loss)
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(network.parameters()).detach()


@pytest.mark.parametrize("network", ["mlp", "cnn", "lstm"])
@pytest.mark.parametrize(
    ("local", "settings"),
    [
        (LocalSettings(5, 8), {}),
        (LocalSettings(4, 8), {"momentum": 0.9, "weight_decay": 0.01}),
        (LocalSettings(4, 8, proximal=0.5), {"momentum": 0.5}),
    ],
)
def test_a_round_of_fedavg_is_the_mean_of_what_sgd_makes_of_each(
    network: str, local: LocalSettings, settings: dict[str, float]
) -> None:
    of = task(network, local, **settings)
    training = Training(of, CLIENTS)
    begins = training.slice.weights.clone()
    shares = Shares.dealt(len(DIGITS.labels), CLIENTS, of.seed)
    taken = [shares.take(client, local.steps * local.batch).view(local.steps, local.batch) for client in range(CLIENTS)]
    expected = torch.stack([by_hand(of, begins, samples) for samples in taken]).mean(0)
    train_rounds(of, training, "bsp:weights=equal", 1)
    assert torch.allclose(training.slice.weights, expected, atol=2e-5)


def train_rounds(of: Task, training: Training, policy: str, rounds: int) -> None:
    from paceline.simulate.cluster import Cluster

    Cluster(federation(), make(policy), rounds, of.seed, model=training).run()


@pytest.mark.parametrize("policy", ["bsp:fraction=0.75,weights=mean", "fl-r2sp:groups=2", "fedbuff:k=3", "safa"])
def test_stacked_or_one_after_the_other_it_is_the_same(policy: str) -> None:
    outcomes = [
        train(federation(), make(policy), replace(task(), together=together), None, 6) for together in (True, False)
    ]
    stacked, single = ([point.loss for point in outcome.curve] for outcome in outcomes)
    assert len(stacked) >= 3
    assert stacked == pytest.approx(single, rel=1e-3)


def test_mixing_models_is_adding_changes_where_all_began_alike() -> None:
    """One group: its mean replaces the model, or all of the mean change is added."""
    mixed, added = (
        train(federation(), make(f"fl-r2sp:groups=1,filter=false,moves={moves}"), task(), None, 4)
        for moves in ("model", "update")
    )
    assert [point.loss for point in mixed.curve] == pytest.approx([point.loss for point in added.curve], rel=1e-3)


def test_changes_march_on_where_mixing_takes_back_half() -> None:
    """What the docstring of FL-R²SP says: of a steady march the model keeps M/(2M−1) when models are mixed."""
    losses = {
        moves: train(federation(), make(f"fl-r2sp:groups=4,filter=false,moves={moves}"), task(), None, 12)
        .curve[-1]
        .loss
        for moves in ("model", "update")
    }
    assert losses["update"] < losses["model"]


def test_only_those_who_are_applied_are_computed_on_a_cpu() -> None:
    training = Training(task(), CLIENTS)
    assert training._locals is not None
    computed = 0
    compute = training._locals.compute

    def counted(jobs, rate):  # type: ignore[no-untyped-def]
        nonlocal computed
        computed += len(jobs)
        compute(jobs, rate)

    training._locals.compute = counted  # type: ignore[method-assign]
    train_rounds(training.task, training, "bsp:fraction=0.5,weights=mean", 4)
    assert 0 < computed == training.outcome.updates


def test_it_learns() -> None:
    outcome = train(
        federation(), make("fl-r2sp:groups=2"), task(local=LocalSettings(20, 16)), Goal("accuracy", 0.9, every=1), 40
    )
    assert outcome.ended == "goal"


def test_outliers_are_found_and_left_out_while_it_learns() -> None:
    """Two of twelve clients have one class each, and the filter hears of their cosines."""
    clients = 12
    order = torch.argsort(DIGITS.labels, stable=True)
    shuffled = torch.randperm(len(DIGITS.labels), generator=torch.Generator().manual_seed(0))
    shares = [shuffled[client::clients] for client in range(clients)]
    shares[3], shares[8] = order[:100], order[-100:]
    policy = make("filtered:policy=(bsp:weights=mean)")
    train(federation(clients), policy, task(local=LocalSettings(20, 16)), None, 15, shares=Shares(shares, 0))
    assert set(policy.blacklist) == {3, 8}  # type: ignore[attr-defined]
    assert all(len(cosines) == 5 for cosines in policy.blacklist.values())  # type: ignore[attr-defined]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("network", ["mlp", "cnn", "lstm"])
def test_a_gpu_trains_clients_as_a_cpu_does(network: str) -> None:
    outcomes = [
        train(federation(), make("fl-r2sp:groups=2"), replace(task(network), device=device), None, 6)
        for device in ("cpu", "cuda")
    ]
    there, here = ([point.loss for point in outcome.curve] for outcome in outcomes)
    assert len(there) >= 3
    assert there == pytest.approx(here, rel=1e-2)  # products are rounded to TF32 there
