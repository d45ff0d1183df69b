"""The policy rlp, its network as a file, and what is said of files that are none."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from paceline.policies import Apply, Decision, Grant, PolicyError, Update, make, snapshot
from paceline.rlp.features import StateFeatures
from paceline.rlp.network_file import SHIPPED, NetworkWeights, load, save
from paceline.rlp.policy import RLP
from paceline.rlp.rules import ACTIONS, RING, RULES, Rule, named


def network(state: StateFeatures, rules: tuple[Rule, ...], always: int | None = None, seed: int = 0) -> NetworkWeights:
    """A network at random; or one that always chooses the same."""
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


def by_rule(tmp_path: Path, rule: Rule, rules: tuple[Rule, ...] = RULES) -> RLP:
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


def test_waiting_for_some_applies_what_came_together(tmp_path: Path) -> None:
    policy = by_rule(tmp_path, Rule(0.5))
    for worker in range(4):
        assert granted(policy.joined(worker, 0.0)) == [worker]
    assert policy.arrived(update(2), 1.0) == []
    decisions = policy.arrived(update(0), 1.1)
    assert applied(decisions) == [2, 0]
    assert granted(decisions) == [2, 0]
    assert isinstance(decisions[0], Apply), "whoever is let go must be given what has come in"


def test_a_ring_lets_go_in_its_order(tmp_path: Path) -> None:
    policy = by_rule(tmp_path, RING, (*RULES, RING))
    for worker in range(3):
        policy.joined(worker, 0.0)
    assert granted(policy.arrived(update(1), 1.0)) == []
    assert granted(policy.arrived(update(0), 1.1)) == [0]
    assert granted(policy.arrived(update(2), 1.2)) == [1]
    assert granted(policy.arrived(update(1, 2), 1.3)) == [2]


def test_who_is_left_alone_goes_on(tmp_path: Path) -> None:
    policy = by_rule(tmp_path, Rule(1))
    policy.joined(0, 0.0)
    policy.joined(1, 0.0)
    assert policy.arrived(update(0), 1.0) == []
    decisions = policy.left(1, 2.0)
    assert applied(decisions) == [0]
    assert granted(decisions) == [0]


def test_what_has_come_still_counts_when_the_last_one_leaves(tmp_path: Path) -> None:
    policy = by_rule(tmp_path, Rule(1))
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
def test_no_loss_and_no_step_time_stops_it(seed: int, story: list[tuple[int, float | None, float]]) -> None:
    """Whatever workers say, all that it works with are numbers, and somebody runs."""
    policy = RLP()
    for worker in range(6):
        policy.joined(worker, 0.0)
    for at, (number, loss, seconds) in enumerate(story):
        runs = sorted(policy.running)
        assert runs
        policy.arrived(update(runs[number % len(runs)], loss=loss, seconds=seconds), float(at))
        assert all(math.isfinite(each) for each in policy.sight.frames)
    assert set(policy.running) | set(policy.idle) == set(range(6))


def test_it_is_saved_and_goes_on_as_it_would_have() -> None:
    policy = RLP()
    for worker in range(5):
        policy.joined(worker, 0.0)
    chance = np.random.default_rng(0)

    def tell(to: RLP, at: int, number: int, loss: float) -> object:
        runs = sorted(to.running)
        return to.arrived(update(runs[number % len(runs)], at, loss, 1 + loss), float(at))

    story = [(at, int(chance.integers(5)), float(chance.uniform(0.5, 2))) for at in range(120)]
    for each in story[:60]:
        tell(policy, *each)
    again = snapshot.load(json.loads(json.dumps(snapshot.save(policy))))
    assert isinstance(again, RLP)
    for each in story[60:]:
        assert tell(again, *each) == tell(policy, *each)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    kept = network(StateFeatures(3, False, True), (*RULES, RING), seed=4)
    save(kept, path)
    found = load(str(path))
    assert found.state == kept.state
    assert found.rules == kept.rules
    seen = np.linspace(-1, 1, kept.state.size, dtype=np.float32)
    np.testing.assert_array_equal(found.values(seen), kept.values(seen))


def test_rules_are_read_as_they_are_written() -> None:
    for rules in (RULES, ACTIONS, (*RULES, RING)):
        assert named(",".join(map(str, rules))) == rules
    assert named("asp,nonsense") is None


def refused(path: Path) -> str:
    load.cache_clear()
    with pytest.raises(PolicyError) as said:
        make(f"rlp:network={path}")
    message = str(said.value)
    assert str(path) in message
    assert message.count(". ") == 0, "one sentence"
    assert "paceline rlp learn" in message
    return message


def test_what_is_no_file_of_weights_is_refused_in_a_sentence(tmp_path: Path) -> None:
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
    notes = {"history": "10", "scene": "1", "validated": "0", "rules": "asp,telepathy"}
    save_file(plain, path, notes)
    assert "rules" in refused(path)
    plain["w1"][3, 3] = np.nan
    save_file(plain, path, {**notes, "rules": ",".join(map(str, RULES))})
    assert "not all numbers" in refused(path)


def test_the_shipped_network_is_one_of_the_papers_size() -> None:
    shipped = load(SHIPPED)
    assert shipped.state == StateFeatures()
    assert shipped.rules == RULES
    assert [each.shape for each, _ in shipped.layers] == [(53, 64), (64, 32), (32, 12)]
