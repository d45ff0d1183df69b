"""The model comes back in few bits too: as an encoded difference to what the worker has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import paceline
from paceline.model.codecs import Encoder, decode, encoded_size
from paceline.model.differences import FollowedModel, way_back
from paceline.serve.environment import address
from paceline.serve.wire.messages import UpdatedPiece, Weights
from paceline.serve.worker.client import Client
from paceline.serve.worker.shard_link import ShardLink
from serve.workers import described
from train.jobs import job
from train.lessons import data, loss_on, model

SIZE = 5000
UPDATES = 6
CODECS = ["int8", "int4", "topk:0.02", "int4/3"]
every_codec = pytest.mark.parametrize("name", CODECS)
every_way = pytest.mark.parametrize(("shards", "streamed"), [(1, False), (2, False), (2, True)])


def gradient_of(update: int) -> Any:
    return np.random.default_rng(update).standard_normal(SIZE, dtype=np.float32)


@dataclass
class Worker:
    """A worker that keeps every model that it was sent."""

    where: str
    cut_before: int = -1  # the update before whose push its connections are lost
    models: list[Any] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)

    def run(self) -> Worker:
        weights = np.zeros(SIZE, np.float32)
        self.client = Client(address(self.where), described(SIZE))
        self.client.keeps_unsent = True
        try:
            self.client.begin(weights.data.cast("B"))
            links = self.client._incarnation._transfers.parts
            self.pieces = [piece for shard in links for piece in shard.pieces]
            self.models.append(weights.copy())
            for update in range(UPDATES):
                if update == self.cut_before:
                    for shard in links:
                        assert shard.channel
                        shard.channel.cut()
                gradient = gradient_of(update).data.cast("B")
                self.client.exchange(gradient, weights.data.cast("B"), batch_size=1, rates=(1.0,), loss=0.0)
                self.models.append(weights.copy())
            self.client.finish(weights.data.cast("B"))
            self.models.append(weights.copy())
            return self
        finally:
            self.client.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 100)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the type and the size of every piece of the model that workers receive from now on."""
    found: list[tuple[str, int]] = []
    receive = ShardLink.receive

    def noted(self: ShardLink, channel: Any, place: Any) -> Any:
        sizes: list[int] = []

        def sized(message: Any, size: int) -> Any:
            sizes.append(size)
            return place(message, size)

        message = receive(self, channel, sized)
        if isinstance(message, Weights | UpdatedPiece):
            found.append((message.dtype, sum(sizes)))
        return message

    monkeypatch.setattr(ShardLink, "receive", noted)
    return found


def expected_models(name: str, pieces: list[tuple[int, int]], cut_before: int = -1) -> list[Any]:
    """Return the models that one worker receives from a server that steps by 1 times each gradient."""
    encoder, on_server = Encoder(name, SIZE), np.zeros(SIZE, np.float32)
    followed: list[FollowedModel] = []
    models = []
    for update in range(-1, UPDATES):
        for start, stop in pieces if update >= 0 else ():
            decoded = np.empty(stop - start, np.float32)
            body = encoder.encode(gradient_of(update).data, "float32", start, stop, update)
            decode(body, name, decoded)
            on_server[start:stop] -= decoded
            if update != cut_before:
                followed[pieces.index((start, stop))].answer_to(body, name)
        if update in (-1, cut_before):
            followed = [FollowedModel(way_back(name), stop - start) for start, stop in pieces]
        for its, (start, stop) in zip(followed, pieces, strict=True):
            if its.next_type == "float32":
                its.set(on_server[start:stop])
            else:
                its.encode(its.subtract_from(on_server[start:stop]))
        received = np.empty_like(on_server)
        for its, (start, stop) in zip(followed, pieces, strict=True):
            received[start:stop] = its.values
        models.append(received)
    return [*models, on_server]


@every_codec
@every_way
@pytest.mark.usefixtures("small_pieces")
def test_the_worker_has_what_the_shard_knows(
    name: str, shards: int, streamed: bool, received: list[tuple[str, int]]
) -> None:
    """The first model and the last one are exact. All others are differences of the size that the codec promises."""
    with job("r2sp", shards, update_codec=name, streamed=streamed) as running:
        (worker,) = running.work(lambda where: Worker(where).run())
    expected = expected_models(name, worker.pieces)
    for number, (mine, its) in enumerate(zip(worker.models, expected, strict=True)):
        assert np.array_equal(mine, its), number
    if name != "topk:0.02":  # a step by a decoded update is encoded without a loss
        assert not np.array_equal(expected[-1], expected[-2])
    exact = sorted([("float32", 4 * (stop - start)) for start, stop in worker.pieces] * 2)
    back = "int4" if name.startswith("topk") else name
    coded = sorted([(back, encoded_size(back, stop - start)) for start, stop in worker.pieces] * UPDATES)
    assert sorted(each for each in received if each[0] == "float32") == exact
    assert sorted(each for each in received if each[0] != "float32") == coded


@every_codec
@every_way
@pytest.mark.usefixtures("small_pieces")
def test_a_new_connection_begins_with_the_whole_model(name: str, shards: int, streamed: bool) -> None:
    with job("r2sp", shards, update_codec=name, streamed=streamed) as running:
        (worker,) = running.work(lambda where: Worker(where, cut_before=3).run())
    expected = expected_models(name, worker.pieces, cut_before=3)
    for number, (mine, its) in enumerate(zip(worker.models, expected, strict=True)):
        assert np.array_equal(mine, its), number


@every_way
@pytest.mark.usefixtures("small_pieces")
def test_workers_of_a_round_have_the_same_model(shards: int, streamed: bool) -> None:
    """Under BSP all of them receive the same differences, so they compute on the same weights."""
    with job("bsp", shards, workers=3, update_codec="int4", streamed=streamed) as running:
        workers = running.work(*[lambda where: Worker(where).run()] * 3)
    for models in zip(*(worker.models for worker in workers), strict=True):
        assert np.array_equal(models[0], models[1])
        assert np.array_equal(models[0], models[2])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("policy", "correct"), [("r2sp", "none"), ("r2sp", "full"), ("asp", "none"), ("bsp:pipeline=true", "none")]
)
@pytest.mark.usefixtures("small_pieces")
def test_workers_train_and_end_with_the_same_model(policy: str, streamed: bool, correct: str) -> None:
    """Pulls are answered while other workers' updates are applied, from weights or from predicted ones."""
    x, y = data(96)
    begun = loss_on(model(), x, y)

    def run(where: str) -> Any:
        mine = model()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.5)
        with paceline.join(mine, optimizer, connect=where) as session:
            for start in [*range(0, 96, 8)] * 4:
                loss = torch.nn.functional.cross_entropy(mine(x[start : start + 8]), y[start : start + 8])
                loss.backward()
                session.step(loss, batch_size=8)
        return torch.cat([value.flatten() for value in mine.parameters()]), loss_on(mine, x, y)

    with job(policy, 2, workers=3, update_codec="int8", streamed=streamed, correct=correct) as running:
        results = running.work(run, run, run)
    assert all(torch.equal(results[0][0], weights) for weights, _ in results)
    assert results[0][1] < 0.9 * begun


def test_federated_models_are_not_encoded(received: list[tuple[str, int]]) -> None:
    """Where no codec was asked for, every piece is exact."""
    with job("r2sp") as running:
        running.work(lambda where: Worker(where).run())
    assert {kind for kind, _ in received} == {"float32"}
