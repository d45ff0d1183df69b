"""Batches, epoch by epoch, for a library that owns the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from torch.utils.data import DataLoader, TensorDataset

from paceline.train.backend import AssignedSamples, LocalBackend, SampleSource
from paceline.train.data import JobBatches
from paceline.train.job_epochs import JobEpochs, skipped_samples
from paceline.train.job_schedule import JobSchedule
from paceline.train.optimizer import PacedOptimizer


class Assigned(LocalBackend):
    """A job that assigns these ranges: epoch, start and stop."""

    alone = False

    def __init__(self, *ranges: tuple[int, int, int]) -> None:
        self.ranges = iter(ranges)
        self.ended = False

    def sample_source(self) -> SampleSource:
        def take(batch_size: int, size: int, epochs: int, planned: int | None) -> AssignedSamples | None:
            epoch, start, stop = next(self.ranges, (epochs, 0, 0))
            return AssignedSamples(1, self.joins, epoch, start, stop, stop - start) if epoch < epochs else None

        return take

    def end_samples(self, size: int) -> None:
        self.ended = True


def epochs_of(backend: Assigned, planned: float, skipped: int = 0, fetches_ahead: bool = False) -> JobEpochs:
    model = torch.nn.Linear(1, 1)
    optimizer = PacedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backend)
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4)
    epochs = JobEpochs(loader, JobBatches(loader, optimizer, backend), optimizer, backend, fetches_ahead)
    epochs.plan(planned, skipped)
    return epochs


def numbers(batches: Iterator[Any]) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


FIRST, SECOND = [0, 1, 2, 3], [4, 5, 6, 7]


def test_an_iteration_yields_one_epoch() -> None:
    epochs = epochs_of(Assigned((0, 0, 4), (0, 4, 8), (1, 4, 8)), planned=2)
    assert len(epochs) == 2
    assert numbers(iter(epochs)) == [FIRST, SECOND] and epochs.is_over
    assert numbers(iter(epochs)) == [SECOND] and epochs.epoch == 1
    assert epochs.peek() is None and numbers(iter(epochs)) == []


def test_a_worker_that_joins_late_begins_with_the_epoch_of_the_job() -> None:
    epochs = epochs_of(Assigned((5, 4, 8), (7, 0, 4)), planned=8)
    samples = epochs.peek()
    assert samples is not None and epochs.epoch_of(samples) == 5
    assert epochs.steps_before(samples, steps=2) == 11 and epochs.steps_done(2) is None
    assert numbers(iter(epochs)) == [SECOND] and epochs.steps_done(2) == 12
    assert numbers(iter(epochs)) == [FIRST] and epochs.epoch == 7


def test_what_a_lost_worker_has_left_belongs_to_the_current_epoch() -> None:
    epochs = epochs_of(Assigned((0, 0, 4), (1, 0, 4), (0, 4, 8), (1, 4, 8), (2, 0, 4)), planned=3)
    assert numbers(iter(epochs)) == [FIRST]
    assert numbers(iter(epochs)) == [FIRST, SECOND, SECOND] and epochs.epoch == 1
    late = epochs_of(Assigned((0, 0, 4), (1, 0, 4), (2, 0, 4), (1, 4, 8), (2, 4, 8)), planned=3)
    assert [numbers(iter(late)) for _ in range(3)] == [[FIRST], [FIRST], [FIRST, SECOND, SECOND]]


def test_an_iteration_that_was_left_is_continued() -> None:
    epochs = epochs_of(Assigned((0, 0, 4), (0, 4, 8), (1, 0, 4)), planned=2, fetches_ahead=True)
    fetched = iter(epochs)
    assert next(fetched)[0].tolist() == FIRST
    assert numbers(iter(epochs)) == [FIRST, SECOND]
    assert epochs.use() and epochs.use()
    assert numbers(iter(epochs)) == [FIRST]


def test_samples_that_belong_to_others_now_are_not_used() -> None:
    backend = Assigned((0, 0, 4), (0, 4, 8))
    epochs = epochs_of(backend, planned=1, fetches_ahead=True)
    assert len(numbers(iter(epochs))) == 2
    backend.joins = 2
    assert not epochs.use() and epochs.last is None


def test_a_job_continues_behind_a_checkpoint() -> None:
    """12 of 20 samples were trained on: one epoch, and half of the second."""
    epochs = epochs_of(Assigned((0, 0, 4), (0, 4, 8), (1, 0, 4)), planned=2.5, skipped=12)
    assert numbers(iter(epochs)) == [SECOND] and epochs.epoch == 1 and epochs.steps_done(2) == 4
    assert numbers(iter(epochs)) == [FIRST] and epochs.peek() is None


def test_an_early_end_is_told_once() -> None:
    backend = Assigned((0, 0, 4), (0, 4, 8))
    epochs = epochs_of(backend, planned=1)
    epochs.end()
    assert backend.ended
    backend.ended = False
    epochs.end()
    assert not backend.ended
    exhausted = Assigned()
    epochs_of(exhausted, planned=1).end()
    assert not exhausted.ended


def test_where_the_newest_job_began(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert skipped_samples(folder, 0, has_trained=False, is_main=True) == 0 and not folder.exists()
    assert skipped_samples(folder, 0, has_trained=True, is_main=False) == 0
    assert skipped_samples(folder, 12, has_trained=False, is_main=True) == 12
    assert skipped_samples(folder, 20, has_trained=True, is_main=False) == 12, "a newer checkpoint does not count"
    assert skipped_samples(folder, 0, has_trained=False, is_main=True) == 0
    assert skipped_samples(folder, 20, has_trained=True, is_main=True) == 0


def test_a_schedule_follows_the_job() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    steps: list[int | None] = [1, 1, 5, None]
    schedule = JobSchedule(
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)), lambda: steps.pop(0)
    )
    rates = []
    while steps:
        schedule.step()
        rates.append(1 / schedule.get_last_lr()[0])
    assert rates == pytest.approx([2, 2, 6, 7])
