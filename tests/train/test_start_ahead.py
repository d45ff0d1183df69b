"""Workers that begin their rounds of local steps ahead of the pulled model."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("msgspec")

import paceline
from paceline.train.overlapped_rounds import OverlappedRoundsBackend
from train.jobs import job
from train.lessons import OPTIMIZERS, batches_of, model, steps_of, weights
from train.rounds import H, Replay, worker_of


class ReplayAhead(Replay):
    """Each round begins between the end of the round before and the pulled model moved on."""

    def __init__(self, batches: list[list[tuple[Any, Any]]]) -> None:
        super().__init__(batches)
        self.pulled: list[Any] = [None] * len(batches)

    def begin(self, number: int, pulled: Any) -> Any:
        before, self.pulled[number] = self.pulled[number], pulled
        begin = pulled
        if before is not None:
            ahead = pulled + 0.5 * (pulled - before)
            begin = (ahead + weights(self.workers[number])) / 2
        return super().begin(number, begin)


@pytest.mark.parametrize(("policy", "shards"), [("r2sp", 1), ("r2sp", 2), ("r2sp:groups=2", 1), ("asp", 1), ("bsp", 1)])
def test_a_round_begins_between_the_own_end_point_and_the_model_moved_on(policy: str, shards: int) -> None:
    batches = [batches_of(worker, 4 * H) for worker in range(3)]
    with job(f"{policy}:weights=mean".replace("groups=2:", "groups=2,"), shards, workers=3) as running:
        found = running.work(*(worker_of(batches, ahead=True) for _ in batches))
        running.finish()
    expected = ReplayAhead(batches).run(running.events)
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


def test_it_needs_local_steps() -> None:
    mine = model()
    with pytest.raises(ValueError, match=r"ahead=True is about rounds of local steps; pass local_steps= with it\."):
        paceline.join(mine, OPTIMIZERS["sgd"](mine.parameters()), ahead=True)
