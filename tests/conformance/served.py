"""The real parameter server as a Driver: real sockets, a coordinator, two shards and a thread for each worker.

One second of the job takes a few milliseconds here. tests/faults covers faults. If updates are streamed, the model is
large enough for several pieces on each shard.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import numpy as np

from paceline.model.description import MIN_PIECE_ELEMENTS
from paceline.observe.driver import Job
from paceline.observe.trace import Arrived, Event
from paceline.policies import Policy
from paceline.serve.environment import address
from paceline.serve.worker.client import Client
from serve.workers import SIZE, described
from train.jobs import job as serving

SECOND = 0.004  # duration of one second of the job
BATCH = 32


def served(policy: Policy, job: Job) -> list[Event]:
    """Drive a policy through a job. Return the trace until the job's iterations have arrived."""
    assert not job.faults, "this driver cannot inject faults"
    size = 6 * MIN_PIECE_ELEMENTS if job.streamed or policy.pipelined else SIZE
    goal = job.iterations * len(job.compute_seconds)
    enough = threading.Event()

    def worker(number: int) -> None:
        chance = random.Random(f"{job.seed} {number}")
        weights, gradient = np.zeros(size, np.float32), np.ones(size, np.float32)
        client = Client(address(running.address), described(size), worker=number)
        try:
            granted = client.begin(weights.data.cast("B"))
            while not enough.is_set():
                seconds = job.compute_seconds[number] * chance.lognormvariate(0.0, 0.1) * SECOND
                time.sleep(seconds)
                granted = client.exchange(
                    gradient.data.cast("B"),
                    weights.data.cast("B"),
                    batch_size=granted.batch_size or BATCH,
                    compute_seconds=seconds,
                    rates=(0.01,),
                )
                if sum(isinstance(event, Arrived) for event in list(running.events)) >= goal:
                    enough.set()
        finally:
            client.close()

    with serving(policy, shards=2, workers=len(job.compute_seconds), streamed=job.streamed) as running:
        running.work(*[lambda _, number=number: worker(number) for number in range(len(job.compute_seconds))])
        running.finish()
        assert running.coordinator.apply == ("streamed" if size > SIZE else "whole")
    return list(until_goal(running.events, goal))


def until_goal(events: list[Event], goal: int) -> Iterator[Event]:
    """Yield the events up to the last arrival that counts, and the decisions that follow it at the same time."""
    last = None
    for event in events:
        if last is not None and (isinstance(event, Arrived) or event.time != last):
            return
        yield event
        if isinstance(event, Arrived):
            goal -= 1
            if goal == 0:
                last = event.time
