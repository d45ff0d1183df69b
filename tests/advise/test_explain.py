"""Which candidate is advised, and the reasons that are given for it."""

from __future__ import annotations

import re

from advise.clusters import advice_for, cluster
from paceline.advise.candidates import DDP, Candidate
from paceline.advise.evaluate import Estimate
from paceline.advise.explain import choose, reasons


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
