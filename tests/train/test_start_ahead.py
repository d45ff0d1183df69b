"""Workers that begin their rounds of local steps ahead of the pulled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import paceline
from paceline.observe.trace import Applied, Event, Left, Pulled
from paceline.train import backend, overlapped_rounds
from paceline.train.overlapped_rounds import OverlappedRoundsBackend
from train.generations import served
from train.jobs import job
from train.lessons import OPTIMIZERS, batches_of, data, loss_on, model, steps_of, weights
from train.test_incarnations import give_up

F = torch.nn.functional
H = 3


def worker_of(batches: list[list[tuple[Any, Any]]], **options: Any) -> Callable[[str], Any]:
    """Return a worker that trains on the batches of its number, and returns its weights."""
    mine = model()  # not created in the thread, because all threads share torch's random numbers

    def run(address: str) -> Any:
        optimizer = OPTIMIZERS["momentum"](mine.parameters())
        with paceline.join(mine, optimizer, connect=address, local_steps=H, **options) as session:
            for x, y in batches[session.worker]:
                loss = F.cross_entropy(mine(x), y)
                loss.backward()
                session.step(loss, batch_size=len(x))
        return weights(mine)

    return run


class Replay:
    """The training that the events of a job describe, made in plain torch."""

    def __init__(self, batches: list[list[tuple[Any, Any]]]) -> None:
        self.batches = batches
        self.server = [weights(model())]  # the model's versions
        self.workers = [model() for _ in batches]
        self.optimizers = [OPTIMIZERS["momentum"](worker.parameters()) for worker in self.workers]
        self.pulled: list[Any] = [None] * len(batches)
        self.rounds = [0] * len(batches)
        self.differences: list[Any] = [None] * len(batches)
        self.members = len(batches)
        self.counted = [self.members] * self.members  # the members of the round of each worker's last update

    def run(self, events: list[Event]) -> Any:
        """Return the last model."""
        for event in events:
            if isinstance(event, Pulled) and self.rounds[event.worker] * H < len(self.batches[event.worker]):
                self.make_round(event.worker, self.server[event.version])
            elif isinstance(event, Applied):
                differences = [self.differences[worker] for worker in event.workers]
                members = max(self.members, *(self.counted[worker] for worker in event.workers))
                self.server.append(self.server[-1] + sum(differences) / members)
                for worker in event.workers:
                    self.counted[worker] = self.members
            elif isinstance(event, Left):
                self.members -= 1
        return self.server[-1]

    def make_round(self, number: int, pulled: Any) -> None:
        worker, before = self.workers[number], self.pulled[number]
        begin = pulled
        if before is not None:
            ahead = pulled + 0.5 * (pulled - before)
            begin = (ahead + weights(worker)) / 2
        torch.nn.utils.vector_to_parameters(begin.clone(), worker.parameters())
        first = self.rounds[number] * H
        steps_of(worker, self.optimizers[number], self.batches[number][first : first + H])
        self.differences[number] = weights(worker) - begin
        self.pulled[number] = pulled
        self.rounds[number] += 1


@pytest.mark.parametrize(("policy", "shards"), [("r2sp", 1), ("r2sp", 2), ("r2sp:groups=2", 1), ("asp", 1), ("bsp", 1)])
def test_a_round_begins_between_the_own_end_point_and_the_model_moved_on(policy: str, shards: int) -> None:
    batches = [batches_of(worker, 4 * H) for worker in range(3)]
    with job(f"{policy}:weights=mean".replace("groups=2:", "groups=2,"), shards, workers=3) as running:
        found = running.work(*(worker_of(batches, ahead=True) for _ in batches))
        running.finish()
    expected = Replay(batches).run(running.events)
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)


def test_the_start_is_not_the_pulled_model() -> None:
    """The test above would not notice if `ahead` did nothing in the job and in its replay."""
    batches = [batches_of(worker, 4 * H) for worker in range(2)]
    found = []
    for ahead in (True, False):
        with job("bsp:weights=mean", workers=2) as running:
            found.append(running.work(*(worker_of(batches, ahead=ahead) for _ in batches))[0])
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_with_overlap_the_steps_made_meanwhile_are_added_to_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reply is used at the end of the next round. With one worker the pulled model is its own end point."""
    monkeypatch.setattr(OverlappedRoundsBackend, "_after_step", lambda _: None)
    batches = batches_of(0, 4 * H)
    with job("bsp:weights=mean") as running:
        (found,) = running.work(worker_of([batches], ahead=True, overlap=True))
    same = model()
    optimizer = OPTIMIZERS["momentum"](same.parameters())
    server = pulled = begin = weights(same)
    for start in range(0, 4 * H, H):
        end_before = weights(same)
        steps_of(same, optimizer, batches[start : start + H])
        if start:  # the round before has arrived meanwhile
            ahead = server + 0.5 * (server - pulled)
            begin, pulled = (ahead + end_before) / 2, server
            torch.nn.utils.vector_to_parameters(begin + weights(same) - end_before, same.parameters())
        server = server + weights(same) - begin
    torch.testing.assert_close(found, server, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", ["", "int8", "topk:0.25"])
@pytest.mark.parametrize("overlap", [False, True])
def test_training_goes_well_by_turns(codec: str, overlap: bool) -> None:
    x, y = data(92)
    dataset = torch.utils.data.TensorDataset(x, y)

    def run(address: str) -> Any:
        mine = model()
        inner = torch.optim.AdamW(mine.parameters(), lr=0.01)
        with paceline.join(mine, inner, connect=address, local_steps=H, ahead=True, overlap=overlap) as session:
            for inputs, targets in session.batches(dataset, batch_size=4, epochs=6):
                loss = F.cross_entropy(mine(inputs), targets)
                loss.backward()
                session.step(loss)
        return loss_on(mine, x, y)

    with job("r2sp", shards=2, workers=4, update_codec=codec) as running:
        losses = running.work(*[run] * 4)
        running.finish()
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done
    assert max(losses) == min(losses) < loss_on(model(), x, y), "all workers end with the server's model"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_that_was_given_up_begins_at_the_pulled_model(overlap: bool) -> None:
    x, y = data(48)
    mine = model()
    with job("asp:weights=mean") as running:
        optimizer = OPTIMIZERS["sgd"](mine.parameters())
        with paceline.join(
            mine, optimizer, connect=running.address, local_steps=H, ahead=True, overlap=overlap
        ) as session:
            batches = session.batches(torch.utils.data.TensorDataset(x, y), batch_size=4, epochs=2)
            for number, (inputs, targets) in enumerate(batches):
                F.cross_entropy(mine(inputs), targets).backward()
                if number == 4:
                    give_up(running)
                session.step()
        running.finish()
        samples: Any = running.coordinator.samples
        assert samples.all_done
        assert samples.trained == 2 * 48


def test_weights_that_are_loaded_in_the_middle_are_those_of_the_next_round() -> None:
    """The movement from the old weights to the loaded ones is not carried on."""
    loaded = model()
    torch.nn.init.constant_(loaded[0].weight, 0.5)
    batches, mine = batches_of(0, 3 * H), model()
    begins: list[Any] = []

    def run(address: str) -> None:
        optimizer = OPTIMIZERS["sgd"](mine.parameters())
        with paceline.join(mine, optimizer, connect=address, local_steps=H, ahead=True) as session:
            for number, (x, y) in enumerate(batches):
                if number == 2 * H:
                    session.load(loaded.state_dict())
                    begins.append(weights(mine))
                F.cross_entropy(mine(x), y).backward()
                session.step(batch_size=len(x))

    with served("bsp:weights=mean") as running:
        running.work(run)
    assert torch.equal(begins[0], weights(loaded))
    steps_of(loaded, OPTIMIZERS["sgd"](loaded.parameters()), batches[2 * H :])
    torch.testing.assert_close(weights(mine), weights(loaded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grant_without_a_pull_finds_the_pulled_model(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a Grant leaves the weights as they are. They must be the pulled ones, and not those of the last start."""
    begun_from: list[Any] = []
    exchange = backend.exchange

    def without_a_pull(client: Any, flat: Any, *arguments: Any) -> None:
        begun_from.append(flat.weights.clone())
        exchange(client, flat, *arguments)
        pulled.append(flat.weights.clone())

    pulled: list[Any] = []
    monkeypatch.setattr(backend, "exchange", without_a_pull)
    monkeypatch.setattr(overlapped_rounds, "exchange", without_a_pull)
    with job("bsp:weights=mean") as running:
        running.work(worker_of([batches_of(0, 4 * H)], ahead=True, overlap=overlap))
    assert len(pulled) == 4
    for before, its in zip(begun_from[1:], pulled, strict=False):
        assert torch.equal(before, its)


def test_it_needs_local_steps() -> None:
    mine = model()
    with pytest.raises(ValueError, match=r"ahead=True is about rounds of local steps; pass local_steps= with it\."):
        paceline.join(mine, OPTIMIZERS["sgd"](mine.parameters()), ahead=True)
