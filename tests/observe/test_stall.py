"""When a job has stalled, the reason that is given, and when it has not."""

from __future__ import annotations

import random

import pytest

from paceline.observe.observer import Tee
from paceline.observe.stall import LEAST_SECONDS, TIMES, StallDetector
from paceline.policies import make
from paceline.simulate import Cluster, load_cluster


class Job:
    """A job under a barrier, by hand. `said` holds what the detector has said."""

    def __init__(self, workers: int = 3, seconds: float = 2.0, rounds: int = 10) -> None:
        self.said: list[str] = []
        self.detector = StallDetector(self.said.append, policy="bsp")
        self.now, self.workers, self.seconds = 0.0, range(workers), seconds
        self.version = 0
        for worker in self.workers:
            self.detector.joined(self.now, worker)
        for _ in range(rounds):
            self.round()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and check every half second, as the display does."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.5)
            self.detector.check(self.now)

    def grant(self) -> None:
        for worker in self.workers:
            self.detector.granted(self.now, worker, None, 0)

    def push(self, *workers: int) -> None:
        for worker in workers:
            self.detector.computed(self.now, worker)
            self.detector.turned(self.now, worker)
            self.detector.arrived(self.now, worker, 1, 32)

    def apply(self) -> None:
        self.version += 1
        count = len(self.workers)
        self.detector.applied(self.now, self.version, tuple(self.workers), (1,) * count, (0,) * count)

    def round(self, seconds: float | None = None) -> None:
        """Have all workers make an iteration that takes so long."""
        self.grant()
        self.pass_time(self.seconds if seconds is None else seconds)
        self.push(*self.workers)
        self.apply()


def test_a_worker_that_hangs_is_named_once_and_so_is_the_end() -> None:
    job = Job()
    job.grant()
    job.pass_time(2)
    job.push(0, 1)
    job.pass_time(100)
    assert job.said == [
        "Nothing has changed the model for 20 s: worker 2 has not pushed for 20 s, and its iterations usually "
        "take 2 s; 2 workers wait for that under bsp."
    ]
    assert job.detector.is_stalled
    job.push(2)
    job.apply()
    assert job.said[1:] == ["The job goes on after 102 s."]
    assert not job.detector.is_stalled
    for _ in range(5):
        job.round()
    assert len(job.said) == 2


@pytest.mark.parametrize("seconds", [0.01, 1.0, 30.0, 600.0])
def test_the_warning_comes_after_ten_times_the_usual_but_not_before_some_seconds(seconds: float) -> None:
    job = Job(seconds=seconds)
    limit = max(LEAST_SECONDS, TIMES * seconds)
    job.grant()
    job.pass_time(limit - 1)
    assert job.said == []
    job.pass_time(2)
    assert len(job.said) == 1


def test_nothing_is_usual_before_the_first_update() -> None:
    job = Job(rounds=0)
    job.pass_time(3600)  # joining, and the first pull of a large model
    job.grant()
    job.pass_time(3600)
    assert job.said == []


def test_a_joiner_may_take_as_long_as_the_first_iterations_of_the_others() -> None:
    """It pulls the model for the first time, and compiles it."""
    job = Job(rounds=0)
    job.round(seconds=60)
    for _ in range(10):
        job.round()
    job.workers = range(4)
    job.detector.joined(job.now, 3)
    job.round(seconds=200)
    assert job.said == []


def test_a_checkpoint_may_take_as_long_as_the_last_one() -> None:
    job = Job(rounds=0)
    job.detector.saved(job.now, 0, 60.0)
    for _ in range(10):
        job.round()
    job.round(seconds=110)
    assert job.said == []


def test_a_pause_that_ended_by_itself_is_usual_from_then_on() -> None:
    """Such as the main worker's evaluation at the end of each epoch, while the others wait for it."""
    job = Job()
    for _ in range(4):
        job.round(seconds=45)
        for _ in range(20):
            job.round()
    assert [text.partition(":")[0] for text in job.said] == [
        "Nothing has changed the model for 20 s",
        "The job goes on after 45 s.",
    ]


def test_the_end_of_a_job_is_no_stall() -> None:
    job = Job()
    for worker in job.workers:
        job.detector.left(job.now, worker)
    job.pass_time(3600)
    assert job.said == []


def test_workers_that_finished_wait_for_the_last_one_without_a_warning() -> None:
    job = Job()
    job.grant()
    for worker in (0, 1):
        job.detector.left(job.now, worker)
    job.pass_time(15)
    job.push(2)
    job.apply()
    job.detector.left(job.now, 2)
    job.pass_time(600)
    assert job.said == []


def test_the_loss_of_all_workers_is_a_stall() -> None:
    job = Job()
    for worker in job.workers:
        job.detector.left(job.now, worker, lost=True)
    job.pass_time(60)
    assert job.said == [
        "Nothing has changed the model for 20 s: workers 0, 1 and 2 were lost, and the job waits for new workers."
    ]


def test_a_policy_that_does_not_decide_is_named() -> None:
    job = Job()
    job.grant()
    job.push(*job.workers)
    job.pass_time(60)
    assert job.said == ["Nothing has changed the model for 20 s: 3 workers wait for a decision of bsp."]


def test_many_slow_workers_are_counted() -> None:
    job = Job(workers=10_000, rounds=3)
    job.grant()
    job.pass_time(30)
    (said,) = job.said
    assert said.count("usually take") == 3
    assert said.endswith("; 9997 more are at work.")


def test_a_process_that_was_held_up_does_not_blame_the_job() -> None:
    """The machine slept, for example."""
    job = Job()
    job.grant()
    job.pass_time(1)
    job.now += 3600
    job.detector.check(job.now)
    job.pass_time(5)
    assert job.said == []
    job.pass_time(30)
    assert len(job.said) == 1, "it has stalled after all"


def test_a_restarted_server_begins_anew() -> None:
    job = Job()
    job.detector.began(job.now, "", "bsp", "whole", 0)
    job.pass_time(600)
    assert job.said == []


POLICIES = ["bsp", "asp", "ssp:staleness=3", "r2sp", "r2sp:groups=2", "dssp:low=3,high=15", "ksync:k=2", "fl-r2sp"]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_is_called_stalled_in_a_simulated_cluster_with_jitter(policy: str) -> None:
    said: list[str] = []
    detector = StallDetector(said.append, times=TIMES, least=0.0)
    checks = random.Random(1)

    class Checker(StallDetector):
        """Checks at each arrival, just before the pause ends: this is when a false alarm is most likely."""

        def arrived(self, time: float, *rest: object) -> None:
            detector.check(time - checks.random() * 1e-9)

    spec = load_cluster("r2sp-b").with_jitter(0.3)
    Cluster(spec, make(policy), 40, observer=Tee(Checker(said.append), detector)).run()
    assert said == []
    assert detector.patience() > 0
