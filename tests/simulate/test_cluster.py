"""A simulated iteration step by step, and decisions carried out as the contract of policies says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.observe.observer import Recorder
from paceline.observe.trace import (
    Applied,
    Arrived,
    Cancelled,
    Computed,
    Event,
    Granted,
    Joined,
    Pulled,
    Pulling,
    Pushing,
    Turned,
    Used,
)
from paceline.policies import Cancel, Decision, Discard, Grant, Policy, Update, WakeAt, make
from paceline.policies.asp import ASP
from paceline.simulate import Cluster, ClusterSpec, WorkerSpec, load_cluster


def spec(workers: int = 1, **changes: object) -> ClusterSpec:
    """Return a cluster whose workers compute for 1 s, send the model in 0.2 s, and whose servers apply it in 0.05 s."""
    base = ClusterSpec(
        name="test",
        model_bytes=20e6,
        servers=2,
        server_link=100e6,
        latency=0.01,
        apply_rate=200e6,
        lease=30.0,
        workers=(WorkerSpec(100e6, 32, 32.0),) * workers,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def trace(described: ClusterSpec, policy: Policy, iterations: int, streamed: bool = False) -> list[Event]:
    events: list[Event] = []
    Cluster(described, policy, iterations, streamed=streamed, observer=Recorder(events.append)).run()
    return [event for event in events if not isinstance(event, Used)]


def about(*events: Event) -> list[Event]:
    time: Any = pytest.approx
    return [event._replace(time=time(event.time)) for event in events]


def test_an_iteration_step_by_step() -> None:
    # A pull begins after four messages of 0.01 s, or after the optimizer step if that takes longer.
    assert trace(spec(), make("asp"), 2) == about(
        Joined(0.0, 0),
        Granted(0.0, 0, None, 0),
        Pulling(0.04, 0),
        Pulled(0.24, 0, 0),
        Computed(1.24, 0),
        Turned(1.24, 0),
        Pushing(1.24, 0),
        Arrived(1.44, 0, 1, 32),
        Applied(1.44, 1, (0,), (1,), (0,), (1,)),
        Granted(1.44, 0, None, 0),
        Pulling(1.49, 0),
        Pulled(1.69, 0, 1),
        Computed(2.69, 0),
        Turned(2.69, 0),
        Pushing(2.69, 0),
        Arrived(2.89, 0, 2, 32),
        Applied(2.89, 2, (0,), (2,), (0,), (1,)),
        Granted(2.89, 0, None, 0),
    )


def test_a_streamed_iteration_step_by_step() -> None:
    # Slices come back one slice behind the push: (0.2 + 0.05) / 16 + 0.04 s later.
    behind = 0.25 / 16 + 0.04
    events = [event for event in trace(spec(), make("asp"), 2, streamed=True) if isinstance(event, Arrived | Pulled)]
    assert events == about(
        Pulled(0.24, 0, 0), Arrived(1.44, 0, 1, 32), Pulled(1.44 + behind, 0, 1), Arrived(2.64 + behind, 0, 2, 32)
    )


def test_the_servers_apply_one_after_the_other() -> None:
    # Four updates arrive together, 0.4 s after the pushes began. A step takes 0.05 s, and each worker pulls after its
    # own.
    events = trace(spec(4), make("asp"), 2)
    pulls = [event.time for event in events if isinstance(event, Pulling)][:8]
    assert pulls == pytest.approx([0.04] * 4 + [0.04 + 0.4 + 1.0 + 0.4 + 0.05 * n for n in (1, 2, 3, 4)])
    versions = [event.version for event in events if isinstance(event, Pulled)][:8]
    assert versions == [0, 0, 0, 0, 1, 2, 3, 4]


def test_a_larger_granted_batch_takes_longer() -> None:
    class Growing(ASP):
        def arrived(self, update: Update, now: float) -> list[Decision]:
            return [Discard(update), Grant(update.worker, 2 * update.batch_size)]

    arrivals = [event for event in trace(spec(), Growing(), 3) if isinstance(event, Arrived)]
    assert [event.batch_size for event in arrivals] == [32, 64, 128]
    computed = [event.time for event in trace(spec(), Growing(), 3) if isinstance(event, Computed)]
    assert computed[0] == pytest.approx(1.24)
    assert computed[1] == pytest.approx(1.44 + 2.0), "it has the newest model, so it does not pull"


def test_a_new_timer_replaces_the_old_one_and_a_time_in_the_past_is_now() -> None:
    class Sleepy(ASP):
        def __init__(self) -> None:
            super().__init__()
            self.woken: list[float] = []

        def joined(self, worker: int, now: float) -> list[Decision]:
            return [*super().joined(worker, now), WakeAt(0.5), WakeAt(0.7)]

        def woke(self, now: float) -> list[Decision]:
            self.woken.append(now)
            if len(self.woken) == 1:
                return [WakeAt(0.2)]  # in the past: it must not turn back the clock
            return []

    policy = Sleepy()
    events = trace(spec(), policy, 2)
    assert policy.woken == [0.7, 0.7]
    assert [event.time for event in events] == sorted(event.time for event in events)


def test_a_cancelled_iteration_is_abandoned_wherever_it_was() -> None:
    class Impatient(ASP):
        """Cancels the running iteration once, after `after` seconds, and starts it again."""

        def __init__(self, after: float = 1.0) -> None:
            super().__init__()
            self.after = after

        def joined(self, worker: int, now: float) -> list[Decision]:
            return [*super().joined(worker, now), WakeAt(self.after)]

        def woke(self, now: float) -> list[Decision]:
            return [Cancel(0), Grant(0)]

    for after in (0.02, 0.1, 0.7, 1.3):  # before the pull, while pulling, while computing, while pushing
        events = trace(spec(), Impatient(after), 1)
        cancelled = next(i for i, event in enumerate(events) if isinstance(event, Cancelled))
        assert events[cancelled].time == pytest.approx(after)
        arrived = next(event for event in events if isinstance(event, Arrived))
        assert arrived.iteration == 2
        pulls = 0.24 if after < 0.24 else 0.0  # a worker that has the newest model does not pull it again
        assert arrived.time == pytest.approx(after + pulls + 1.0 + 0.2)


def test_of_several_pushes_that_end_at_the_same_instant_all_but_one_are_cancelled() -> None:
    events = trace(spec(6), make("ksync:k=1"), 3)
    assert sum(isinstance(event, Arrived) for event in events) == 18
    assert sum(isinstance(event, Cancelled) for event in events) == 18 * 5


@pytest.mark.parametrize("policy", ["bsp", "asp", "r2sp", "ksync", "kbatch", "safa", "groups", "bsp:pipeline=true"])
@pytest.mark.parametrize("colocate", [False, True])
def test_a_cluster_without_jitter_in_which_many_events_coincide(policy: str, colocate: bool) -> None:
    described = load_cluster("r2sp-a-resnet32")
    report = Cluster(described.colocated() if colocate else described, make(policy), 5).run().report
    assert report.mean_iteration_seconds > 0


@pytest.mark.slow
def test_progress_goes_from_zero_to_one() -> None:
    parts: list[float] = []
    Cluster(load_cluster("r2sp-b"), make("asp"), 4000).run(parts.append)
    assert len(parts) >= 2
    assert parts == sorted(parts)
    assert 0 < parts[0] < parts[-1] <= 1


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("policy", ["asp", "bsp", "bsp:pipeline=true", "r2sp", "ssp", "dssp", "ksync"])
def test_nothing_piles_up_in_a_long_run(policy: str, streamed: bool) -> None:
    cluster = Cluster(load_cluster("r2sp-b").with_jitter(0.1), make(policy), 150, streamed=streamed)
    cluster.run()
    assert cluster.servers.pending <= 16
    assert len(cluster.clock._heap) <= 200


def test_a_policy_that_is_not_streamable_is_not_streamed() -> None:
    assert not Cluster(spec(), make("bsp"), 1, streamed=True).streamed
    policy = make("r2sp")
    assert Cluster(spec(), policy, 1, streamed=True).streamed
    assert policy.streamed
