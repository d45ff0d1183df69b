"""Clusters that are written and read again, and clusters made from measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.simulate import builtin_names, load_cluster, parse_cluster
from paceline.simulate.cluster_spec import Jitter
from paceline.simulate.cluster_writer import as_toml
from paceline.simulate.measured_cluster import StepTime, cluster_of, measured_as

STEP = StepTime(seconds=0.123456, batch=48, jitter=0.07, model_bytes=1201704)


@pytest.mark.parametrize("name", builtin_names())
def test_a_cluster_is_the_same_after_writing_and_reading(name: str) -> None:
    spec = load_cluster(name)
    assert parse_cluster(as_toml(spec, "About it.\nIn two lines."), name, name) == spec


def test_local_steps_updates_and_overlap_are_the_same_after_writing_and_reading() -> None:
    plain = load_cluster("r2sp-b")
    for changes in ({"local_steps": 50}, {"updates": "topk:0.02"}, {"overlap": True, "updates": "int4"}):
        spec = replace(plain, **changes)
        assert parse_cluster(as_toml(spec, "About it."), "r2sp-b", "r2sp-b") == spec
    assert "local_steps" not in as_toml(plain)


def test_a_measured_cluster_is_the_same_after_writing_and_reading() -> None:
    spec = cluster_of("mine", STEP, [6.21e6, 12345678.9, 12.5e6], 2, 117e6 / 3, latency=2.1e-5 / 7)
    assert parse_cluster(as_toml(spec), "mine", "mine") == spec
    assert 'link = "100Mbit"' in as_toml(spec), "a rate is written with a unit if that is exact"


def test_the_first_worker_is_the_measured_machine_and_the_others_keep_their_proportions() -> None:
    described = load_cluster("dssp-mixed")
    spec = measured_as(described, STEP)
    before = [worker.compute_seconds() / worker.batch for worker in described.workers]
    after = [worker.compute_seconds() / worker.batch for worker in spec.workers]
    assert spec.workers[0].compute_seconds() == pytest.approx(STEP.seconds)
    assert [each / after[0] for each in after] == pytest.approx([each / before[0] for each in before])
    assert {worker.batch for worker in spec.workers} == {48}
    assert spec.model_bytes == STEP.model_bytes
    assert [worker.link for worker in spec.workers] == [worker.link for worker in described.workers]


def test_a_worker_that_is_described_with_jitter_keeps_it() -> None:
    kept = measured_as(load_cluster("rlp-10"), STEP)
    assert {worker.jitter.kind for worker in kept.workers} == {"straggle"}
    taken = measured_as(load_cluster("r2sp-b").with_jitter(0.0), STEP)
    assert {worker.jitter for worker in taken.workers} == {Jitter("lognormal", 0.07)}
