"""A PolicyStrategy drives a federation: what moves the model, which nodes take part, and what is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed; `make test-flower` installs it")

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, FedProx

from on_flower.runs import VirtualRun, nodes_of, started, towards, weights
from on_flower.virtual import VirtualClock, VirtualGrid
from paceline.flower import PolicyStrategy
from paceline.observe.trace import Applied, Granted
from paceline.policies import PolicyError


@pytest.mark.parametrize("wraps", [FedAvg, FedMedian, lambda: FedAdam(eta=0.1), lambda: FedProx(proximal_mu=0.1)])
def test_under_bsp_a_strategy_does_what_it_does_without_us(wraps: Any) -> None:
    plain = started(wraps(), VirtualGrid(VirtualClock(), nodes_of()))
    run = VirtualRun("bsp", nodes_of(), wraps())
    ours = run.start()
    np.testing.assert_allclose(weights(ours), weights(plain), rtol=1e-5)
    assert sum(isinstance(event, Applied) for event in run.events) == 5, "a round is an Apply"


@pytest.mark.parametrize(
    "policy",
    [
        "fl-r2sp:groups=2,fraction=1",
        "fl-r2sp:groups=2,fraction=1,moves=model",
        "fedbuff",
        "safa",
        "asp",
        "r2sp",
        "filtered:policy=(bsp:fraction=1,weights=mean)",
    ],
)
def test_every_federated_policy_comes_near_the_goal(policy: str) -> None:
    nodes = nodes_of()
    run = VirtualRun(policy, nodes)
    ours = run.start(rounds=80)
    goal = np.average([[5, number / 7, 0] for number in range(8)], axis=0, weights=[node.examples for node in nodes])
    favours_the_fast = policy in ("asp", "fedbuff")  # the slowest node takes 1.7 times as long as the fastest
    np.testing.assert_allclose(weights(ours), goal, atol=0.2 if favours_the_fast else 0.1)
    assert {event.worker for event in run.events if isinstance(event, Granted)} == set(range(8))


def test_groups_take_turns_instead_of_all_nodes_at_once() -> None:
    """The server sends at most one group's models at a time, where FedAvg sends all of them."""
    run = VirtualRun("fl-r2sp:groups=4,fraction=1", nodes_of())
    run.start(rounds=10)
    sent = [time for time, _, kind in run.grid.pushed if kind == "train" and time > 30.0]
    most = max(sum(abs(time - other) < 0.01 for other in sent) for time in sent)
    assert most <= 2, "a group has two nodes"


def test_staleness_and_exclusions_are_reported_each_round() -> None:
    result = VirtualRun("fl-r2sp:groups=4,fraction=1", nodes_of()).start(rounds=8)
    assert sorted(result.train_metrics_clientapp) == list(range(1, 9))
    last = result.train_metrics_clientapp[8]
    assert last["nodes"] == 8
    assert last["excluded-nodes"] == 0
    assert 1 <= float(last["mean-staleness"]) <= 3, "at most M−1"
    assert last["updates"] == pytest.approx(8, abs=2)


def test_metrics_of_the_nodes_are_averaged_by_examples() -> None:
    nodes = nodes_of(2)
    for node, accuracy in zip(nodes, (0.2, 0.8), strict=True):
        node.metrics = {"train_accuracy": accuracy}
    result = VirtualRun("bsp", nodes).start(rounds=1)
    expected = (10 * 0.2 + 11 * 0.8) / 21
    assert result.train_metrics_clientapp[1]["train_accuracy"] == pytest.approx(expected)


def test_nodes_and_server_evaluate_after_each_round() -> None:
    nodes = nodes_of(4)
    for node in nodes:
        node.metrics = {"accuracy": 0.5}
    seen = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(server_round)
        return MetricRecord({"distance": float(np.abs(arrays["w"].numpy()).sum())})

    result = VirtualRun("fl-r2sp:groups=2,fraction=1", nodes).start(rounds=3, evaluate_fn=evaluate)
    assert seen == [0, 1, 2, 3] == list(result.evaluate_metrics_serverapp)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(0.5)


def test_an_outlier_is_excluded_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    nodes = nodes_of(10)
    for node in nodes:
        node.train = towards(10.0, 1.0, 0.0)
    nodes[3].train = towards(-10.0, -1.0, 5.0)
    run = VirtualRun("fl-r2sp:groups=1,fraction=1", nodes)
    result = run.start(rounds=12)
    assert result.train_metrics_clientapp[12]["excluded-nodes"] == 1
    assert f"Node {nodes[3].identity} is excluded" in caplog.text
    last = [node for time, node, kind in run.grid.pushed if time > 100.0 and kind == "train"]
    assert nodes[3].identity not in last


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        ("fl-r3sp", "fl-r2sp"),
        ("fl-r2sp:groups=0", "groups"),
        ("fl-r2sp:turns=3", "turns"),
        ("r2sp:tune_batches=true", "tune_batches"),
    ],
)
def test_a_policy_that_does_not_exist_is_refused_in_one_sentence(policy: str, error: str) -> None:
    with pytest.raises(PolicyError, match=error):
        PolicyStrategy(policy)


def test_a_strategy_that_trains_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="fraction_train above 0"):
        VirtualRun("bsp", nodes_of(2), FedAvg(fraction_train=0.0)).start()


def test_a_checkpoint_of_another_policy_or_model_is_refused(tmp_path: Path) -> None:
    VirtualRun("bsp", nodes_of(2), checkpoint=tmp_path).start(rounds=1)
    with pytest.raises(ValueError, match="is of the policy bsp"):
        VirtualRun("asp", nodes_of(2), checkpoint=tmp_path).start(rounds=1)
    (tmp_path / "federation.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="cannot be read"):
        VirtualRun("bsp", nodes_of(2), checkpoint=tmp_path).start(rounds=1)
