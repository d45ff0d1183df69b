"""Policies are compared on the same instances."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from paceline.rlp.evaluate import (
    FIXED,
    YARDSTICK,
    Times,
    _episodes_at_once,
    best_fixed,
    interval,
    is_fixed,
    judged,
    ratios,
)
from paceline.rlp.instance import Instance, drawn, drawn_hundred
from paceline.rlp.rules import RULES, named_rule
from paceline.workloads.data import Data, load


def small(number: int, workers: int = 4, hidden: int = 0) -> Instance:
    return replace(drawn(number, workers, hidden, size="bundled"), target=0.6, budget=120)


def bundled(name: str) -> Data:
    assert name == "digits"
    return load("digits")


def test_each_policy_has_a_time_for_each_instance_and_seed() -> None:
    instances = [small(0), small(1, hidden=1), small(2), small(3, workers=3)]
    calls: list[tuple[int, int]] = []
    times = judged(instances, 2, ("asp", "bsp", "rlp"), bundled, progress=lambda *each: calls.append(each))
    for each in times.values():
        assert each.seconds.shape == each.updates.shape == (4, 2)
        assert (each.seconds > 0).all()
        assert each.reached.any()
    assert calls[-1] == (12, 12)
    assert not np.array_equal(times["asp"].seconds[:, 0], times["asp"].seconds[:, 1]), "seeds differ"
    alone = judged(instances[1:2], 2, ("rlp",), bundled)["rlp"]
    np.testing.assert_allclose(alone.seconds[0], times["rlp"].seconds[1])


def test_the_number_of_episodes_at_once_fits_the_memory_of_a_gpu() -> None:
    def at_once(instance: Instance, jobs: int) -> int:
        return _episodes_at_once(instance, bundled, "cuda", jobs)

    large = replace(small(0, workers=20, hidden=3), units=4096)
    assert at_once(small(0), 1) == 1500, "more would not be faster"
    assert 1 < at_once(large, 4) < at_once(large, 1) < 1500
    assert at_once(replace(large, units=100_000), 4) == 1
    assert _episodes_at_once(large, bundled, "cuda", 4, corrected=True) < at_once(large, 4)


@pytest.mark.matrix
@pytest.mark.slow
def test_an_instance_with_a_large_seed_is_played_with_every_seed() -> None:
    times = judged([small(10**17)], 2, ("asp",), bundled)["asp"]
    assert (times.seconds > 0).all()
    assert times.seconds[0, 0] != times.seconds[0, 1]


@pytest.mark.slow
def test_several_processes_give_the_same_times_as_one() -> None:
    instances, specs = [small(0), small(1, hidden=1), small(2, workers=3)], ("asp", "rlp")
    one, two = (judged(instances, 2, specs, bundled, jobs=jobs) for jobs in (1, 2))
    for spec in specs:
        np.testing.assert_array_equal(one[spec].updates, two[spec].updates)
        np.testing.assert_allclose(one[spec].seconds, two[spec].seconds)


def test_ratios_are_to_the_best_fixed_policy_of_each_instance() -> None:
    def of(*rows: tuple[float, float]) -> Times:
        seconds = np.array(rows)
        return Times(np.ones_like(seconds, bool), np.ones_like(seconds, int), seconds)

    times = {"bsp": of((2, 4), (10, 10)), "asp": of((6, 6), (4, 6)), "rlp": of((1, 2), (10, 10))}
    found = ratios(times)
    assert found["bsp"].tolist() == [1.0, 2.0]
    assert found["asp"].tolist() == [2.0, 1.0]
    assert found["rlp"].tolist() == [0.5, 2.0], "rlp is not among the policies it is compared with"
    assert best_fixed(times) == ["bsp", "asp"]
    assert interval(np.array([1.0, 3.0])) == pytest.approx(1.96)
    assert len(FIXED) == 7


@pytest.mark.slow
def test_the_wider_yardstick_has_every_rule_and_every_policy_of_it_can_be_played() -> None:
    held = {named_rule(spec.removeprefix("rlp:rule=")) for spec in YARDSTICK if spec.startswith("rlp")}
    assert held == set(RULES)
    assert set(FIXED) < set(YARDSTICK)
    assert all(map(is_fixed, YARDSTICK))
    assert not is_fixed("rlp")
    assert not is_fixed("rlp:network=mine")
    hard = replace(small(0), transfer=0.2, momentum=0.9, rate=0.01, target=0.85, budget=200)
    what = [hard, replace(small(1), transfer=0.01, momentum=0.0)]
    times = judged(what, 1, YARDSTICK, bundled)
    assert all(bool((times[spec].seconds > 0).all()) for spec in YARDSTICK)
    plain, corrected = times["r2sp:groups=3"], times["r2sp:groups=3 corrected"]
    assert plain.updates[0] != corrected.updates[0], "correction changes a training with momentum"
    np.testing.assert_array_equal(plain.updates[1], corrected.updates[1])


def test_a_hundred_with_links_ranges_from_free_to_network_bound() -> None:
    rounds = [each.transfer * each.workers for each in drawn_hundred(0)]
    assert 10 < sum(each == 0 for each in rounds) < 45
    assert sum(each > 2 for each in rounds) > 10
    assert max(rounds) < 6.01
    assert drawn_hundred(1) != drawn_hundred(0)
    number = drawn_hundred(0)[0].seed
    assert replace(drawn_hundred(0)[0], transfer=0.0) == drawn(number), "nothing else depends on the links"
