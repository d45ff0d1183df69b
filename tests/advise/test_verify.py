"""Advice is verified in a lab."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from advise.clusters import advice_for, cluster
from lab.labs import built
from paceline.advise import verify
from paceline.advise.candidates import DDP, Candidate
from paceline.lab.hosts import hosts
from paceline.lab.namespaces import Lab


@built
@pytest.mark.slow
@pytest.mark.alone
def test_the_advised_candidate_and_all_reduce_are_measured() -> None:
    """Nothing is faster than the links allow, and the speeds are near the expected ones."""
    spec = cluster(compute=0.1, model=1e6, link=12.5e6, workers=3).with_jitter(0.02)
    advice = advice_for(spec)
    with Lab(hosts(spec)) as lab:
        found = [verify.measure(lab, spec, each, 12) for each in verify.contenders(advice, 1)]
    assert advice.chosen.candidate in {each.expected.candidate for each in found}
    assert Candidate(DDP) in {each.expected.candidate for each in found}
    batch = sum(worker.batch for worker in spec.workers)
    for each in found:
        floor = each.expected.floor_seconds or each.expected.iteration_seconds
        assert each.iteration_seconds > 0.9 * floor, each.expected.candidate.name
        assert abs(each.error) < 0.35, f"{each.expected.candidate.name}: a busy machine may be slow, but not that slow"
        assert each.samples_per_second == pytest.approx(batch / each.iteration_seconds, rel=0.05)
    best = max(found, key=lambda each: each.effective_rate).expected.candidate
    assert verify.is_right(found, best)
