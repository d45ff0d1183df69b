"""A shard and its backup hold the same state, bit for bit, and the coordinator knows which of them counts."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")

import torch

from paceline.model.description import Description
from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import OptimizerSpec
from paceline.model.sparse_mean import STATE
from paceline.policies import make
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.coordinator.shard_replicas import ShardReplicas
from paceline.serve.environment import address
from paceline.serve.server import Server, ServerError
from paceline.serve.shard.replication import Backup, Relay
from paceline.serve.wire.endpoint import Endpoint
from paceline.serve.wire.messages import Hello, Identity, Push, Register
from paceline.serve.worker.client import Client
from train.generations import ThreadOfShard, served

SIZE, WORKERS, UPDATES = 10_001, 3, 12
ADAM = Description(Layout((Tensor("w", (SIZE,)),)), OptimizerSpec("Adam", ({"lr": 0.1},)))


def train(where: str, worker: int, described: Description) -> None:
    """Push random gradients."""
    random = np.random.default_rng(worker)
    weights = random.standard_normal(SIZE).astype(np.float32)
    client = Client(address(where), described.as_json(), worker=worker)
    client.begin(weights.data.cast("B"))
    for _ in range(UPDATES):
        gradient = random.standard_normal(SIZE).astype(np.float32)
        client.exchange(
            gradient.data.cast("B"), weights.data.cast("B"), batch_size=1, compute_seconds=0.001, rates=(0.1,)
        )
    client.close()


@pytest.mark.parametrize(
    ("policy", "codec"),
    [
        ("asp", ""),
        ("r2sp", ""),
        ("r2sp", "int4"),
        ("asp", "topk:0.1"),
        ("r2sp:weights=mean", "topk:0.1"),
        ("bsp:weights=mean", "topk:0.1"),
        ("fedbuff:k=2,discount=0", ""),
        ("filtered:policy=bsp", ""),
        ("fl-r2sp:groups=1,as_printed=true", ""),
    ],
)
def test_a_backup_holds_the_same_state_bit_for_bit(policy: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ThreadOfShard] = []
    monkeypatch.setattr(ThreadOfShard, "started", started)
    described = replace(ADAM, local_steps="weights=mean" in policy)
    with served(policy, shards=2, workers=WORKERS, replicas=1, update_codec=codec) as running:
        running.work(*(lambda where, worker=worker: train(where, worker, described) for worker in range(WORKERS)))
    for thread in started:
        thread.join(30.0)
    shards = [thread.shard for thread in started]
    assert len(shards) == 4
    for primary, backup in zip(shards[:2], shards[2:], strict=True):
        assert primary and backup
        ours, theirs = (each.await_setup().store for each in (primary, backup))
        assert ours.version == theirs.version > 0
        assert ours.waiting() == theirs.waiting()
        mine, yours = ours.state()[0], theirs.state()[0]
        assert mine.keys() == yours.keys()
        assert any(name.endswith(STATE) for name in mine) == described.local_steps, "the senders of each element"
        assert all(torch.equal(mine[name], yours[name]) for name in mine)


def test_an_update_that_is_reported_twice_counts_once() -> None:
    replicas = ShardReplicas(0, 2)
    assert replicas.is_news(Identity(1, 1, 1))
    assert replicas.is_news(Identity(1, 1, 2))
    assert not replicas.is_news(Identity(1, 1, 2))
    assert not replicas.is_news(Identity(1, 1, 1)), "a late report of an older update"
    assert replicas.is_news(Identity(1, 2, 1)), "another incarnation"
    assert replicas.is_news(Identity(2, 1, 1)), "another worker"


def test_a_silent_backup_is_noticed_by_the_heartbeats_of_its_primary() -> None:
    replicas = ShardReplicas(0, 2)
    for replica in (0, 1):
        replicas.enter(Register(0, 1, bytes([replica]), "generation", replica=replica), "")
    for _ in range(15):
        assert replicas.beat(0) is None
    assert replicas.beat(1) is None
    assert [replicas.beat(0) for _ in range(21)] == [None] * 20 + [1]


def test_the_backup_becomes_the_primary_before_the_setup() -> None:
    replicas = ShardReplicas(0, 2)
    for replica in (0, 1):
        replicas.enter(Register(0, 7 + replica, bytes([replica]), "generation", replica=replica), "")
    assert replicas.backup_place == ("", 8, b"")
    assert replicas.give_up(0)
    assert replicas.address == ("", 8)
    assert replicas.backup is None
    assert replicas.was_lost(Register(0, 7, bytes([0]), "generation"))


def test_a_shard_waits_for_a_backup_until_it_is_told_to_go_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.shard.replication.UNREACHABLE_SECONDS", 0.1)
    reports: list[str] = []
    reported, finished = threading.Event(), threading.Event()

    def report(reason: str) -> None:
        reports.append(reason)
        reported.set()

    backup = Backup(Endpoint("127.0.0.1", 1), "generation", report)  # nobody listens at port 1
    relay = Relay(backup, Hello(0, 1, b""))

    def push() -> None:
        body = memoryview(bytes(8))
        relay.begin(Push(1, (0.1,)), body)
        relay.arrived(8)
        relay.finish()
        finished.set()

    threading.Thread(target=push, daemon=True).start()
    assert reported.wait(30.0)
    assert not finished.wait(0.3), "the backup may still take over"
    backup.end()
    assert finished.wait(30.0)
    assert len(reports) == 1


@pytest.mark.parametrize(
    ("policy", "options", "reason"),
    [
        ("bsp:pipeline=true", {}, "leave pipeline=true out"),
        ("r2sp", {"streamed": True}, "leave --apply at whole"),
        ("bsp", {"shards": 0}, "needs shards"),
    ],
)
def test_replicas_are_refused_where_they_cannot_be_had(policy: str, options: dict[str, int], reason: str) -> None:
    with pytest.raises(ServerError, match=reason):
        Server(lambda: make(policy), ServerConfig(policy=policy, replicas=1, **options))  # type: ignore[arg-type]
