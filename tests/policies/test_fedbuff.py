"""FedBuff: no client waits, and every K updates make a step."""

from __future__ import annotations

import pytest

from paceline.policies import Add, Apply, Grant, Update, make


def test_the_kth_update_makes_a_step_with_weights_by_rate_and_staleness() -> None:
    policy = make("fedbuff:k=2,rate=3,discount=0.5")
    for worker in range(3):
        assert policy.joined(worker, 0.0) == [Grant(worker)]
    for version in range(3):  # three steps, from updates of the first two workers
        assert policy.arrived(Update(0, version + 1, version, 10, 1.0), 1.0) == [Grant(0)]
        apply, grant = policy.arrived(Update(1, version + 1, version, 10, 1.0), 1.0)
        assert isinstance(apply, Apply) and apply.weights == (1.5, 1.5) and grant == Grant(1)
    policy.arrived(Update(0, 4, 3, 10, 1.0), 2.0)
    apply, _ = policy.arrived(Update(2, 1, 0, 10, 1.0), 2.0)  # three versions old
    assert isinstance(apply, Apply) and apply.weights == pytest.approx((1.5, 0.75))


def test_staleness_is_right_if_a_resumed_model_does_not_start_at_version_0() -> None:
    policy = make("fedbuff:k=2,discount=1")
    for worker in range(2):
        policy.joined(worker, 0.0)
    policy.arrived(Update(0, 1, 100, 10, 1.0), 1.0)
    apply, _ = policy.arrived(Update(1, 1, 99, 10, 1.0), 1.0)
    assert isinstance(apply, Apply) and apply.weights == pytest.approx((0.5, 0.25))


@pytest.mark.parametrize("filtered", [False, True])
def test_fl_r2sp_holds_updates_only_if_it_compares_them(filtered: bool) -> None:
    policy = make(f"fl-r2sp:groups=1,filter={str(filtered).lower()}")
    assert policy.compares == filtered
    for worker in range(4):
        policy.joined(worker, 0.0)
    decisions = policy.arrived(Update(0, 1, 0, 10, 1.0), 1.0)
    assert any(isinstance(each, Add) for each in decisions) == (not filtered)
