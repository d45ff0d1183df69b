"""Which candidate is advised, and the reasons that are given for it."""

from __future__ import annotations

import re

import pytest

from advise.clusters import advice_for, cluster
from paceline.advise.candidates import DDP, Candidate
from paceline.advise.evaluate import Estimate
from paceline.advise.explain import choose, reasons
from paceline.model.optimizer_spec import OptimizerSpec


def test_the_present_set_up_is_kept_where_computing_takes_nearly_all_the_time() -> None:
    advice = advice_for(cluster(compute=10.0))
    assert advice.chosen is advice.now
    assert advice.chosen.candidate == Candidate(DDP)
    assert re.search(r"Computing takes 9\d% of the time under ddp: no policy gains more than 2%\.", advice.reasons[0])
    assert any("is not worth it" in reason for reason in advice.reasons), "something stale is a little faster"


def test_streamed_r2sp_with_colocated_servers_wins_where_the_network_counts() -> None:
    advice = advice_for(cluster(compute=0.12, workers=8))
    assert advice.chosen.candidate == Candidate("r2sp", streamed=True, colocated=True)
    assert advice.chosen.samples_per_second > 1.3 * advice.now.samples_per_second
    assert advice.ranked[0] is advice.chosen
    assert any("instead of 1: each carries 1.8 times" in reason for reason in advice.reasons)
    assert [sentence.partition(" would")[0] for sentence in advice.upgrades] == [
        "Links twice as fast",
        "Machines that compute twice as fast",
    ]


def test_the_present_set_up_is_among_the_estimates() -> None:
    advice = advice_for(cluster(compute=0.12), now="ssp:staleness=5")
    assert advice.now.candidate.policy == "ssp:staleness=5"
    assert advice.now in advice.ranked


def test_unequal_workers_are_advised_to_tune_batches() -> None:
    advice = advice_for(cluster(0.1, slow=3.0))
    assert "tune_batches" in advice.chosen.candidate.policy
    assert any("computes 3.0 times as long as the fastest" in reason for reason in advice.reasons)


def test_the_least_staleness_wins_within_three_percent() -> None:
    order = [Candidate(DDP), Candidate("bsp"), Candidate("r2sp"), Candidate("asp")]

    def made(policy: str, rate: float, staleness: float) -> Estimate:
        return Estimate(Candidate(policy), 1.0, rate, staleness)

    stale, steady = made("asp", 103.0, 3.0), made("bsp", 101.0, 0.0)
    assert choose([stale, steady], order) is steady
    assert choose([made("asp", 105.0, 3.0), steady], order).candidate.policy == "asp"
    assert choose([made("bsp", 101.0, 0.0), made(DDP, 100.0, 0.0)], order).candidate.policy == DDP, "the simpler one"


def test_estimates_are_ranked_by_their_effective_rate() -> None:
    rates = [each.effective_rate for each in advice_for(cluster(0.05)).ranked]
    assert rates == sorted(rates, reverse=True)


def test_a_reason_names_the_samples_that_staleness_costs() -> None:
    fast, slow = Estimate(Candidate("asp"), 1.0, 130.0, 15.0, price=1.5), Estimate(Candidate("bsp"), 1.0, 100.0)
    found = reasons(cluster(0.1, slow=3.0), slow, [slow, fast], slow)
    assert any("30% more samples a second" in each and "about 50% more of them" in each for each in found)


@pytest.mark.slow
def test_a_reason_names_what_chance_costs_at_a_barrier() -> None:
    def costs(jitter: float) -> list[str]:
        return [
            reason for reason in advice_for(cluster(0.3, workers=8).with_jitter(jitter)).reasons if "vary" in reason
        ]

    assert not costs(0.0)
    (cost,) = costs(0.4)
    assert re.search(r"the slowest of 8 workers sets the pace: 4\d\d ms of computing .* instead of 300 ms", cost)


def test_the_learning_rate_stays_unless_each_turn_is_a_full_step_of_adam() -> None:
    spec, r2sp, bsp = cluster(0.1), Estimate(Candidate("r2sp"), 1.0, 110.0), Estimate(Candidate("bsp"), 1.0, 100.0)
    sgd, adam = (OptimizerSpec(name, ({"lr": 0.1},)) for name in ("SGD", "Adam"))
    for chosen, optimizer, stays in ((r2sp, None, True), (r2sp, sgd, True), (r2sp, adam, False), (bsp, adam, True)):
        said = reasons(spec, bsp, [chosen, bsp], chosen, optimizer)[-1]
        assert said.startswith("Your learning rate can stay" if stays else "Adam makes a step of full length")
    ddp = Estimate(Candidate(DDP), 1.0, 120.0)
    assert not any("learning rate" in reason for reason in reasons(spec, ddp, [ddp, r2sp], ddp, adam))


def test_reasons_compare_with_the_floor_and_the_next_best() -> None:
    advice = advice_for(cluster(compute=0.12, workers=8))
    assert any(re.search(r"takes 1\.0\d times the least that these links", reason) for reason in advice.reasons)
    assert any(reason.startswith("The next best is ") for reason in advice.reasons)


def test_several_servers_are_said_to_need_a_link_each() -> None:
    chosen = Estimate(Candidate("r2sp:groups=auto"), 1.0, 110.0)
    found = reasons(cluster(0.1, servers=3), chosen, [chosen], chosen)
    assert any("This assumes 3 servers with a link each." in reason for reason in found)
