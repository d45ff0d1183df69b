"""Both ends of the protocol under a virtual clock, with faults at every point and at random.

`python benchmarks/seeds.py` runs thousands of seeds. The first ones run here.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from conformance.judge import judge_of
from paceline.job import JobState
from paceline.simulate.protocol import ProtocolOutcome, ScheduledFault, Setting, run
from paceline.simulate.protocol.faults import KINDS
from paceline.simulate.protocol.run import POLICIES
from simulate.mistakes import MISTAKES
from tries import SEARCH, every

LEASE = 4.0


def check(outcome: ProtocolOutcome) -> None:
    """Assert that neither the job nor the policy has broken a promise."""
    assert not outcome.problems
    for trace in outcome.traces:
        judge = judge_of(outcome.setting.policy, outcome.setting.streamed)
        judge.version = trace.version
        judge.watch(trace.events)


def small(policy: str, streamed: bool) -> Setting:
    return Setting(
        policy=policy,
        streamed=streamed,
        workers=2,
        shards=1,
        pieces=2,
        samples=6,
        batch=2,
        epochs=1,
        lease=LEASE,
        save_every=2,
        pace=(1.0, 0.7),
        loss=0.0,
    )


SMALL = {
    "r2sp-streamed": small("r2sp", True),
    "r2sp-impatient": replace(small("r2sp:patience=0.5", True), workers=3, samples=12, pace=(1.0, 0.7, 2.0)),
    "r2sp-visits": replace(small("r2sp", True), shards=2, visits=2),
    "r2sp-visits-impatient": replace(
        small("r2sp:patience=0.5", True), workers=3, shards=3, samples=12, pace=(1.0, 0.7, 2.0), visits=2
    ),
    "r2sp-groups": replace(small("r2sp:groups=2,patience=0.5", True), workers=3, samples=12, pace=(1.0, 0.7, 2.0)),
    "r2sp": small("r2sp", False),
    "bsp": small("bsp", False),
    "bsp-pipelined": small("bsp:pipeline=true", True),
    "asp-streamed": small("asp", True),
    "ssp": small("ssp:staleness=1", False),
    "bsp-backup": small("bsp:backup=1", False),
}


def moments(setting: Setting) -> list[float]:
    """Return the moments shortly after each event of the server in a run without faults."""
    history: list[str] = []
    check(run(1, setting=setting, faults=(), history=history))
    return sorted({float(line.split()[0]) + 0.0005 for line in history})


def at_every_point(setting: Setting, kind: str, seconds: float) -> int:
    """Strike at every moment, one fault in each run. Return the number of runs.

    `make test` strikes the workers in turn, and `make test-all` strikes each of them at every moment.
    """
    assert kind in KINDS
    runs = 0
    for number, moment in enumerate(moments(setting)):
        for target in range(setting.workers) if SEARCH else (number % setting.workers,):
            check(run(1, setting=setting, faults=(ScheduledFault(moment, kind, target, seconds),)))
            runs += 1
    return runs


@pytest.mark.parametrize("setting", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("notice", [0.0, LEASE / 3], ids=["noticed at once", "noticed late"])
def test_a_connection_is_lost_at_every_point(setting: Setting, notice: float) -> None:
    assert at_every_point(setting, "cut worker", notice) > 20


@pytest.mark.parametrize("setting", SMALL.values(), ids=SMALL)
def test_a_server_is_stopped_at_every_point(setting: Setting) -> None:
    """It is stopped for longer than a lease. Workers hang up, and it finds old messages in its queue."""
    for moment in every(2, moments(setting)):
        check(run(1, setting=setting, faults=(ScheduledFault(moment, "stop server", 0, 1.7 * LEASE),)))


@pytest.mark.parametrize("kind", ["kill worker", "stop worker", "twin", "kill server", "kill shard"])
def test_a_process_fails_at_every_point(kind: str) -> None:
    assert at_every_point(SMALL["r2sp-streamed"], kind, 1.5 * LEASE) > 20


@pytest.mark.parametrize("second", ["kill server", "kill shard", "kill worker", "cut worker", "stop server"])
@pytest.mark.parametrize("first", ["kill server", "kill shard"])
def test_a_job_is_struck_again_at_moments_of_its_recovery(first: str, second: str) -> None:
    """The second fault comes while the server restarts, while shards load the checkpoint, and while workers return."""
    assert first in KINDS and second in KINDS
    setting = replace(SMALL["r2sp-streamed"], restore_seconds=2.0)
    moment = moments(setting)[len(moments(setting)) // 2]
    generations = set()
    for step in every(2, range(40)):
        faults = (ScheduledFault(moment, first, 0, 1.0), ScheduledFault(moment + 0.1 * step, second, 1, 1.0))
        outcome = run(1, setting=setting, faults=faults)
        check(outcome)
        generations.add(len(outcome.traces))
    assert max(generations) == (3 if second in ("kill server", "kill shard") else 2)


def test_some_seeds_have_faults_during_recovery_and_several_at_once() -> None:
    outcomes = [run(seed) for seed in range(60)]
    gaps = [
        later.time - fault.time
        for outcome in outcomes
        for fault, later in itertools.pairwise(outcome.faults)
        if fault.kind in ("kill server", "kill shard")
    ]
    assert 0.0 in gaps
    assert sum(gap < LEASE for gap in gaps) > 20
    assert any(outcome.setting.restore_seconds for outcome in outcomes)


def test_every_kind_of_fault_and_every_policy_is_drawn() -> None:
    outcomes = [run(seed) for seed in range(120)]
    for outcome in outcomes:
        check(outcome)
    assert {fault.kind for outcome in outcomes for fault in outcome.faults} == set(KINDS)
    assert {outcome.setting.policy for outcome in outcomes} == set(POLICIES)
    assert any(len(outcome.traces) > 2 for outcome in outcomes), "no server was restored more than once"


def test_a_seed_gives_the_same_run_every_time() -> None:
    first, second = run(7), run(7)
    assert first.seconds == second.seconds
    assert first.traces == second.traces


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    """The mistakes of `benchmarks/seeds.py --mistake`. A simulation that finds no mistake proves nothing."""

    def fails(seed: int) -> bool:
        try:
            check(run(seed, MISTAKES[name]))
        except (AssertionError, LookupError, RuntimeError):
            return True
        return False

    assert any(fails(seed) for seed in range(1000))
    assert issubclass(MISTAKES[name], JobState)
