"""Local training of clients gives the same result as torch's SGD, however it is computed."""

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
    """Return the model that torch's own SGD makes of these weights and samples."""
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


@pytest.mark.slow
@pytest.mark.parametrize("network", ["mlp", "cnn", "lstm"])
@pytest.mark.parametrize(
    ("local", "settings"),
    [
        (LocalSettings(5, 8), {}),
        (LocalSettings(4, 8), {"momentum": 0.9, "weight_decay": 0.01}),
        (LocalSettings(4, 8, proximal=0.5), {"momentum": 0.5}),
    ],
)
def test_a_round_of_fedavg_is_the_mean_of_the_models_that_sgd_makes(
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
def test_stacked_clients_learn_the_same_as_one_after_the_other(policy: str) -> None:
    outcomes = [
        train(federation(), make(policy), replace(task(), together=together), None, 6) for together in (True, False)
    ]
    stacked, single = ([point.loss for point in outcome.curve] for outcome in outcomes)
    assert len(stacked) >= 3
    assert stacked == pytest.approx(single, rel=1e-3)


def test_mixing_models_equals_adding_changes_if_all_clients_begin_alike() -> None:
    """With one group, its mean replaces the model, or the mean change is added in full."""
    mixed, added = (
        train(federation(), make(f"fl-r2sp:groups=1,filter=false,moves={moves}"), task(), None, 4)
        for moves in ("model", "update")
    )
    assert [point.loss for point in mixed.curve] == pytest.approx([point.loss for point in added.curve], rel=1e-3)


@pytest.mark.slow
def test_added_changes_make_more_progress_than_mixed_models() -> None:
    """As the docstring of FL-R²SP says, mixing keeps M/(2M−1) of a steady change of the model."""
    losses = {
        moves: train(federation(), make(f"fl-r2sp:groups=4,filter=false,moves={moves}"), task(), None, 12)
        .curve[-1]
        .loss
        for moves in ("model", "update")
    }
    assert losses["update"] < losses["model"]


def test_a_cpu_computes_only_the_clients_that_are_applied() -> None:
    training = Training(task(), CLIENTS)
    assert training._local_training is not None
    computed = 0
    compute = training._local_training.compute

    def counted(jobs, rate):  # type: ignore[no-untyped-def]
        nonlocal computed
        computed += len(jobs)
        compute(jobs, rate)

    training._local_training.compute = counted  # type: ignore[method-assign]
    train_rounds(training.task, training, "bsp:fraction=0.5,weights=mean", 4)
    assert 0 < computed == training.outcome.updates


def test_a_federation_learns() -> None:
    outcome = train(
        federation(), make("fl-r2sp:groups=2"), task(local=LocalSettings(20, 16)), Goal("accuracy", 0.9, every=1), 40
    )
    assert outcome.ended == "goal"


def test_outliers_are_found_and_excluded_during_training() -> None:
    """Two of twelve clients have samples of one class each. The filter gets their cosines."""
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
    assert there == pytest.approx(here, rel=1e-2)  # a GPU rounds products to TF32
