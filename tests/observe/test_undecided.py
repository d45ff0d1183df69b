"""Observers hold exactly the updates that have arrived and are undecided."""

from __future__ import annotations

import io

import pytest

from paceline.observe.live_state import Live
from paceline.observe.observer import Recorder, replay
from paceline.observe.perfetto import Perfetto
from paceline.observe.summary import Summary
from paceline.observe.trace import Applied, Arrived, Discarded, Event, Identity, Kept, identities
from paceline.policies import make, names
from paceline.simulate import Cluster, load_cluster
from paceline.simulate.random_faults import with_random_faults


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("policy", names())
def test_observers_hold_only_undecided_updates(policy: str, seed: int) -> None:
    events: list[Event] = []
    spec = with_random_faults(load_cluster("r2sp-b").with_jitter(0.1), count=6, iterations=12, seed=seed)
    Cluster(spec, make(policy), 12, observer=Recorder(events.append)).run()
    observers = (Live(), Summary(), Perfetto(io.StringIO()))
    undecided: dict[Identity, None] = {}
    most = 0
    for event in events:
        for observer in observers:
            replay([event], observer)
        match event:
            case Arrived(worker=worker, incarnation=incarnation, iteration=iteration):
                undecided[worker, incarnation, iteration] = None
            case Kept(worker=worker, incarnation=incarnation, iteration=iteration):
                del undecided[worker, incarnation, iteration]
            case Discarded(worker=worker, incarnation=incarnation, iteration=iteration):
                del undecided[worker, incarnation, iteration]
            case Applied():
                for update in identities(event.workers, event.iterations, event.incarnations):
                    undecided.pop(update, None)  # a kept update was decided before
        most = max(most, len(undecided))
        assert all(observer._undecided.keys() == undecided.keys() for observer in observers)
    assert most > 0
