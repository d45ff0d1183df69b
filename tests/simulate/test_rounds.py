"""Local steps, small updates and overlapped exchanges on a simulated cluster."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.judge import judge_of
from paceline.model.codecs import encoded_size
from paceline.observe.driver import Fault
from paceline.observe.observer import Recorder
from paceline.observe.trace import Arrived, Computed, Event, Pulled, Pulling, Pushing
from paceline.policies import make
from paceline.simulate import Cluster, ClusterSpec, Jitter, WorkerSpec, limit_seconds, run_limit_seconds
from paceline.simulate.cluster_spec import worker_rng
from paceline.simulate.compute_times import ComputeTimes
from paceline.simulate.link_use import LinkUse, burst_seconds
from paceline.simulate.network import DIRECTIONS
from paceline.simulate.random_faults import with_random_faults
from paceline.simulate.simulated_model import CountedModel
from tries import tries

POLICIES = ("bsp", "bsp:pipeline=true", "asp", "ssp", "dssp", "ksync:k=2", "r2sp", "r2sp:groups=2", "r2sp:groups=auto")
CODECS = ("", "int8", "int4", "topk:0.02")


def cluster(count: int = 8, step: float = 0.04, **changes: Any) -> ClusterSpec:
    """Return a cluster on which every link carries the model of 10 MB in 0.8 s, and whose rounds take 50 steps."""
    workers = (WorkerSpec(12.5e6, 32, 32 / step),) * count
    spec = ClusterSpec("made", 10e6, 1, 12.5e6, 0.0, 1e15, 30.0, workers, local_steps=50)
    return replace(spec, **changes)


def seconds(spec: ClusterSpec, policy: str, streamed: bool = False, iterations: int = 40) -> float:
    return Cluster(spec, make(policy), iterations, 0, streamed).run().report.mean_iteration_seconds


def events(spec: ClusterSpec, policy: str, iterations: int = 8, seed: int = 0, streamed: bool = False) -> list[Event]:
    seen: list[Event] = []
    Cluster(spec, make(policy), iterations, seed, streamed, Recorder(seen.append)).run()
    return seen


def durations(
    seen: list[Event], begin: type[Pulling] | type[Pushing], end: type[Pulled] | type[Arrived]
) -> list[float]:
    """Return how long each worker's transfers took, one worker after the other."""
    found: list[tuple[int, float]] = []
    began: dict[int, float] = {}
    for event in seen:
        if isinstance(event, begin):
            began[event.worker] = event.time
        elif isinstance(event, end) and event.worker in began:
            found.append((event.worker, event.time - began.pop(event.worker)))
    return [taken for _, taken in sorted(found, key=lambda each: each[0])]


# Local steps


def test_a_round_takes_its_steps_and_one_exchange() -> None:
    alone = cluster(1)
    assert seconds(alone, "asp") == pytest.approx(50 * 0.04 + 0.8 + 0.8)
    with_overhead = replace(alone, workers=(replace(alone.workers[0], overhead=0.01),))
    assert seconds(with_overhead, "asp") == pytest.approx(50 * 0.05 + 0.8 + 0.8)
    # Under a barrier all workers push through the link of the server, and then all pull.
    assert seconds(cluster(8), "bsp") == pytest.approx(2.0 + 2 * 8 * 0.8)


def test_the_samples_of_all_steps_of_a_round_count() -> None:
    report = Cluster(cluster(1), make("asp"), 40).run().report
    assert report.batch_sizes == {0: 50 * 32}
    assert report.samples_per_second == pytest.approx(50 * 32 / 3.6)


@given(
    policy=st.sampled_from(POLICIES),
    steps=st.sampled_from((2, 8, 64)),
    streamed=st.booleans(),
    colocated=st.booleans(),
    slow=st.sampled_from((1, 4)),
)
@tries(10, 80)
def test_without_jitter_a_round_is_a_step_with_the_batches_and_overheads_of_all(
    policy: str, steps: int, streamed: bool, colocated: bool, slow: int
) -> None:
    step = WorkerSpec(12.5e6, 4, 64.0, 1 / 64)  # powers of two, so that sums of times are exact
    long = replace(step, batch=4 * steps, overhead=steps / 64)
    spec = cluster(0, workers=(step, step, step, replace(step, samples_per_second=64.0 / slow)), local_steps=steps)
    same = replace(spec, workers=(long, long, long, replace(long, samples_per_second=64.0 / slow)), local_steps=1)
    if colocated:
        spec, same = spec.colocated(), same.colocated()
    assert events(spec, policy, streamed=streamed) == events(same, policy, streamed=streamed)


