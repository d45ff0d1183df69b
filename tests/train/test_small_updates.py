"""Updates that are sent in few bits: the server applies what was decoded, and nothing is lost in the end."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

import paceline
from paceline.model.codecs import Encoder, decode, encoded_size
from paceline.model.correction import Correction, CorrectionOption
from paceline.policies import make
from paceline.serve.coordinator.checkpoint_writer import CheckpointPlan
from paceline.serve.coordinator.config import ServerConfig
from paceline.serve.environment import address
from paceline.serve.server import Server, ServerError
from paceline.serve.worker import gradient as gradients
from paceline.serve.worker.client import Client
from paceline.serve.worker.endings import IncarnationOver
from paceline.serve.worker.incarnation import Incarnation
from serve.workers import described, work
from train.generations import served
from train.jobs import job
from train.lessons import OPTIMIZERS, batches_of, data, loss_on, model, weights
from train.rounds import H, worker_of

SIZE = 5000
UPDATES = 6
CODECS = ["int8", "int4", "topk:0.02"]
every_codec = pytest.mark.parametrize("codec", CODECS)


def gradient_of(update: int) -> Any:
    return np.random.default_rng(update).standard_normal(SIZE, dtype=np.float32)


def one_worker(where: str) -> tuple[Any, list[tuple[int, int]]]:
    """Push UPDATES gradients. Return the last weights, and the pieces in which they were pushed."""
    weights = np.zeros(SIZE, np.float32)
    client = Client(address(where), described(SIZE))
    try:
        client.begin(weights.data.cast("B"))
        for update in range(UPDATES):
            client.exchange(
                gradient_of(update).data.cast("B"), weights.data.cast("B"), batch_size=1, rates=(1.0,), loss=0.0
            )
        client.finish(weights.data.cast("B"))
        return weights, [piece for shard in client._incarnation._transfers.parts for piece in shard.pieces]
    finally:
        client.close()


@every_codec
@pytest.mark.parametrize(("shards", "streamed"), [(1, False), (2, False), (2, True)])
def test_the_server_applies_what_was_decoded(
    codec: str, shards: int, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 100)
    with job("r2sp", shards, update_codec=codec, streamed=streamed) as running:
        ((found, pieces),) = running.work(one_worker)
    assert len(pieces) == shards or (streamed and len(pieces) > 2 * shards)
    encoder, expected = Encoder(codec, SIZE), np.zeros(SIZE, np.float32)
    for update in range(UPDATES):
        its = gradient_of(update)
        for start, stop in pieces:
            decoded = np.empty(stop - start, np.float32)
            decode(encoder.encode(its.data, "float32", start, stop), codec, decoded)
            expected[start:stop] -= decoded
    assert np.array_equal(found, expected)
    assert not np.allclose(found, -sum(gradient_of(update) for update in range(UPDATES)), atol=1e-3)


@pytest.mark.parametrize("policy", ["bsp", "asp", "r2sp", "bsp:pipeline=true"])
def test_every_sample_counts_once(policy: str) -> None:
    """Gradients whose numbers are all equal are encoded exactly by topk:1, so the sum shows every sample."""
    with job(policy, shards=2, workers=3, update_codec="topk:1") as running:
        running.work(*[lambda where: work(where, 60)] * 3)
        running.finish()
        assert running.work(lambda where: work(where, 60, updates=0)) == [60.0]


@every_codec
@pytest.mark.parametrize("options", [{}, {"local_steps": 3}], ids=["each step", "local steps"])
def test_training_reaches_the_loss_of_plain_training(codec: str, options: dict[str, Any]) -> None:
    """topk sends 1 number of 50 here. What it leaves out comes later, so it learns more slowly, but it learns."""
    x, y = data(96)
    mine = model()
    before = loss_on(mine, x, y)

    def run(where: str) -> None:
        optimizer = OPTIMIZERS["sgd"](mine.parameters())
        with paceline.join(mine, optimizer, connect=where, **options) as session:
            for start in [*range(0, 96, 8)] * 6:
                loss = torch.nn.functional.cross_entropy(mine(x[start : start + 8]), y[start : start + 8])
                loss.backward()
                session.step(loss, batch_size=8)

    with job("bsp", update_codec=codec) as running:
        running.work(run)
    plain = model()
    optimizer = OPTIMIZERS["sgd"](plain.parameters())
    for start in [*range(0, 96, 8)] * 6:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(x[start : start + 8]), y[start : start + 8]).backward()
        optimizer.step()
    share = (before - loss_on(mine, x, y)) / (before - loss_on(plain, x, y))
    assert share > (0.9 if codec.startswith("int") else 0.3)


@pytest.mark.parametrize(
    ("policy", "shards", "streamed"),
    [("bsp", 1, False), ("bsp", 2, False), ("bsp", 2, True), ("r2sp:groups=1", 1, False), ("r2sp:groups=1", 2, False)],
)
def test_a_round_of_topk_has_the_mean_over_the_workers_that_send_an_element(
    policy: str, shards: int, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 8)
    first, rounds = weights(model()), 3
    totals, senders = ([torch.zeros_like(first) for _ in range(rounds)] for _ in range(2))
    sent, lock, encode = Counter[tuple[int, int]](), threading.Lock(), Encoder.encode

    def noted(self: Encoder, update: memoryview, dtype: str, start: int, stop: int, turn: int = 0) -> memoryview:
        body = encode(self, update, dtype, start, stop, turn)
        decoded = np.empty(stop - start, np.float32)
        decode(body, self.codec.name, decoded)
        with lock:
            number = sent[id(self), start]
            sent[id(self), start] += 1
            totals[number][start:stop] -= torch.from_numpy(decoded)
            senders[number][start:stop] += torch.from_numpy(decoded) != 0
        return body

    monkeypatch.setattr(Encoder, "encode", noted)
    batches = [batches_of(worker, rounds * H) for worker in range(3)]
    name = f"{policy}{',' if ':' in policy else ':'}weights=mean"
    with job(name, shards, workers=3, update_codec="topk:0.25", streamed=streamed) as running:
        found = running.work(*(worker_of(batches) for _ in batches))
    expected, last = first, torch.full_like(first, 3)
    for total, count in zip(totals, senders, strict=True):
        assert {0, 1, 2, 3} <= set(count.tolist())
        expected = expected + total / torch.maximum(count, last).clamp(min=1)
        last = count
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("before", "after"), [(H, 1), (1, H)])
def test_a_job_of_topk_goes_on_with_local_steps_as_it_began(before: int, after: int, tmp_path: Path) -> None:
    plan, batches = CheckpointPlan(tmp_path, updates=2), [batches_of(worker, 6) for worker in range(3)]

    def run(local_steps: int, shards: int, codec: str = "topk:0.1", resume: Path | None = tmp_path) -> list[Any]:
        more: dict[str, Any] = {"saving": plan, "resume": resume, "update_codec": codec}
        with served("r2sp:weights=mean", shards, workers=3, **more) as running:
            return running.work(*(worker_of(batches, local_steps=local_steps) for _ in batches))

    first = run(before, 1, resume=None)
    again = run(before, 2)
    assert not torch.equal(first[0], again[0])
    assert all(torch.equal(again[0], each) for each in again)
    with pytest.raises(Exception, match="all workers make local steps or none does: this job began with"):
        run(after, 1)
    run(after, 1, "int4")


def test_workers_of_topk_make_local_steps_or_none_does() -> None:
    batches = [batches_of(worker, 6) for worker in range(2)]
    with (
        pytest.raises(Exception, match="change local_steps, or use --updates int4"),
        job("bsp:weights=mean", workers=2, update_codec="topk:0.1") as running,
    ):
        running.work(*(worker_of(batches, local_steps=steps) for steps in (1, H)))


@pytest.mark.parametrize(("asked", "correct"), [("auto", "round"), ("predict", "predict")])
def test_the_newest_step_of_topk_predicts_no_other(asked: CorrectionOption, correct: Correction) -> None:
    """They have other elements. So `full` is not used, and refused if it is asked for."""
    batches = [batches_of(worker, 6) for worker in range(2)]
    options: dict[str, Any] = {"update_codec": "topk:0.1", "workers": 2}
    workers = [worker_of(batches, outer="sgd:lr=0.1,momentum=0.9") for _ in batches]
    with job("r2sp:weights=mean", correct=asked, **options) as running:
        running.work(*workers)
        assert running.coordinator.agreement.settings["correct"] == correct
    with (
        pytest.raises(Exception, match=r"full .* topk .*: leave it at auto"),
        job("r2sp:weights=mean", correct="full", **options) as running,
    ):
        running.work(*workers)


def test_gradients_of_topk_are_summed_as_they_are() -> None:
    """Without local steps a worker makes nothing again that it has not sent: all of it is sent later."""
    with job("bsp:weights=mean", update_codec="topk:0.02") as running:
        running.work(one_worker)
        assert not running.coordinator.agreement.sparse


@pytest.mark.parametrize("shards", [1, 2])
def test_running_statistics_are_sent_as_they_are(shards: int) -> None:
    """The server averages their values. topk would send most of them as 0."""
    torch.manual_seed(0)
    mine = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 3))
    x, y = data(32)

    def run(where: str) -> None:
        with paceline.join(mine, torch.optim.SGD(mine.parameters(), lr=0.01), connect=where) as session:
            for _ in range(3):
                loss = torch.nn.functional.cross_entropy(mine(x), y)
                loss.backward()
                seen = [buffer.clone().float() for buffer in mine.buffers()]
                session.step(loss, batch_size=32)
                assert all(torch.equal(a, b.float()) for a, b in zip(seen, mine.buffers(), strict=True))

    with job("bsp", shards, update_codec="topk:0.02") as running:
        running.work(run)


def test_a_gradient_is_encoded_once_however_often_it_is_sent() -> None:
    encoder = Encoder("int4", SIZE)
    outgoing = gradients.OutgoingGradient(gradient_of(0).data.cast("B"), (1.0,), "float32", 1, encoder=encoder)
    first = bytes(outgoing.body(0, 1000))
    left = encoder.left.copy()
    assert bytes(outgoing.body(0, 1000)) == first
    assert np.array_equal(encoder.left, left)
    assert outgoing.push(3).dtype == "int4"
    assert outgoing.size(0, 1000) == len(first) == encoded_size("int4", 1000)


def test_a_gradient_that_is_taken_back_is_encoded_no_more() -> None:
    """A thread of another shard may be encoding at that moment."""
    encoder = Encoder("topk:0.02", SIZE)
    outgoing = gradients.OutgoingGradient(gradient_of(0).data.cast("B"), (1.0,), "float32", 1, encoder=encoder)
    outgoing.body(0, 1000)
    outgoing.take_back()
    with pytest.raises(ConnectionError, match="taken back"):
        outgoing.body(1000, 2000)
    assert np.allclose(encoder.left, 0, atol=1e-6)


def test_a_worker_that_is_given_up_in_a_push_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples are trained on again, and what earlier updates left out is still to be sent."""
    left: list[Any] = []
    push = Incarnation.push

    def given_up_once(self: Incarnation, gradient: Any, weights: memoryview) -> None:
        if gradient.encoder and len(left) == 2:
            left.append(gradient.encoder.left.copy())
            gradient.body(0, SIZE)
            raise IncarnationOver("The lease has ended.")
        push(self, gradient, weights)
        left.append(gradient.encoder.left.copy())

    monkeypatch.setattr(Incarnation, "push", given_up_once)
    with job("asp", update_codec="topk:0.02") as running:
        running.work(one_worker)
    assert np.array_equal(left[1], left[2])
    encoder = Encoder("topk:0.02", SIZE)
    for update in (0, 1, 3):  # update 2 was taken back
        encoder.encode(gradient_of(update).data, "float32", 0, SIZE)
    assert np.allclose(left[3], encoder.left, atol=1e-3)


