"""Workers that send one part of their model at a time, and keep their own steps in the other parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import paceline
from paceline.observe.trace import Applied, Event, Left, Pulled
from paceline.train import backend, local_steps
from paceline.train.overlapped_rounds import OverlappedRoundsBackend
from train.generations import served
from train.jobs import job
from train.lessons import OPTIMIZERS, batches_of, data, loss_on, model, steps_of, weights
from train.test_incarnations import give_up

F = torch.nn.functional
H = 3
P = 4


def worker_of(batches: list[list[tuple[Any, Any]]], **options: Any) -> Callable[[str], Any]:
    """Return a worker that trains on the batches of its number. It returns its own end point and the last model."""
    mine = model()  # not created in the thread, because all threads share torch's random numbers

    def run(address: str) -> Any:
        optimizer = OPTIMIZERS["momentum"](mine.parameters())
        with paceline.join(mine, optimizer, connect=address, local_steps=H, **options) as session:
            for x, y in batches[session.worker]:
                loss = F.cross_entropy(mine(x), y)
                loss.backward()
                session.step(loss, batch_size=len(x))
            end_point = weights(mine)
        return end_point, weights(mine)

    return run


def part_of(size: int, turn: int) -> slice:
    length = -(-size // P)
    return slice(turn % P * length, min(size, (turn % P + 1) * length))


class Replay:
    """The training that the events of a job describe, made in plain torch. The job has one shard."""

    def __init__(self, batches: list[list[tuple[Any, Any]]]) -> None:
        self.batches = batches
        self.server = [weights(model())]  # the model's versions
        self.workers = [model() for _ in batches]
        self.optimizers = [OPTIMIZERS["momentum"](worker.parameters()) for worker in self.workers]
        self.begins = [weights(worker) for worker in self.workers]  # where each element began to move unsent
        self.rounds, self.pushes = [0] * len(batches), [0] * len(batches)
        self.members = len(batches)
        self.counted = [self.members] * self.members  # the members of the round of each worker's last update

    def run(self, events: list[Event]) -> Any:
        """Return the last model."""
        for event in events:
            if isinstance(event, Pulled) and self.rounds[event.worker] * H < len(self.batches[event.worker]):
                self.make_round(event.worker, self.server[event.version])
            elif isinstance(event, Applied):
                newest = self.server[-1].clone()
                for worker in event.workers:
                    self.push(worker, newest)
                self.server.append(newest)
            elif isinstance(event, Left):
                self.members -= 1
        return self.server[-1]

    def push(self, number: int, server: Any) -> None:
        """Add a part of how far a worker has moved, and all of it in its last push."""
        end, begin = weights(self.workers[number]), self.begins[number]
        is_last = self.pushes[number] * H == len(self.batches[number])
        part = slice(None) if is_last else part_of(len(end), self.pushes[number])
        server[part] += (end[part] - begin[part]) / max(self.members, self.counted[number])
        self.counted[number] = self.members
        begin[part] = end[part]
        self.pushes[number] += 1

    def make_round(self, number: int, server: Any) -> None:
        worker = self.workers[number]
        begin = weights(worker)
        part = part_of(len(begin), self.rounds[number] - 1) if self.rounds[number] else slice(None)
        begin[part] = self.begins[number][part] = server[part]
        torch.nn.utils.vector_to_parameters(begin.clone(), worker.parameters())
        first = self.rounds[number] * H
        steps_of(worker, self.optimizers[number], self.batches[number][first : first + H])
        self.rounds[number] += 1


@pytest.mark.parametrize(
    ("policy", "streamed"), [("r2sp", False), ("asp", False), ("r2sp:groups=2", False), ("bsp", False), ("bsp", True)]
)
def test_only_one_part_is_exchanged_in_each_round(policy: str, streamed: bool) -> None:
    batches = [batches_of(worker, 6 * H) for worker in range(3)]
    name = f"{policy}{',' if ':' in policy else ':'}weights=mean"
    with job(name, workers=3, update_codec=f"float32/{P}", streamed=streamed) as running:
        found = running.work(*(worker_of(batches) for _ in batches))
        running.finish()
    expected = Replay(batches).run(running.events)
    for _, last in found:
        torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_single_worker_trains_as_in_plain_torch(shards: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that it pulls is what it has pushed, and all others are its own."""
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 8)
    monkeypatch.setattr(OverlappedRoundsBackend, "_after_step", lambda _: None)
    batches = batches_of(0, 8 * H)
    with job("bsp:weights=mean", shards, update_codec=f"float32/{P}") as running:
        ((end_point, _),) = running.work(worker_of([batches], overlap=overlap))
    same = model()
    steps_of(same, OPTIMIZERS["momentum"](same.parameters()), batches)
    torch.testing.assert_close(end_point, weights(same), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", ["float32/4", "int8/4", "int4/3"])
@pytest.mark.parametrize("overlap", [False, True])
def test_training_goes_well_by_turns(codec: str, overlap: bool) -> None:
    x, y = data(92)
    dataset = torch.utils.data.TensorDataset(x, y)

    def run(address: str) -> Any:
        mine = model()
        inner = torch.optim.AdamW(mine.parameters(), lr=0.01)
        with paceline.join(mine, inner, connect=address, local_steps=2, overlap=overlap) as session:
            for inputs, targets in session.batches(dataset, batch_size=4, epochs=8):
                loss = F.cross_entropy(mine(inputs), targets)
                loss.backward()
                session.step(loss)
        return loss_on(mine, x, y)

    with job("r2sp", shards=2, workers=4, update_codec=codec) as running:
        losses = running.work(*[run] * 4)
        running.finish()
        assert running.coordinator.samples is not None
        assert running.coordinator.samples.all_done
    assert max(losses) == min(losses) < 0.9 * loss_on(model(), x, y), "all workers end with the server's model"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_that_was_given_up_keeps_what_it_has_not_sent(overlap: bool) -> None:
    """It loses its steps since the last exchange, and they are made again. It has not lost those before.

    A single worker's unsent steps and the server's model are its own last end point.
    """
    x, y = data(48)
    mine = model()
    begins: list[Any] = []
    with job("asp:weights=mean", update_codec=f"float32/{P}") as running:
        optimizer = OPTIMIZERS["sgd"](mine.parameters())
        with paceline.join(mine, optimizer, connect=running.address, local_steps=H, overlap=overlap) as session:
            batches = session.batches(torch.utils.data.TensorDataset(x, y), batch_size=4, epochs=2)
            for number, (inputs, targets) in enumerate(batches):
                if number in (2 * H, 2 * H + 1):
                    begins.append(weights(mine))
                F.cross_entropy(mine(inputs), targets).backward()
                if number == 2 * H:
                    give_up(running)
                session.step()
        running.finish()
        samples: Any = running.coordinator.samples
        assert samples.all_done
        assert samples.trained == 2 * 48
    if not overlap:  # otherwise the steps of the next round have begun
        torch.testing.assert_close(begins[1], begins[0], rtol=1e-5, atol=1e-6)


def test_a_grant_without_a_pull_finds_the_pulled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a Grant leaves the weights as they are. They must be the pulled ones, and not those of the last start."""
    before: list[Any] = []
    pulled: list[Any] = []
    exchange = backend.exchange

    def noted(client: Any, flat: Any, *arguments: Any, **options: Any) -> None:
        before.append(flat.weights.clone())
        exchange(client, flat, *arguments, **options)
        pulled.append(flat.weights.clone())

    monkeypatch.setattr(backend, "exchange", noted)
    monkeypatch.setattr(local_steps, "exchange", noted)
    with job("bsp:weights=mean", update_codec=f"float32/{P}") as running:
        running.work(worker_of([batches_of(0, 4 * H)]))
    assert len(pulled) == 5, "four rounds, and the rest"
    for found, its in zip(before[1:], pulled, strict=False):
        assert torch.equal(found, its)


@pytest.mark.parametrize(
    ("outer", "fits"), [("sgd:lr=1.3", True), ("sgd:lr=0.7,momentum=0.9", False), ("adam:lr=0.1", False)]
)
def test_parts_need_an_outer_optimizer_without_momentum(outer: str, fits: bool) -> None:
    """Its steps would change the parts that were not sent."""
    mine = model()
    with job("bsp:weights=mean", update_codec="int4/4") as running:
        begun = pytest.raises(ValueError, match="must be SGD without momentum") if not fits else nullcontext()
        with begun:
            optimizer = OPTIMIZERS["sgd"](mine.parameters())
            paceline.join(mine, optimizer, connect=running.address, local_steps=H, outer=outer).close()


def test_parts_need_local_steps() -> None:
    """Otherwise a worker would lose its steps in all other parts, or the server's steps would be stale."""
    mine = model()
    with (
        job("bsp:weights=mean", update_codec="int4/4") as running,
        pytest.raises(ValueError, match=r"--updates int4/4 sends one part .*, for workers with local_steps="),
    ):
        paceline.join(mine, OPTIMIZERS["sgd"](mine.parameters()), connect=running.address)


def test_weights_that_are_loaded_in_the_middle_are_those_of_the_next_round() -> None:
    """What was not sent belongs to the old weights."""
    loaded = model()
    torch.nn.init.constant_(loaded[0].weight, 0.5)
    batches, mine = batches_of(0, 3 * H), model()
    begins: list[Any] = []

    def run(address: str) -> None:
        optimizer = OPTIMIZERS["sgd"](mine.parameters())
        with paceline.join(mine, optimizer, connect=address, local_steps=H) as session:
            for number, (x, y) in enumerate(batches):
                if number == 2 * H:
                    session.load(loaded.state_dict())
                    begins.append(weights(mine))
                F.cross_entropy(mine(x), y).backward()
                session.step(batch_size=len(x))
            begins.append(weights(mine))

    with served("bsp:weights=mean", update_codec=f"float32/{P}") as running:
        running.work(run)
    assert torch.equal(begins[0], weights(loaded))
    steps_of(loaded, OPTIMIZERS["sgd"](loaded.parameters()), batches[2 * H :])
    torch.testing.assert_close(begins[1], weights(loaded), rtol=1e-5, atol=1e-6)


def test_a_start_ahead_needs_whole_models() -> None:
    mine = model()
    with (
        job("bsp:weights=mean", update_codec="int4/4") as running,
        pytest.raises(ValueError, match=r"ahead=True needs whole models, and --updates sends one part of the model"),
    ):
        paceline.join(mine, OPTIMIZERS["sgd"](mine.parameters()), connect=running.address, local_steps=H, ahead=True)