@given(
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 99),
    streamed=st.booleans(),
    kind=st.sampled_from(("none", "normal", "lognormal", "straggle", "delay")),
)
@tries(10, 80)
def test_single_steps_draw_the_compute_times_of_the_worker(policy: str, seed: int, streamed: bool, kind: Any) -> None:
    jitter = Jitter(kind, sigma=0.3, mu=-3.0, probability=0.5, mean=0.1)
    worker = WorkerSpec(12.5e6, 32, 320.0, jitter=jitter)
    spec = cluster(workers=(worker,) * 4, local_steps=1)
    assert spec.exchanges_gradients
    seen = events(spec, policy, 6, seed, streamed)
    for number in range(4):
        computed = [event.time for event in seen if isinstance(event, Computed) and event.worker == number]
        pulled = [event.time for event in seen if isinstance(event, Pulled) and event.worker == number]
        chance = worker_rng(number, seed)
        drawn = [worker.draw(32, chance) for _ in pulled]
        if policy != "ksync:k=2":  # it cancels computations
            assert [b - a for a, b in zip(pulled, computed, strict=False)] == pytest.approx(drawn[: len(computed)])


@pytest.mark.parametrize(
    ("jitter", "mean", "spread"),
    [
        (Jitter("lognormal", 0.2), 50.0, math.sqrt(50) * 0.2),
        (Jitter("normal", 0.2), 50.0, math.sqrt(50) * 0.2),
        (Jitter("straggle", probability=0.25, mean=2.0), 75.0, math.sqrt(50 * 0.25 * 0.75) * 2.0),
        (
            Jitter("delay", sigma=0.5, mu=-1.0),
            50.0 + 50 * math.exp(-1.0 + 0.125),
            math.sqrt(50 * (math.exp(0.25) - 1)) * math.exp(-0.875),
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Jitter) else None,
)
def test_each_step_of_a_round_has_a_jitter_of_its_own(jitter: Jitter, mean: float, spread: float) -> None:
    times = ComputeTimes(WorkerSpec(1e6, 10, 10.0, jitter=jitter), worker_rng(0, 0), 50)
    draws = [times.draw(500) for _ in range(4000)]
    found = sum(draws) / len(draws)
    assert found == pytest.approx(mean, rel=0.01)
    assert math.sqrt(sum((each - found) ** 2 for each in draws) / len(draws)) == pytest.approx(spread, rel=0.06)


def test_the_same_seed_gives_the_same_rounds_and_another_seed_others() -> None:
    spec = cluster(4).with_jitter(0.1)
    assert events(spec, "r2sp") == events(spec, "r2sp")
    assert events(spec, "r2sp") != events(spec, "r2sp", seed=1)


# Small updates


@pytest.mark.parametrize("codec", CODECS[1:])
def test_both_ways_carry_encoded_bytes_and_only_the_first_pull_is_float32(codec: str) -> None:
    spec = cluster(1, updates=codec)
    assert spec.update_bytes == encoded_size(codec, 2_500_000)
    seen = events(spec, "asp", 6)
    pulls, pushes = durations(seen, Pulling, Pulled), durations(seen, Pushing, Arrived)
    assert pulls[0] == pytest.approx(0.8)
    assert spec.reply_bytes == encoded_size("int4" if codec.startswith("topk") else codec, 2_500_000)
    assert pulls[1:] == pytest.approx([spec.reply_bytes / 12.5e6] * (len(pulls) - 1))
    assert pushes == pytest.approx([spec.update_bytes / 12.5e6] * len(pushes))
    assert len(pulls) == 6


def test_the_sizes_are_those_calculated_by_hand() -> None:
    def bytes_of(codec: str) -> float:
        return cluster(1, updates=codec, model_bytes=4 * 4096 * 1000).update_bytes

    assert bytes_of("") == 4 * 4096 * 1000
    assert bytes_of("int8") == 4096 * 1000 + 2 * 16 * 1000  # a scale of two bytes for each block of 256
    assert bytes_of("int4") == 4096 * 1000 / 2 + 2 * 64 * 1000  # for each block of 64
    assert bytes_of("topk:0.02") == 1000 * (4 + 2 * 82 + 21)  # 82 of 4,096, with positions and two bits


def test_a_worker_that_comes_back_pulls_the_model_in_float32() -> None:
    spec = cluster(2, updates="int4", lease=1.0)
    faulty = replace(spec, faults=(Fault(5.0, 1, "kill"), Fault(9.0, 1, "rejoin")))
    pulls = durations(events(faulty, "asp", 8), Pulling, Pulled)
    assert sum(each > 0.7 for each in pulls) == 3, "each worker's first pull, and the one after the return"


# Under ASP and SSP it depends on the first pulls which workers use the link at the same time.
@pytest.mark.parametrize("policy", [each for each in POLICIES if each not in ("asp", "ssp", "dssp")])
@pytest.mark.parametrize("streamed", [False, True])
def test_after_the_first_pull_a_codec_has_the_times_of_a_smaller_model(policy: str, streamed: bool) -> None:
    encoded = cluster(4, updates="int4")
    small = cluster(4, model_bytes=encoded.update_bytes)
    assert seconds(encoded, policy, streamed) == pytest.approx(seconds(small, policy, streamed), rel=0.01)


# Overlap


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("policy", [each for each in POLICIES if not each.startswith("ksync")])
def test_an_exchange_that_fits_into_a_round_costs_nothing_if_it_is_overlapped(policy: str, streamed: bool) -> None:
    spec = cluster(4, updates="int4", overlap=True)
    result = Cluster(spec, make(policy), 200, 0, streamed).run()
    assert result.report.mean_iteration_seconds == pytest.approx(2.0, rel=0.01)
    assert min(result.computing) > 0.99


def test_a_worker_waits_at_the_end_of_a_round_if_the_reply_is_not_in() -> None:
    short = cluster(1, step=0.01, overlap=True)  # half a second of computing, and 1.6 s of exchange
    result = Cluster(short, make("asp"), 40).run()
    assert result.report.mean_iteration_seconds == pytest.approx(1.6)
    assert result.computing == pytest.approx((0.5 / 1.6,), rel=0.02)
    assert seconds(replace(short, overlap=False), "asp") == pytest.approx(2.1)
    assert limit_seconds(short, streamed=False) == pytest.approx(1.6)
    assert limit_seconds(cluster(1, overlap=True), streamed=False) == pytest.approx(2.0)


@given(
    policy=st.sampled_from((("bsp", 0), ("bsp:pipeline=true", 0), ("r2sp", 4), ("r2sp:groups=2", 1))),
    step=st.floats(-4, -1).map(lambda power: 10**power),
    seed=st.integers(0, 99),
    streamed=st.booleans(),
)
@tries(10, 100)
def test_the_promised_staleness_holds_for_overlapped_rounds(
    policy: tuple[str, int], step: float, seed: int, streamed: bool
) -> None:
    """It counts from the newest model that a round was added to, as in a real job."""
    spec = cluster(5, step=step, overlap=True, updates="int8").with_jitter(0.3)
    report = Cluster(spec, make(policy[0]), 20, seed, streamed).run().report
    assert report.max_staleness <= policy[1]


def test_a_worker_computes_while_its_update_and_the_reply_are_on_their_way() -> None:
    seen = events(cluster(1, overlap=True), "asp", 5)
    pushing = [event.time for event in seen if isinstance(event, Pushing)]
    pulled = [event.time for event in seen if isinstance(event, Pulled)]
    # The first model is there after 0.8 s. A round takes 2 s, and an exchange 0.8 s each way.
    assert pushing == pytest.approx([2.8, 4.8, 6.8, 8.8, 10.8])
    assert pulled[:4] == pytest.approx([0.8, 4.4, 6.4, 8.4])
    late = events(cluster(1, step=0.01, overlap=True), "asp", 4)
    # A round takes half a second, so the worker waits for the reply before it pushes the next one.
    assert [event.time for event in late if isinstance(event, Pushing)] == pytest.approx([1.3, 2.9, 4.5, 6.1])


@given(
    policy=st.sampled_from((*POLICIES, "kbatch", "fedbuff")),
    seed=st.integers(0, 999),
    streamed=st.booleans(),
    colocated=st.booleans(),
    codec=st.sampled_from(CODECS),
)
@tries(15, 150)
def test_overlapped_rounds_survive_faults(policy: str, seed: int, streamed: bool, colocated: bool, codec: str) -> None:
    spec = cluster(5, updates=codec, overlap=True, lease=3.0).with_jitter(0.2)
    spec = with_random_faults(spec.colocated() if colocated else spec, 5, 12, seed)
    seen: list[Event] = []
    observer = Recorder(seen.append)
    result = Cluster(spec, make(policy), 12, seed, streamed, observer).run()  # raises an error if it cannot go on
    judge_of(policy, streamed).watch(seen)
    assert all(0 <= share <= 1 + 1e-9 for share in result.computing)


def pushes(*faults: Fault, count: int = 1, lease: float = 30.0) -> list[float]:
    """Return when the last worker pushes, if a round takes 0.5 s and an exchange 0.8 s each way, overlapped."""
    spec = cluster(count, step=0.01, overlap=True, lease=lease, server_link=1e9, faults=faults)
    seen = events(spec, "asp", 4)
    return [event.time for event in seen if isinstance(event, Pushing) and event.worker == count - 1]


def test_a_pause_and_a_cut_while_a_worker_waits_for_the_reply_delay_its_next_push() -> None:
    assert pushes() == pytest.approx([1.3, 2.9, 4.5, 6.1])
    # The first update arrives at 2.1, and the model is back at 2.9. The round that is ahead is computed at 1.8.
    assert pushes(Fault(2.5, 0, "pause", 1.0)) == pytest.approx([1.3, 3.5, 5.1, 6.7]), "the model arrives in a pause"
    assert pushes(Fault(2.5, 0, "cut", 1.0)) == pytest.approx([1.3, 3.9, 5.5, 7.1]), "0.4 s of the model are left"
    assert pushes(Fault(1.5, 0, "pause", 1.0)) == pytest.approx([1.3, 2.9, 4.5, 6.1]), "it computes until 2.8"
    assert pushes(Fault(1.5, 0, "pause", 2.0)) == pytest.approx([1.3, 3.8, 5.4, 7.0]), "it computes until 3.8"


def test_a_pause_that_outlasts_a_cut_delays_the_push_too() -> None:
    both = Fault(2.8, 0, "cut", 0.3), Fault(2.85, 0, "pause", 1.0)  # the model is there at 3.2
    assert pushes(*both) == pytest.approx([1.3, 3.85, 5.45, 7.05])


def test_a_worker_that_is_given_up_loses_the_round_that_it_computes_ahead() -> None:
    # It is given up at 3.0 and joins again at 4.5. Then it pulls for 0.8 s and computes for 0.5 s before it pushes.
    assert pushes(Fault(2.0, 1, "cut", 2.5), count=2, lease=1.0)[:3] == pytest.approx([1.3, 5.8, 7.4])
    assert pushes(Fault(2.0, 1, "kill"), Fault(4.5, 1, "rejoin"), count=2)[:3] == pytest.approx([1.3, 5.8, 7.4])


def test_a_worker_whose_update_is_discarded_goes_on_with_the_round_that_it_computes_ahead() -> None:
    slow = WorkerSpec(12.5e6, 32, 32 / 0.1)
    spec = cluster(4, updates="int8", overlap=True)
    result = Cluster(replace(spec, workers=(*spec.workers[:3], slow)), make("bsp:backup=1"), 80).run()
    assert result.report.discarded > 20
    assert result.report.mean_iteration_seconds < 2.5
    assert min(result.computing) > 0.98, "the slow one computes without a pause too"


# Tuned batches


@pytest.mark.parametrize("policy", ["r2sp:tune_batches=true", "bsp:tune_batches=true"])
def test_fast_workers_make_rounds_of_larger_batches(policy: str) -> None:
    slow = WorkerSpec(12.5e6, 32, 32 / 0.16)
    spec = replace(cluster(8, updates="topk:0.02"), workers=(*cluster(7).workers, slow))
    plain = Cluster(spec, make(policy.partition(":")[0]), 120).run()
    tuned = Cluster(spec, make(policy), 120).run()
    assert tuned.report.batch_sizes[7] == plain.report.batch_sizes[7] == 50 * 32
    assert [tuned.report.batch_sizes[number] for number in range(7)] == pytest.approx([4 * 50 * 32] * 7, rel=0.02)
    assert tuned.report.samples_per_second > 3.3 * plain.report.samples_per_second
    assert tuned.report.mean_iteration_seconds == pytest.approx(plain.report.mean_iteration_seconds, rel=0.03)
    assert run_limit_seconds(spec, make(policy), tuned) == pytest.approx(8.0, rel=0.03)


# The floor


@given(
    policy=st.sampled_from(POLICIES),
    step=st.floats(-4, -1).map(lambda power: 10**power),
    codec=st.sampled_from(CODECS),
    overlap=st.booleans(),
    streamed=st.booleans(),
    colocated=st.booleans(),
)
@tries(15, 150)
def test_no_policy_is_below_the_floor_of_rounds(
    policy: str, step: float, codec: str, overlap: bool, streamed: bool, colocated: bool
) -> None:
    spec = cluster(5, step=step, updates=codec, overlap=overlap, latency=1e-3)
    spec = spec.colocated() if colocated else spec
    made, N, iterations = make(policy), 5, 24
    result = Cluster(spec, made, iterations, 0, streamed).run()
    limit = run_limit_seconds(spec, made, result)
    assert limit is not None
    counted = (iterations - iterations // 4) * N
    slack = (2 if overlap else 1) * N  # rounds that were begun before the means begin
    assert result.report.mean_iteration_seconds >= 0.999 * limit * counted / (counted + slack)


def test_turns_reach_the_floor() -> None:
    for codec in CODECS:
        for overlap in (False, True):
            spec = cluster(8, updates=codec, overlap=overlap)
            assert seconds(spec, "r2sp", iterations=80) == pytest.approx(limit_seconds(spec, False), rel=0.01)


# What workers and links do


def test_the_share_of_computing_is_as_calculated_by_hand() -> None:
    result = Cluster(cluster(8, updates="int8"), make("bsp"), 80).run()
    exchange = 8 * cluster(updates="int8").update_bytes / 12.5e6
    assert result.computing == pytest.approx([2.0 / (2.0 + 2 * exchange)] * 8, rel=0.02)
    slow = WorkerSpec(12.5e6, 32, 32 / 0.16)
    unequal = replace(cluster(1, updates="topk:0.02"), workers=(*cluster(3).workers, slow))
    computing = Cluster(unequal, make("bsp"), 80).run().computing
    assert computing[3] > 0.94
    assert computing[:3] == pytest.approx([computing[3] / 4] * 3, rel=0.02)


def test_the_peak_by_turns_is_that_of_one_worker_where_the_exchanges_of_all_take_a_twentieth_of_a_round() -> None:
    spec = replace(cluster(8, updates="int4"), local_steps=500)
    peaks = {}
    for policy in ("bsp", "r2sp"):
        use = LinkUse()
        result = Cluster(spec, make(policy), 60, 0, observer=use).run()
        since, until = result.warmed_up_at, result.simulated_seconds
        peaks[policy] = [use.peak(way, burst_seconds(spec, way), since, until) for way in DIRECTIONS]
        rate = 8 * spec.update_bytes / result.report.mean_iteration_seconds / 12.5e6
        for direction in DIRECTIONS:
            assert use.mean(direction, since, until) == pytest.approx(rate, rel=0.05)
    assert peaks["bsp"] == pytest.approx([1.0, 1.0], rel=0.01)
    assert peaks["r2sp"] == pytest.approx([1 / 8, 1 / 8], rel=0.01)


@given(
    changes=st.lists(st.tuples(st.integers(0, 20), st.sampled_from((0.0, 0.25, 1.0))), max_size=12),
    window=st.integers(1, 20),
)
@tries(50, 300)
def test_the_peak_is_the_largest_mean_over_any_window(changes: list[tuple[int, float]], window: int) -> None:
    changes.sort(key=lambda change: change[0])
    use = LinkUse()
    by_second = [0.0] * 40  # the use in each second
    for time, fraction in changes:
        use.used(time, "in", fraction)
        by_second[time:] = [fraction] * (40 - time)
    windows = [sum(by_second[begin : begin + window]) / window for begin in range(40 - window + 1)]
    assert use.peak("in", window, 0.0, 40.0) == pytest.approx(max(windows))
    assert use.mean("in", 0.0, 40.0) == pytest.approx(sum(by_second) / 40)
    assert use.peak("out", window, 0.0, 40.0) == 0


def test_use_is_asked_for_between_two_times() -> None:
    use = LinkUse()
    use.used(0.0, "in", 1.0)
    use.used(10.0, "in", 0.0)
    use.used(12.0, "in", 0.5)
    assert use.peak("in", 2.0, 10.0, 16.0) == pytest.approx(0.5)
    assert use.peak("in", 60.0, 10.0, 16.0) == use.mean("in", 10.0, 16.0) == pytest.approx(2.0 / 6.0)
    assert use.peak("in", 2.0, 9.0, 16.0) == pytest.approx(0.5)
    assert use.peak("in", 2.0, 0.0, 16.0) == 1.0
    assert use.mean("in", 16.0, 16.0) == 0.0


def test_a_simulated_model_needs_gradients_of_every_step() -> None:
    gradients = cluster(2, local_steps=1)
    for spec in (cluster(2), replace(gradients, updates="int8"), replace(gradients, overlap=True)):
        with pytest.raises(ValueError, match="in every step"):
            Cluster(spec, make("asp"), 2, model=CountedModel())