@pytest.mark.parametrize("codec", ["int4", "int4/4"])
def test_a_restored_server_finds_workers_with_nothing_left(codec: str) -> None:
    """What is left belongs to steps that the checkpoint has undone."""
    encoders: list[Encoder | None] = []
    exchanges: list[int] = []

    def run(where: str) -> None:
        weights = np.zeros(SIZE, np.float32)
        client = Client(address(where), described(SIZE))
        client.keeps_unsent = True
        client.begin(weights.data.cast("B"))
        client.exchange(gradient_of(0).data.cast("B"), weights.data.cast("B"), batch_size=1, rates=(1.0,))
        encoders.append(client._encoder)
        client._incarnation.generation = "another"  # as if the server had been restored
        exchanges.append(client._exchanges)
        client._join_again()
        encoders.append(client._encoder)
        exchanges.append(client._exchanges)
        client.close()

    with job("asp", update_codec=codec) as running:
        running.work(run)
    assert encoders[0] is not None
    assert encoders[1] is None
    assert exchanges == [1, 0], "all workers of a restored job send its first part first"


def test_a_number_that_is_not_finite_is_refused_as_without_a_codec() -> None:
    def run(where: str) -> None:
        weights, spoiled = np.zeros(SIZE, np.float32), gradient_of(0)
        spoiled[7] = np.nan
        client = Client(address(where), described(SIZE))
        try:
            client.begin(weights.data.cast("B"))
            client.exchange(spoiled.data.cast("B"), weights.data.cast("B"), batch_size=1, rates=(1.0,))
        finally:
            client.close()

    for codec in ("", *CODECS):
        with job("bsp", update_codec=codec) as running, pytest.raises(ConnectionError, match=r"not finite|NaN"):
            running.work(run)


