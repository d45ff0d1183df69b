"""Clusters for the tests of advice."""

from __future__ import annotations

from dataclasses import replace

from paceline.advise.candidates import DDP, Candidate
from paceline.advise.explain import Advice, advise
from paceline.simulate import ClusterSpec, WorkerSpec


def cluster(
    compute: float, model: float = 5e6, link: float = 50e6, workers: int = 4, servers: int = 1, slow: float = 1.0
) -> ClusterSpec:
    """A cluster whose workers compute for `compute` seconds, and the last one `slow` times as long."""
    each = WorkerSpec(link=link, batch=32, samples_per_second=32 / compute)
    last = replace(each, samples_per_second=32 / compute / slow)
    return ClusterSpec("made", model, servers, link, 50e-6, 10e9, 30.0, (each,) * (workers - 1) + (last,))


def advice_for(spec: ClusterSpec, now: str = DDP) -> Advice:
    return advise(spec, Candidate(now), 60)
