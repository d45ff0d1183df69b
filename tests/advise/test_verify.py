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
def test_measured_speeds_are_near_the_expected_ones() -> None:
    spec = cluster(compute=0.1, model=1e6, link=12.5e6, workers=3).with_jitter(0.02)
    advice = advice_for(spec)
    with Lab(hosts(spec)) as lab:
        found = [verify.measure(lab, spec, each, 12) for each in verify.contenders(advice, 1)]
    assert advice.chosen.candidate in {each.expected.candidate for each in found}
    assert Candidate(DDP) in {each.expected.candidate for each in found}
    for each in found:
        assert abs(each.error) < 0.35, f"{each.expected.candidate.name}: a busy machine may be slow, but not that slow"
    assert isinstance(verify.is_right(found, advice.chosen.candidate), bool)
