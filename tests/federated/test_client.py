"""Clients of a federation on a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline.arrays as arrays
from paceline.federated import FederatedClient
from paceline.model import checkpoint
from paceline.observe.trace import Measured
from paceline.policies import make
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.simulate.task import LocalSettings, Task
from paceline.simulate.training import Shares, Training
from paceline.workloads import networks
from paceline.workloads.data import load
from train.jobs import job

DIGITS = load("digits")
STEPS, BATCH, CLIENTS = 4, 8, 4


def model(network: str = "mlp", seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return networks.make(network, DIGITS)


def batches(samples: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(DIGITS.prepared(DIGITS.inputs[each]), DIGITS.labels[each]) for each in samples]


def taken(rounds: int) -> list[torch.Tensor]:
    """Return each client's samples of all rounds, in the order of a simulated federation."""
    shares = Shares.dealt(len(DIGITS.labels), CLIENTS, 1)
    return [
        torch.cat([shares.take(client, STEPS * BATCH).view(STEPS, BATCH) for _ in range(rounds)])
        for client in range(CLIENTS)
    ]


def federated(policy: str, rounds: int, momentum: float = 0.0, proximal: float = 0.0, **more: Any) -> torch.Tensor:
    """Return the global model after this number of rounds of four clients."""
    samples, models = taken(rounds), [model() for _ in range(CLIENTS)]
    with job(policy, shards=2, workers=CLIENTS, **more) as running:

        def run(where: str, number: int) -> int:
            return FederatedClient(
                models[number],
                batches(samples[number]),
                connect=where,
                steps=STEPS,
                samples=BATCH * STEPS,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=momentum),
                proximal=proximal,
                client=number,
            ).run(rounds)

        counts = running.work(*[lambda where, number=number: run(where, number) for number in range(CLIENTS)])
        running.finish()
    assert counts == [rounds] * CLIENTS
    return torch.nn.utils.parameters_to_vector(models[0].parameters()).detach()


@pytest.mark.parametrize(("momentum", "proximal"), [(0.0, 0.0), (0.9, 0.0), (0.5, 0.3)])
def test_a_real_federation_learns_the_same_model_as_a_simulated_one(momentum: float, proximal: float) -> None:
    from paceline.model.optimizer_spec import OptimizerSpec
    from paceline.simulate.cluster import Cluster
    from simulate.test_local_training import federation

    found = federated("bsp:weights=mean", 3, momentum, proximal)
    optimizer = OptimizerSpec("SGD", ({"lr": 0.05, "momentum": momentum},))
    training = Training(Task("mlp", DIGITS, optimizer, seed=1, local=LocalSettings(STEPS, BATCH, proximal)), CLIENTS)
    Cluster(federation(CLIENTS), make("bsp:weights=mean"), 3, 1, model=training).run()
    assert torch.allclose(found, training.slice.weights, atol=5e-5)


def test_pushing_models_instead_of_differences_gives_the_same_result_for_one_group() -> None:
    """All clients of a group start each round with the same model."""
    changes = federated("fl-r2sp:groups=1,fraction=1,filter=false", 3)
    models = federated("fl-r2sp:groups=1,fraction=1,filter=false,moves=model", 3)
    assert torch.allclose(changes, models, atol=5e-5)
    compared = federated("fl-r2sp:groups=1,fraction=1,moves=model", 3)
    assert torch.allclose(models, compared, atol=5e-5), "comparing the models changes none of them"


@pytest.mark.parametrize(("updates", "away"), [("int8", 0.02), ("int4", 0.2), ("topk:0.2", 0.9)])
def test_clients_may_send_small_updates(updates: str, away: float) -> None:
    """The model moves nearly as it does without a codec, or at least in the same direction."""
    policy = "fl-r2sp:groups=1,fraction=1,filter=false"
    begin = torch.nn.utils.parameters_to_vector(model().parameters()).detach()
    whole, small = federated(policy, 3) - begin, federated(policy, 3, update_codec=updates) - begin
    assert 0 < (whole - small).norm() < away * whole.norm()


@pytest.mark.parametrize("steps", [1, STEPS])
def test_topk_is_divided_by_its_senders_if_clients_make_several_steps(steps: int) -> None:
    def run(where: str) -> None:
        FederatedClient(model(), batches(taken(2)[0]), connect=where, steps=steps, samples=BATCH * steps).run(1)

    with job("fl-r2sp:groups=1,fraction=1,filter=false", workers=1, update_codec="topk:0.2") as running:
        running.work(run)
        running.finish()
        assert running.coordinator.agreement.sparse == (steps > 1)


def test_groups_take_turns_on_a_real_server(tmp_path: Path) -> None:
    federated("fl-r2sp:groups=2", 4, saving=CheckpointPlan(tmp_path, updates=1))
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.version >= 7
    assert found.job["memory"]["T"] > 0


def test_statistics_of_batch_norm_are_averaged() -> None:
    samples, models = taken(2), [model("resnet20") for _ in range(2)]
    with job("bsp:weights=mean", workers=2) as running:
        running.work(
            *[
                lambda where, number=number: FederatedClient(
                    models[number], batches(samples[number][:, :4]), connect=where, steps=2, samples=1, client=number
                ).run(1)
                for number in range(2)
            ]
        )
        running.finish()
    one, other = (each.state_dict() for each in models)
    means = [name for name in one if name.endswith("running_mean")]
    assert means and all(torch.equal(one[name], other[name]) for name in means)
    assert any(float(one[name].abs().sum()) > 0 for name in means)


