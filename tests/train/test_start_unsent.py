"""Workers that send one part of their model at a time, and keep their own steps in the other parts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import paceline
from paceline.train.overlapped_rounds import OverlappedRoundsBackend
from train.jobs import job
from train.lessons import OPTIMIZERS, batches_of, model, steps_of, weights
from train.rounds import H, Replay, train_and_be_given_up, worker_of

P = 4


def part_of(size: int, turn: int) -> slice:
    length = -(-size // P)
    return slice(turn % P * length, min(size, (turn % P + 1) * length))


class ReplayOfParts(Replay):
    """Each push has one part, and the last one all that is not sent. The job has one shard."""

    def __init__(self, batches: list[list[tuple[Any, Any]]]) -> None:
        super().__init__(batches)
        self.pushes = [0] * len(batches)

    def begin(self, number: int, pulled: Any) -> Any:
        begin = weights(self.workers[number])
        part = part_of(len(begin), self.rounds[number] - 1) if self.rounds[number] else slice(None)
        begin[part] = self.begun[number][part] = pulled[part]
        return begin

    def push(self, number: int, server: Any, weight: float) -> None:
        end, begun = weights(self.workers[number]), self.begun[number]
        is_last = self.pushes[number] * H == len(self.batches[number])
        part = slice(None) if is_last else part_of(len(end), self.pushes[number])
        server[part] += weight * (end[part] - begun[part])
        begun[part] = end[part]
        self.pushes[number] += 1


@pytest.mark.parametrize(
    ("policy", "streamed"), [("r2sp", False), ("asp", False), ("r2sp:groups=2", False), ("bsp", False), ("bsp", True)]
)
def test_only_one_part_is_exchanged_in_each_round(policy: str, streamed: bool) -> None:
    batches = [batches_of(worker, 6 * H) for worker in range(3)]
    name = f"{policy}{',' if ':' in policy else ':'}weights=mean"
    with job(name, workers=3, update_codec=f"float32/{P}", streamed=streamed) as running:
        found = running.work(*(worker_of(batches) for _ in batches))
        running.finish()
    expected = ReplayOfParts(batches).run(running.events)
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_single_worker_trains_as_in_plain_torch(shards: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that it pulls is what it has pushed, and all others are its own."""
    monkeypatch.setattr("paceline.model.description.MIN_PIECE_ELEMENTS", 8)
    monkeypatch.setattr(OverlappedRoundsBackend, "_after_step", lambda _: None)
    batches = batches_of(0, 8 * H)
    with job("bsp:weights=mean", shards, update_codec=f"float32/{P}") as running:
        (found,) = running.work(worker_of([batches], overlap=overlap))
    same = model()
    steps_of(same, OPTIMIZERS["momentum"](same.parameters()), batches)
    torch.testing.assert_close(found, weights(same), rtol=1e-4, atol=1e-5)


def test_a_worker_that_was_given_up_keeps_what_it_has_not_sent() -> None:
    """It loses its steps since the last exchange, and they are made again. It has not lost those before.

    A single worker's unsent steps and the server's model are its own last end point.
    """
    _, begins = train_and_be_given_up(2 * H, f"float32/{P}")
    torch.testing.assert_close(begins[2 * H + 1], begins[2 * H], rtol=1e-5, atol=1e-6)


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


def test_a_start_ahead_needs_whole_models() -> None:
    mine = model()
    with (
        job("bsp:weights=mean", update_codec="int4/4") as running,
        pytest.raises(ValueError, match=r"ahead=True needs whole models, and --updates sends one part of the model"),
    ):
        paceline.join(mine, OPTIMIZERS["sgd"](mine.parameters()), connect=running.address, local_steps=H, ahead=True)
