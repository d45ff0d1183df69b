"""Nodes that fail in every way, and a ServerApp that is killed: nothing is lost, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed; `make test-flower` installs it")

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping as AdaptiveClipping
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedYogi, Strategy

from on_flower.runs import FEDERATED, VirtualRun, nodes_of, policies, sampled, weights
from paceline.flower.strategy_state import StrategyState
from paceline.observe.trace import Applied, Arrived, Event, Granted, Joined, Left

POLICIES = ["bsp", "bsp:fraction=0.75", "fl-r2sp:groups=2", "fedbuff", "safa", "asp", "r2sp"]


def applied(events: list[Event]) -> Counter[tuple[int, int, int]]:
    """Return how often each update was applied."""
    return Counter(
        identity
        for event in events
        if isinstance(event, Applied)
        for identity in zip(event.workers, event.iterations, event.incarnations, strict=True)
    )


@pytest.mark.parametrize("policy", policies(POLICIES))
def test_nobody_waits_for_a_node_that_never_answers(policy: str) -> None:
    nodes = nodes_of()
    nodes[5].answers = False
    run = VirtualRun(policy, nodes)
    run.start(rounds=6, timeout=40)
    assert [event.worker for event in run.events if isinstance(event, Left)] == [5]
    assert not any(worker == 5 for worker, _, _ in applied(run.events))
    assert all(node.trained >= 4 for node in nodes if node is not nodes[5])


@pytest.mark.parametrize("policy", policies(POLICIES))
def test_a_reply_that_comes_twice_counts_once(policy: str) -> None:
    nodes = nodes_of()
    nodes[2].repeats = 3
    run = VirtualRun(policy, nodes)
    run.start(rounds=6)
    arrivals = Counter((event.worker, event.iteration) for event in run.events if isinstance(event, Arrived))
    assert set(arrivals.values()) == {1}
    if policy != "safa":  # it applies what it has kept again and again
        assert set(applied(run.events).values()) == {1}


@pytest.mark.parametrize("policy", policies(POLICIES))
def test_a_node_may_leave_and_come_back(policy: str) -> None:
    nodes = nodes_of()
    run = VirtualRun(policy, nodes)
    clock = run.grid.clock
    clock.at(25.0, lambda: run.grid.disconnect(nodes[1]))
    clock.at(60.0, lambda: run.grid.connect(nodes[1]))
    run.start(rounds=12)
    joined = [(event.worker, event.incarnation) for event in run.events if isinstance(event, Joined)]
    assert (1, 2) in joined
    back = [event.time for event in run.events if isinstance(event, Granted) and event.worker == 1]
    assert max(back) > 60.0
    assert min(back) < 25.0


@pytest.mark.parametrize(
    ("policy", "kind"),
    sampled(
        *product(POLICIES, ["nan", "shape", "name", "error"]),
        always=lambda case: case[0].startswith("fl-r2sp") or (case[0] in FEDERATED and case[1] == "nan"),
    ),
)
def test_a_useless_reply_changes_nothing(policy: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    nodes = nodes_of()

    def spoiled(arrays: dict[str, Any], trained: int) -> dict[str, Any]:
        match kind:
            case "nan":
                return {"w": np.array([1.0, np.nan, 0.0], np.float32)}
            case "shape":
                return {"w": np.zeros(4, np.float32)}
            case _:
                return {"v": np.zeros(3, np.float32)}

    nodes[4].train, nodes[4].fails = spoiled, kind == "error"
    run = VirtualRun(policy, nodes)
    result = run.start(rounds=8)
    assert np.isfinite(weights(result)).all()
    assert not any(worker == 4 for worker, _, _ in applied(run.events))
    assert f"Node {nodes[4].identity} is left out for now" in caplog.text
    asked = [time for time, node, kind in run.grid.pushed if node == nodes[4].identity and kind == "train"]
    assert 1 < len(asked) < 7, "it is tried again, and less and less often"


def test_when_all_nodes_have_left_the_run_waits_for_new_ones() -> None:
    nodes = nodes_of(3)
    run = VirtualRun("fl-r2sp:groups=2", nodes)
    for node in nodes:
        run.grid.clock.at(15.0, lambda node=node: run.grid.disconnect(node))  # type: ignore[misc]
        run.grid.clock.at(500.0, lambda node=node: run.grid.connect(node))  # type: ignore[misc]
    run.start(rounds=4)
    assert run.grid.clock.now() > 500.0


class Killed(Exception):
    """The process of the ServerApp ends here."""


@pytest.mark.parametrize("policy", ["fl-r2sp:groups=2,fraction=1", "bsp", "fedbuff"])
def test_a_server_that_is_killed_goes_on_with_the_same_groups_and_blacklist(policy: str, tmp_path: Path) -> None:
    nodes = nodes_of(12)

    def killed(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == 4:
            raise Killed
        return MetricRecord({"model": [float(value) for value in arrays["w"].numpy()]})

    first = VirtualRun(policy, nodes, checkpoint=tmp_path)
    with pytest.raises(Killed):
        first.start(rounds=8, evaluate_fn=killed)
    if policy.startswith("fl-r2sp"):
        first.strategy.policy.recall({"blacklist": {"3": [0.1, 0.2, 0.1, 0.1, 0.0]}})
    numbers = {node.identity: at for at, node in enumerate(nodes)}
    second = VirtualRun(policy, nodes, checkpoint=tmp_path, grid=first.grid)
    result = second.start(rounds=8)
    assert sorted(result.train_metrics_clientapp) == list(range(1, 9))
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2, 3], "rounds 1 to 3 are not done again"
    trained_by = {event.worker for event in second.events if isinstance(event, Granted)}
    assert trained_by == set(numbers.values())


@pytest.mark.parametrize("wraps", [lambda: FedAdam(eta=0.1), FedYogi, lambda: FedAvgM(server_momentum=0.9)])
def test_a_server_that_is_killed_goes_on_with_the_moments_of_its_strategy(wraps: Any, tmp_path: Path) -> None:
    def killed(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round == 5:
            raise Killed
        return None

    whole = weights(VirtualRun("bsp", nodes_of(), wraps()).start(rounds=8))
    with pytest.raises(Killed):
        VirtualRun("bsp", nodes_of(), wraps(), checkpoint=tmp_path).start(rounds=8, evaluate_fn=killed)
    continued = weights(VirtualRun("bsp", nodes_of(), wraps(), checkpoint=tmp_path).start(rounds=8))
    np.testing.assert_array_equal(continued, whole)


def test_the_state_of_a_wrapped_strategy_is_restored_and_its_settings_are_not() -> None:
    def clipping(eta: float) -> tuple[Strategy, FedAdam]:
        inner = FedAdam(eta=eta)
        return AdaptiveClipping(inner, noise_multiplier=0.1, num_sampled_clients=8), inner

    outer, inner = clipping(eta=0.1)
    state = StrategyState(outer)
    inner.m_t, outer.clipping_norm = {"layer/w": np.arange(3.0)}, 0.25
    again, inner_again = clipping(eta=0.5)
    restored = StrategyState(again)
    restored.recall(state.arrays())
    np.testing.assert_array_equal(inner_again.m_t["layer/w"], [0, 1, 2])
    assert (again.clipping_norm, inner_again.eta) == (0.25, 0.5)
    assert restored.arrays().keys() == state.arrays().keys(), "it is saved again"


def test_a_blacklisted_node_stays_so_when_the_server_is_started_again(tmp_path: Path) -> None:
    nodes = nodes_of(10)
    for node in nodes:
        node.train = _turned(node is nodes[3])
    first = VirtualRun("fl-r2sp:groups=1,fraction=1", nodes, checkpoint=tmp_path)
    assert first.start(rounds=12).train_metrics_clientapp[12]["excluded-nodes"] == 1
    before = nodes[3].trained
    second = VirtualRun("fl-r2sp:groups=1,fraction=1", nodes, checkpoint=tmp_path, grid=first.grid)
    assert second.start(rounds=16).train_metrics_clientapp[16]["excluded-nodes"] == 1
    assert nodes[3].trained == before


def _turned(away: bool) -> Any:
    target = np.array([-10.0, -1.0, 5.0] if away else [10.0, 1.0, 0.0], np.float32)
    return lambda arrays, trained: {"w": arrays["w"] + 0.5 * (target - arrays["w"])}
