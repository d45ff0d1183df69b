"""Every policy under the most extreme numbers that the job accepts from workers: no error, and no absurd decision."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from job.conversation import Conversation
from paceline.job import events, instructions
from paceline.job.limits import MAX_SAMPLES, MAX_SECONDS, MAX_VALUE, MIN_SECONDS
from policies.specs import SPECS, STREAMED
from tries import tries

WORKERS = 3
SECONDS = (5e-324, MIN_SECONDS, 0.0, 0.1, MAX_SECONDS)
BATCHES = (1, 2, 1000, MAX_SAMPLES)
LOSSES = (None, 0.0, 5e-324, 1.0, -MAX_VALUE, MAX_VALUE, 1e300, math.inf, math.nan)
PAUSES = (0.0, 1e-9, 0.1, 1e6)
METRICS = (("val_loss", math.nan), ("val_loss", 1e300), ("momentum", 1e300), ("cosine", math.nan), ("pardon", 1.0))
STEPS = st.lists(
    st.tuples(
        st.integers(0, WORKERS - 1),
        st.sampled_from(SECONDS),
        st.sampled_from(BATCHES),
        st.sampled_from(LOSSES),
        st.sampled_from(PAUSES),
        st.sampled_from((None, None, *METRICS)),
    ),
    min_size=20,
    max_size=60,
)


def check(out: list[Any]) -> None:
    """Check that every number in the instructions makes sense."""
    for each in out:
        match each:
            case instructions.SendGrant():
                assert each.batch_size is None or 1 <= each.batch_size <= 1 << 60
            case instructions.OrderApply():
                assert all(0 <= weight < math.inf for weight in each.decision.weights)
                assert each.decision.mix is None or 0 <= each.decision.mix <= 1
            case instructions.OrderStream():
                assert all(0 <= weight < math.inf for weight in each.weights)
            case instructions.OrderAdd():
                assert 0 <= each.weight < math.inf
            case instructions.SetTimer():
                assert math.isfinite(each.time)
            case instructions.SendRefused() | instructions.FailGeneration():
                raise AssertionError(each)


@pytest.mark.parametrize("spec", [*SPECS, "rlp", "rlp:weights=mean"])
@tries(5, 200, derandomize=False)
@given(steps=STEPS)
def test_no_number_of_a_worker_breaks_a_policy(spec: str, steps: list[tuple[Any, ...]]) -> None:
    talk = Conversation(spec.removesuffix(STREAMED), workers=WORKERS, streams=spec.endswith(STREAMED), lease=1e12)
    granted: dict[int, int] = {}  # worker → the iteration that it computes
    pushing: dict[int, int] = {}  # worker → the iteration whose update is computed and has not arrived
    turned: dict[int, int] = {}  # worker → the newest iteration that it may push
    timer: float | None = None

    def tell(event: events.Event) -> None:
        nonlocal timer
        out = talk.tell(event)
        check(out)
        for each in out:
            worker = next((known for known, at in talk.connections.items() if at == getattr(each, "to", None)), -1)
            match each:
                case instructions.SendGrant():
                    granted[worker] = each.iteration
                case instructions.SendCancel():
                    granted.pop(worker, None)
                    pushing.pop(worker, None)
                case instructions.SendPushNow():
                    turned[worker] = each.iteration
                case instructions.SetTimer():
                    timer = each.time

    def arrive() -> None:
        """Have the shards receive the updates that may be pushed. A whole update may arrive before its turn."""
        for worker, iteration in list(pushing.items()):
            if pushing.get(worker) == iteration and (not talk.config.streams or turned.get(worker) == iteration):
                del pushing[worker]
                for shard in talk.shards:
                    tell(events.UpdateArrived(shard, worker, talk.incarnations[worker], iteration))

    for worker in range(WORKERS):
        tell(events.WorkerJoined(talk.connect(worker), worker))
    for shard in talk.shards:
        tell(events.ShardInitialized(shard, 0, talk.incarnations[0]))
    for worker, seconds, batch, loss, pause, metric in steps:
        talk.now += pause
        if timer is not None and timer <= talk.now:
            timer = None
            tell(events.TimerFired())
        if metric:
            tell(events.MetricReported(talk.connections[worker], *metric))
        if worker in granted:
            iteration = pushing[worker] = granted.pop(worker)
            connection, version = talk.connections[worker], talk.state.version
            tell(events.GradientComputed(connection, iteration, version, batch, seconds, loss))
        arrive()