def test_a_damaged_push_is_refused_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(self: Encoder, update: memoryview, dtype: str, start: int, stop: int, turn: int) -> memoryview:
        return memoryview(b"\xff" * self.codec.size(stop - start))

    monkeypatch.setattr(Encoder, "encode", damaged)
    with (
        job("bsp", update_codec="topk:0.02") as running,
        pytest.raises(ConnectionError, match=r"damaged: a position .* lies outside"),
    ):
        running.work(one_worker)


@pytest.mark.parametrize(
    ("policy", "options", "why"),
    [
        (
            "bsp",
            {"update_codec": "int3"},
            "--updates: updates are encoded as int8, int4, topk:F such as topk:0.02, or a part",
        ),
        ("fl-r2sp:as_printed=true", {}, "workers push whole models"),
        ("bsp", {"shards": 0}, "--servers 1 or more"),
    ],
)
def test_what_cannot_be_encoded_is_refused(policy: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ServerError, match=why):
        Server(lambda: make(policy), ServerConfig(**{"update_codec": "int8", "policy": policy, **options}))


def test_pushing_while_computing_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is encoded when it is computed. Some of the pieces hold statistics."""
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 8)
    x, y = data(32)
    results = []
    for overlap in (False, True):
        torch.manual_seed(0)
        mine = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12), torch.nn.Linear(12, 3))

        def run(where: str, mine: Any = mine, overlap: bool = overlap) -> Any:
            optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
            with paceline.join(mine, optimizer, connect=where, overlap=overlap) as session:
                session.optimizer.batch_size = 32
                for _ in range(8):
                    loss = torch.nn.functional.cross_entropy(mine(x), y)
                    loss.backward()
                    session.step(loss)
            return torch.cat([value.flatten().float() for value in mine.state_dict().values()])

        with job("r2sp", 2, update_codec="int4", streamed=True) as running:
            results += running.work(run)
    assert torch.equal(*results)
    assert results[0].isfinite().all()