def test_each_client_evaluates_the_new_global_model_and_the_server_receives_the_metrics() -> None:
    samples, models, seen = taken(2), [model() for _ in range(CLIENTS)], {}

    def evaluate(trained: torch.nn.Module, number: int) -> dict[str, float]:
        weights = torch.nn.utils.parameters_to_vector(trained.parameters()).detach()
        seen[number] = weights.clone()
        return {"norm": float(weights.norm()), "client": number}

    with job("bsp:weights=mean", workers=CLIENTS) as running:
        clients = [
            lambda where, number=number: FederatedClient(
                models[number],
                batches(samples[number]),
                connect=where,
                steps=STEPS,
                samples=BATCH * STEPS,
                client=number,
                evaluate=lambda trained: evaluate(trained, number),
            ).run(2)
            for number in range(CLIENTS)
        ]
        running.work(*clients)
        running.finish()
    measured = [(event.worker, event.kind, event.value) for event in running.events if isinstance(event, Measured)]
    assert sorted(each for each in measured if each[1] == "client") == [
        (number, "client", float(number)) for number in range(CLIENTS) for _ in range(2)
    ]
    norms = {value for worker, kind, value in measured if kind == "norm"}
    assert len(norms) == 2, "after each round all clients have the same model"
    assert all(torch.equal(weights, seen[0]) for weights in seen.values())


@pytest.mark.parametrize("moves", ["update", "model"])
def test_a_client_without_torch_takes_part_with_arrays(moves: str) -> None:
    """It trains by itself, and pushes the change as a gradient. The server's optimizer is SGD with a rate of 1."""
    begin = {name: value.numpy() for name, value in torch.nn.Linear(3, 2).state_dict().items()}
    halves = torch.nn.Linear(3, 2)
    halves.load_state_dict({name: torch.from_numpy(value) for name, value in begin.items()})
    xs, ys = torch.ones(4, 3), torch.zeros(4, dtype=torch.int64)

    def with_arrays(where: str) -> dict[str, Any]:
        with arrays.join(begin, "sgd:lr=1", connect=where) as session:
            for _ in range(2):
                trained = {name: value + 0.5 for name, value in session.params.items()}  # local steps of any library
                change = {name: session.params[name] - trained[name] for name in trained}
                session.step(change, batch_size=12)
            session.finish()
            return dict(session.params)

    def with_torch(where: str) -> dict[str, Any]:
        still = lambda parameters: torch.optim.SGD(parameters, lr=0.0)  # noqa: E731
        FederatedClient(halves, [(xs, ys)], connect=where, steps=1, samples=4, optimizer=still).run(2)
        return {name: value.numpy() for name, value in halves.state_dict().items()}

    with job(f"fl-r2sp:groups=1,fraction=1,filter=false,moves={moves}", workers=2) as running:
        results = running.work(with_arrays, with_torch)
        running.finish()
    for result in results:
        for name, value in result.items():
            np.testing.assert_allclose(value, begin[name] + 2 * 0.5 * 12 / 16, rtol=1e-5)


@pytest.mark.parametrize(
    ("metrics", "error"),
    [
        ({"loss": float("nan")}, r"^The metric loss must be a finite number; got nan\.$"),
        ({"loss": "0.5"}, r"^The metric loss must be a number; got a value of type str\.$"),
        ({3: 0.5}, r"^A metric's name has letters, digits and underscores, at most 80 of them; got 3\.$"),
        (0.5, r"^evaluate must return metrics by name, such as \{'accuracy': 0\.9\}; got a float\.$"),
    ],
)
def test_a_wrong_result_of_an_evaluation_is_an_error_and_the_client_leaves(metrics: Any, error: str) -> None:
    with job("bsp:weights=mean", workers=1) as running:
        client = FederatedClient(
            model(), batches(taken(1)[0]), connect=running.address, steps=1, samples=1, evaluate=lambda _: metrics
        )
        with pytest.raises(ValueError, match=error):
            client.run(1)
        running.finish()
    assert not [event for event in running.events if isinstance(event, Measured) and event.kind == "loss"]


def test_a_client_with_another_model_is_refused() -> None:
    with job("fl-r2sp:groups=2", workers=1) as running:
        first = FederatedClient(model(), batches(taken(1)[0]), connect=running.address, steps=1, samples=1, client=0)
        with pytest.raises(ConnectionError, match="must train the same model"):
            FederatedClient(model("lstm"), batches(taken(1)[1]), connect=running.address, steps=1, samples=1, client=1)
        first.run(1)


def test_an_update_with_nan_is_refused_and_changes_nothing() -> None:
    with job("bsp:weights=mean", workers=1) as running:
        bad = [(torch.full((1, *DIGITS.inputs.shape[1:]), float("nan")), torch.zeros(1, dtype=torch.int64))]
        with pytest.raises(ConnectionError, match="NaN or infinity"):
            FederatedClient(model(), bad, connect=running.address, steps=1, samples=1).run(1)
        assert running.coordinator.ledger.version == 0


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"samples": 0}, "samples must be at least 1; got 0"),
        ({"proximal": -1.0}, "proximal must be at least 0"),
        ({"samples": None}, "with samples="),
        ({"connect": None}, "with connect="),
        ({"connect": "nowhere"}, "host:port"),
    ],
)
def test_wrong_settings_are_refused_before_connecting(
    settings: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_CONNECT", raising=False)
    options: dict[str, Any] = {"connect": "127.0.0.1:1", "samples": 4} | settings
    with pytest.raises(ValueError, match=error):
        FederatedClient(model(), batches(taken(1)[0]), **options)


def test_a_generator_of_batches_is_refused_when_it_is_used_up() -> None:
    with job("bsp:weights=mean", workers=1) as running:
        once = (batch for batch in batches(taken(1)[0]))
        with pytest.raises(ValueError, match="so pass a list"):
            FederatedClient(model(), once, connect=running.address, steps=3, samples=1).run(5)
