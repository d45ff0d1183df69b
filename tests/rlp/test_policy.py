"""The policy rlp, the file of its network, and the errors about broken files."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from paceline.policies import Apply, Decision, Grant, PolicyError, Update, make, snapshot
from paceline.rlp.features import LINKS, StateFeatures
from paceline.rlp.network_file import SHIPPED, NetworkWeights, load, save
from paceline.rlp.policy import RLP
from paceline.rlp.rules import (
    ACTIONS,
    NETWORK,
    PAPERS_RULES,
    RING,
    RULES,
    HeldRule,
    Rule,
    named_rule,
    option_name,
    parse_rules,
)


def network(state: StateFeatures, rules: tuple[Rule, ...], always: int | None = None, seed: int = 0) -> NetworkWeights:
    """Return a random network, or one that always chooses the rule with the number `always`."""
    chance = np.random.default_rng(seed)
    sizes = (state.size, 64, 32, len(rules))
    layers = [
        (chance.normal(size=(a, b)).astype(np.float32), chance.normal(size=b).astype(np.float32))
        for a, b in pairwise(sizes)
    ]
    if always is not None:
        layers[-1] = (np.zeros((32, len(rules)), np.float32), np.eye(len(rules), dtype=np.float32)[always])
    return NetworkWeights(state, rules, tuple(layers))


def update(worker: int, iteration: int = 1, loss: float | None = 1.0, seconds: float = 1.0) -> Update:
    return Update(worker, iteration, 0, 16, seconds, loss)


def policy_with(tmp_path: Path, rule: Rule, rules: tuple[Rule, ...] = RULES) -> RLP:
    """Return a policy whose network always chooses this rule."""
    path = tmp_path / "one.safetensors"
    save(network(StateFeatures(), rules, rules.index(rule)), path)
    load.cache_clear()
    policy = make(f"rlp:network={path}")
    assert isinstance(policy, RLP)
    return policy


def granted(decisions: list[Decision]) -> list[int]:
    return [each.worker for each in decisions if isinstance(each, Grant)]


def applied(decisions: list[Decision]) -> list[int]:
    return [each.worker for apply in decisions if isinstance(apply, Apply) for each in apply.updates]


def test_updates_that_arrive_during_a_wait_are_applied_together(tmp_path: Path) -> None:
    policy = policy_with(tmp_path, Rule(0.5))
    for worker in range(4):
        assert granted(policy.joined(worker, 0.0)) == [worker]
    assert policy.arrived(update(2), 1.0) == []
    decisions = policy.arrived(update(0), 1.1)
    assert applied(decisions) == [2, 0]
    assert granted(decisions) == [2, 0]
    assert isinstance(decisions[0], Apply), "a granted worker pulls a model that contains the updates"


def test_a_ring_grants_in_its_order(tmp_path: Path) -> None:
    policy = policy_with(tmp_path, RING, (*RULES, RING))
    for worker in range(3):
        policy.joined(worker, 0.0)
    assert granted(policy.arrived(update(1), 1.0)) == []
    assert granted(policy.arrived(update(0), 1.1)) == [0]
    assert granted(policy.arrived(update(2), 1.2)) == [1]
    assert granted(policy.arrived(update(1, 2), 1.3)) == [2]


def test_the_last_member_is_granted(tmp_path: Path) -> None:
    policy = policy_with(tmp_path, Rule(1))
    policy.joined(0, 0.0)
    policy.joined(1, 0.0)
    assert policy.arrived(update(0), 1.0) == []
    decisions = policy.left(1, 2.0)
    assert applied(decisions) == [0]
    assert granted(decisions) == [0]


def test_arrived_updates_are_applied_when_the_last_member_leaves(tmp_path: Path) -> None:
    policy = policy_with(tmp_path, Rule(1))
    policy.joined(0, 0.0)
    policy.joined(1, 0.0)
    policy.arrived(update(0), 1.0)
    assert policy.left(0, 1.5) == []
    assert applied(policy.left(1, 2.0)) == [0]


@given(
    st.integers(0, 2**32 - 1),
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)),
            st.floats(0, 1e12),
        ),
        max_size=80,
    ),
)
def test_no_loss_and_no_step_time_stops_the_policy(seed: int, story: list[tuple[int, float | None, float]]) -> None:
    """Whatever workers report, all features are finite numbers, and a worker runs."""
    policy = RLP()
    for worker in range(6):
        policy.joined(worker, 0.0)
    for at, (number, loss, seconds) in enumerate(story):
        runs = sorted(policy.running)
        assert runs
        policy.arrived(update(runs[number % len(runs)], loss=loss, seconds=seconds), float(at))
        assert all(math.isfinite(each) for each in policy.cluster_state.frames)
    assert set(policy.running) | set(policy.idle) == set(range(6))


def test_a_restored_policy_decides_as_the_saved_one() -> None:
    policy = RLP()
    for worker in range(5):
        policy.joined(worker, 0.0)
    chance = np.random.default_rng(0)

    def next_update(policy: RLP, at: int, number: int, loss: float) -> object:
        runs = sorted(policy.running)
        return policy.arrived(update(runs[number % len(runs)], at, loss, 1 + loss), float(at))

    story = [(at, int(chance.integers(5)), float(chance.uniform(0.5, 2))) for at in range(120)]
    for each in story[:60]:
        next_update(policy, *each)
    again = snapshot.load(json.loads(json.dumps(snapshot.save(policy))))
    assert isinstance(again, RLP)
    for each in story[60:]:
        assert next_update(again, *each) == next_update(policy, *each)


def test_a_network_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    kept = network(StateFeatures(3, False, True), (*RULES, RING), seed=4)
    save(kept, path)
    found = load(str(path))
    assert found.state == kept.state
    assert found.rules == kept.rules
    state = np.linspace(-1, 1, kept.state.size, dtype=np.float32)
    np.testing.assert_array_equal(found.values(state), kept.values(state))


def test_rules_are_parsed_from_their_names() -> None:
    for rules in (RULES, ACTIONS, (*RULES, RING)):
        assert parse_rules(",".join(map(str, rules))) == rules
    assert parse_rules("asp,nonsense") is None


def refused(path: Path) -> str:
    """Check that a file is refused in one sentence, and return it."""
    load.cache_clear()
    with pytest.raises(PolicyError) as error:
        make(f"rlp:network={path}")
    message = str(error.value)
    assert str(path) in message
    assert message.count(". ") == 0, "one sentence"
    assert "paceline policies learn" in message
    return message


def test_a_file_without_a_network_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    assert "no file" in refused(path)
    path.write_bytes(b"")
    assert "does not hold weights" in refused(path)
    path.write_text("hello, world; this is not a network at all")
    assert "does not hold weights" in refused(path)
    refused(tmp_path)  # a folder
    save_file({"a": np.zeros(3, np.float32)}, path)
    assert "does not hold weights" in refused(path)
    whole = network(StateFeatures(), RULES)
    plain = {f"{kind}{at}": each for at, pair in enumerate(whole.layers) for kind, each in zip("wb", pair, strict=True)}
    save_file(plain, path)
    assert "what its weights are for" in refused(path)
    save(NetworkWeights(StateFeatures(history=9), RULES, whole.layers), path)
    assert "shape" in refused(path)
    save(NetworkWeights(StateFeatures(), RULES[:-1], whole.layers), path)
    assert "shape" in refused(path)
    notes = {"history": "10", "scene": "1", "validated": "0", "links": "1", "rules": "asp,telepathy"}
    save_file(plain, path, notes)
    assert "rules" in refused(path)
    plain["w1"][3, 3] = np.nan
    save_file(plain, path, {**notes, "rules": ",".join(map(str, RULES))})
    assert "not all finite numbers" in refused(path)


def test_the_shipped_network_has_the_papers_size() -> None:
    shipped = load(SHIPPED)
    assert shipped.state == StateFeatures()
    assert shipped.rules == RULES
    assert [each.shape for each, _ in shipped.layers] == [(57, 64), (64, 32), (32, 16)]


def test_a_network_from_before_the_features_of_the_network_still_works(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    old = network(StateFeatures(links=False), PAPERS_RULES)
    plain = {f"{kind}{at}": each for at, pair in enumerate(old.layers) for kind, each in zip("wb", pair, strict=True)}
    save_file(plain, path, {"history": "10", "scene": "1", "validated": "0", "rules": ",".join(map(str, PAPERS_RULES))})
    assert load(str(path)).state == StateFeatures(links=False)
    policy = make(f"rlp:network={path}")
    assert granted(policy.joined(0, 0.0)) == [0]
    assert granted(policy.arrived(update(0), 1.0)) == [0]


def test_the_option_names_every_rule() -> None:
    assert get_args(HeldRule) == (NETWORK, *map(option_name, RULES))
    for rule in RULES:
        assert named_rule(option_name(rule)) == rule


def test_a_bound_on_running_workers_grants_those_that_have_been_idle_longest() -> None:
    policy = make("rlp:rule=run-2")
    for worker in range(4):
        policy.joined(worker, 0.0)
    assert granted(policy.arrived(update(2), 1.0)) == []
    assert granted(policy.arrived(update(0), 1.1)) == []
    assert granted(policy.arrived(update(3), 1.2)) == [2]
    assert granted(policy.arrived(update(1), 1.3)) == [0]
    assert granted(policy.arrived(update(0, 2), 1.4)) == [3]


def test_the_state_shows_how_much_of_an_iteration_is_transfer() -> None:
    """Each of four workers computes for 1 s; its update arrives 4 s after its Grant, and one arrives every second."""
    policy = RLP(rule="asp")
    for worker in range(4):
        policy.joined(worker, float(worker))
    for at in range(4, 100):
        policy.arrived(update(at % 4), float(at))
    share, alone, running, rounds = policy.cluster_state.vector(4, StateFeatures())[-LINKS:]
    assert share == pytest.approx(3 / 4, abs=0.01)
    assert alone == pytest.approx(15 / (1 + 15), abs=0.01)
    assert running == 1
    assert rounds == pytest.approx(4 / (1 + 4), abs=0.01)
