"""`--max-norm` on a real server: one worker of three cannot take the model over, with whole and half precision."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from paceline.model.description import Description
from paceline.model.layout import STATISTICS, Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.slice import Slice
from paceline.observe.trace import Clipped
from paceline.policies import make
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.environment import address
from paceline.serve.server import Server, ServerError
from paceline.serve.shard.pulls import PullServer
from paceline.serve.shard.store import HeldUpdate, WholeStore
from paceline.serve.shard.whole_updates import WholeUpdates
from paceline.serve.wire.messages import Identity, UpdateReceived
from paceline.serve.worker.client import Client
from train.jobs import job

SIZE, COUNTED, UPDATES, ATTACK = 63, 4, 6, 1e6
LAYOUT = Layout((Tensor("w", (SIZE,)), Tensor("mean", (COUNTED,), group=STATISTICS)))
SGD, ADAM = (Description(LAYOUT, OptimizerSpec(name, ({"lr": 1.0},))).as_json() for name in ("SGD", "Adam"))


@dataclass(frozen=True)
class Attack:
    """The updates of the attacker, after a first one that is as usual."""

    scale: float = ATTACK
    rate: float = 1.0
    dtype: str = "float32"
    description: bytes = SGD


def train(where: str, worker: int, pushes: Attack, first: threading.Barrier, out: list[Any]) -> None:
    """Push gradients of -scale at a learning rate. Both are 1 at first, so that the usual size is known then."""
    weights = np.zeros(SIZE + COUNTED, dtype=np.float32)
    client = Client(address(where), pushes.description, worker=worker)
    client.begin(weights.data.cast("B"))
    for number in range(UPDATES):
        values = torch.full((SIZE + COUNTED,), -pushes.scale if number else -1.0)
        values[SIZE:] = 3.0  # a statistic is sent as its value
        gradient = values.to(getattr(torch, pushes.dtype)).view(torch.uint8).numpy().data
        rates = (pushes.rate if number else 1.0,)
        client.exchange(gradient, weights.data.cast("B"), batch_size=1, rates=rates, dtype=pushes.dtype)
        if not number:
            first.wait(30)
    client.finish(weights.data.cast("B"))
    out.append(weights)
    client.close()


def attacked(policy: str, max_norm: float | None, attack: Attack) -> tuple[Any, list[Clipped]]:
    """Train with two honest workers and an attacker. Return the model, and the updates that were clipped."""
    models: list[Any] = []
    first, honest = threading.Barrier(3), replace(attack, scale=1.0, rate=1.0)
    with job(policy, shards=2, workers=3, max_norm=max_norm) as running:
        threads = [
            threading.Thread(target=train, args=(running.address, worker, pushes, first, models), daemon=True)
            for worker, pushes in enumerate((honest, honest, attack))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(models) == 3
        return models[0], [event for event in running.events if isinstance(event, Clipped)]


@pytest.mark.parametrize("policy", ["asp", "bsp:weights=mean", "r2sp:weights=mean", "ssp:staleness=2,weights=sum"])
def test_one_worker_cannot_take_the_model_over(policy: str) -> None:
    """Each honest update adds 1, and each of the attacker's adds 10 at most, times the weight that the policy gives."""
    model, clipped = attacked(policy, 10.0, Attack())
    share = 1 / 3 if policy.startswith("bsp") else 1.0  # a worker that is left alone has a larger one
    assert (model[:SIZE] <= share * (2 * UPDATES + 1 + 10 * (UPDATES - 1)) * (1 + 1e-4)).all()
    assert model[SIZE:] == pytest.approx([3.0] * COUNTED, rel=0.01)  # they began at 0
    assert [(each.worker, each.iteration) for each in clipped] == [(2, number) for number in range(2, UPDATES + 1)]
    assert [each.factor for each in clipped] == pytest.approx([10 / ATTACK] * (UPDATES - 1), rel=1e-3)


def test_without_a_limit_the_attacker_decides() -> None:
    model, clipped = attacked("asp", None, Attack())
    assert (model[:SIZE] >= (UPDATES - 1) * ATTACK).all()
    assert not clipped


def test_gradients_of_half_precision_are_clipped_too() -> None:
    model, clipped = attacked("asp", 10.0, Attack(dtype="bfloat16"))
    assert (model[:SIZE] <= 2 * UPDATES + 1 + 10.1 * (UPDATES - 1)).all()
    assert len(clipped) == UPDATES - 1


@pytest.mark.parametrize("description", [SGD, ADAM], ids=["SGD", "Adam"])
def test_a_huge_learning_rate_is_clipped_too(description: bytes) -> None:
    """Each step of Adam is about as large as its learning rate, whatever the gradient is."""
    model, clipped = attacked("asp", 10.0, Attack(scale=1.0, rate=ATTACK, description=description))
    assert (model[:SIZE] <= 2 * UPDATES + 1 + 10.1 * (UPDATES - 1)).all()
    assert len(clipped) == UPDATES - 1


def test_usual_updates_are_left_alone() -> None:
    model, clipped = attacked("asp", 10.0, Attack(scale=2.0))
    assert not clipped
    assert model[:SIZE] == pytest.approx([2.0 * UPDATES + 1 + 2.0 * (UPDATES - 1)] * SIZE)


@pytest.mark.parametrize(
    ("policy", "options", "why"),
    [
        ("r2sp", {"streamed": True}, "leave --apply at whole"),
        ("fl-r2sp:groups=2,moves=model", {}, "whole models"),
        ("safa", {}, "whole models"),
        ("asp", {"shards": 0}, "--servers 1"),
    ],
)
def test_updates_that_cannot_be_compared_are_refused(policy: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ServerError, match=why):
        Server(lambda: make(policy), ServerConfig(max_norm=10.0, policy=policy, **options))


def test_a_backup_that_takes_over_reports_the_sizes_of_the_updates_it_holds() -> None:
    part = Slice(LAYOUT, 0, SIZE + COUNTED, OptimizerSpec("SGD", ({"lr": 1.0},)))
    told: list[Any] = []
    state, store = threading.Condition(), WholeStore(part)
    backup = WholeUpdates(store, state, told.append, PullServer(store, state, threading.Event(), None, 1))
    backup.follows = backup.measures = True
    values = torch.full((SIZE + COUNTED,), 2.0)
    update = Identity(0, 1, 1)
    backup.receive(update, 0, HeldUpdate(values, (0.5,)), None)
    assert not told
    backup.take_over()
    assert told == [UpdateReceived(update, (4.0 * SIZE, 4.0 * COUNTED, 0.5))]
