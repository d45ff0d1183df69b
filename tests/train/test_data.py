"""All workers together train on each sample once an epoch, however the batches are fetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from paceline.job.samples import Samples
from paceline.observe.trace import Measured, Progressed
from paceline.train.backend import AssignedSamples, LocalBackend, SampleSource
from paceline.train.data import JobBatches, loader_of
from paceline.train.optimizer import PacedOptimizer
from train.jobs import job
from tries import tries

FEW = tries(25, 60)


def numbers(size: int) -> Any:
    return TensorDataset(torch.arange(size))


def worker(address: str | None = None) -> Any:
    net = torch.nn.Linear(1, 1)
    return paceline.join(net, torch.optim.SGD(net.parameters(), lr=0.0), connect=address)


def train(session: Any, batch: Any) -> list[int]:
    """Make one step on a batch, and return its samples."""
    session.model(batch[0].float().unsqueeze(1)).mean().backward()
    session.step()
    return list(batch[0].tolist())


# Alone


def test_alone_each_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    with worker() as session:
        seen = [train(session, batch) for batch in session.batches(numbers(10), batch_size=4, epochs=2)]
    assert [len(batch) for batch in seen] == [4, 4, 2] * 2
    first, second = ([number for batch in some for number in batch] for some in (seen[:3], seen[3:]))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second


def test_another_call_continues_with_the_next_epoch() -> None:
    dataset = numbers(10)
    with worker() as session:
        at_once = [batch[0].tolist() for batch in session.batches(dataset, batch_size=4, epochs=2)]
    with worker() as session:
        one_by_one = [batch[0].tolist() for _ in range(2) for batch in session.batches(dataset, batch_size=4)]
        loader = session.loader(DataLoader(dataset, 4, shuffle=True))
        as_a_loader = [batch[0].tolist() for _ in range(2) for batch in loader]
    assert at_once == one_by_one == as_a_loader


def test_a_loader_keeps_its_settings() -> None:
    def doubled(samples: list[Any]) -> Any:
        return 2 * torch.stack([sample for (sample,) in samples])

    loader = DataLoader(numbers(10), 4, collate_fn=doubled, drop_last=True)
    with worker() as session:
        paced = session.loader(loader)
        assert [batch.tolist() for batch in paced] == [[0, 2, 4, 6], [8, 10, 12, 14]]
        assert len(paced) == len(loader) == 2 and paced.dataset is loader.dataset and paced.batch_size == 4
        batches = [batch.tolist() for batch in session.batches(loader, epochs=1)]
        assert len(batches) == 2


def test_a_distributed_sampler_is_replaced_by_the_job() -> None:
    dataset = numbers(10)
    sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=1, shuffle=False)
    with worker() as session:
        loader = session.loader(DataLoader(dataset, 5, sampler=sampler))
        loader.sampler.set_epoch(3)  # as scripts do
        assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_after_a_break_the_next_loop_continues_where_it_stopped() -> None:
    with worker() as session:
        loader = session.loader(DataLoader(numbers(12), 4))
        for batch in loader:
            assert batch[0].tolist() == [0, 1, 2, 3]
            break
        left = [batch[0].tolist() for batch in loader]
    assert left == [[4, 5, 6, 7], [8, 9, 10, 11], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_loader_with_less_than_a_batch_is_refused() -> None:
    with worker() as session:
        with pytest.raises(ValueError, match="9 samples, fewer than a batch of 10"):
            session.loader(DataLoader(numbers(9), 10))
        with pytest.raises(ValueError, match="9 samples, fewer than a batch of 10"):
            session.batches(DataLoader(numbers(9), 10))


def test_bad_arguments_are_refused_at_once() -> None:
    with worker() as session:
        with pytest.raises(ValueError, match="3 samples, fewer than a batch of 4"):
            session.batches(numbers(3), batch_size=4)
        with pytest.raises(ValueError, match="batch_size must be a number of at least 1; got None"):
            session.batches(numbers(3))
        with pytest.raises(ValueError, match="Pass a DataLoader, a Dataset with __len__ and __getitem__, or an Iter"):
            session.batches(iter([1, 2, 3]), batch_size=1)
        with pytest.raises(ValueError, match="leave out batch_size"):
            session.batches(DataLoader(numbers(3), 2), batch_size=3)


# Together

PATIENT = "r2sp:patience=10000"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "processes"),
    # A step takes about a millisecond here. With its default patience, R²SP would cancel late workers, and their
    # samples would rightly be computed again.
    [("bsp", 0), ("asp", 0), (PATIENT, 0), pytest.param("asp", 1, marks=pytest.mark.slow)],
)
def test_together_each_sample_is_trained_on_once_an_epoch(policy: str, processes: int) -> None:
    """The script has the epoch loop, and the session does not know its length."""

    def run(address: str) -> list[list[int]]:
        with worker(address) as session:
            # Spawned instead of forked, because this test has threads.
            options: dict[str, Any] = (
                {"multiprocessing_context": "spawn", "persistent_workers": True} if processes else {}
            )
            loader = session.loader(DataLoader(numbers(50), 4, shuffle=True, num_workers=processes, **options))
            return [[number for batch in loader for number in train(session, batch)] for _ in range(3)]

    with job(policy, workers=3) as running:
        seen = running.work(*[run] * 3)
        running.finish()
        assert running.coordinator.samples is not None and running.coordinator.samples.all_done
    for epoch in range(3):
        assert Counter(number for mine in seen for number in mine[epoch]) == Counter(range(50))


@pytest.mark.parametrize(
    ("samples", "drop_last", "length"),
    [(40, False, 5), (41, False, 6), (47, True, 6)],  # 10, 11 and 11 batches of at most 4 samples
)
def test_the_length_of_a_loader_is_that_of_each_worker(samples: int, drop_last: bool, length: int) -> None:
    """A schedule over `len(loader) * epochs` steps ends where it should, and is not stepped too often."""

    def run(address: str) -> tuple[int, int, float]:
        session = worker(address)
        loader = session.loader(DataLoader(numbers(samples), 4, drop_last=drop_last), epochs=3)
        schedule = OneCycleLR(session.optimizer, 1.0, total_steps=len(loader) * 3, cycle_momentum=False)
        steps = 0
        for _ in range(3):
            for batch in loader:
                train(session, batch)
                schedule.step()
                steps += 1
        session.close()
        return len(loader), steps, float(schedule.get_last_lr()[0])

    with job("bsp", workers=2) as running:
        outcomes = running.work(run, run)
        running.finish()
    total = -(-samples // 4) - (drop_last and samples % 4 > 0)
    assert sum(steps for _, steps, _ in outcomes) == 3 * total
    for own, steps, rate in outcomes:
        assert own == length
        assert 3 * length - 2 <= steps <= 3 * length, "one round of an odd number of batches is not full"
        assert rate < 0.05, "the rate has come down from 1"


def test_the_length_counts_the_steps_that_the_ranks_of_a_worker_make_together() -> None:
    class Ranked(LocalBackend):
        ranks, workers = 2, 3

    def length(size: int, batch_size: int, drop_last: bool) -> int:
        net = torch.nn.Linear(1, 1)
        backend = Ranked()
        optimizer = PacedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), backend)
        return len(JobBatches(DataLoader(numbers(size), batch_size, drop_last=drop_last), optimizer, backend))

    assert length(48, 4, False) == 2, "six steps of eight samples for three workers"
    assert length(49, 4, False) == 3
    assert length(55, 4, True) == 2
    assert length(56, 4, True) == 3


def progress_of(train_all: Callable[[Any], Any]) -> list[tuple[int, int]]:
    """Run one worker, and return the samples that are done and those that there are in all after each update."""

    def run(address: str) -> None:
        with worker(address) as session:
            train_all(session)

    with job("bsp") as running:
        running.work(run)
        running.finish()
    return [(event.done, event.total) for event in running.events if isinstance(event, Progressed)]


def test_the_job_knows_the_planned_epochs_from_the_first_update_on() -> None:
    def by_loader(session: Any) -> None:
        loader = session.loader(DataLoader(numbers(8), 4), epochs=3)
        for _ in range(3):
            for batch in loader:
                train(session, batch)

    def by_batches(session: Any) -> None:
        for batch in session.batches(numbers(8), batch_size=4, epochs=3):
            train(session, batch)

    assert progress_of(by_loader) == progress_of(by_batches) == [(done, 24) for done in range(4, 25, 4)]


def test_without_a_plan_the_job_does_not_guess_its_size() -> None:
    def by_loader(session: Any) -> None:
        loader = session.loader(DataLoader(numbers(8), 4))
        for _ in range(2):
            for batch in loader:
                train(session, batch)

    def by_batches(session: Any) -> None:
        dataset = numbers(8)
        for _ in range(2):
            for batch in session.batches(dataset, batch_size=4):
                train(session, batch)

    assert progress_of(by_loader) == progress_of(by_batches) == [(4, 0), (8, 0), (12, 0), (16, 0)]


def test_a_plan_that_proves_wrong_is_dropped() -> None:
    def more_than_planned(session: Any) -> None:
        dataset = numbers(8)
        for _ in range(2):
            for batch in session.batches(dataset, batch_size=4, epochs=1):
                train(session, batch)

    assert progress_of(more_than_planned) == [(4, 8), (8, 8), (12, 0), (16, 0)]


def test_a_worker_that_joins_late_finds_the_epoch_that_the_others_are_in() -> None:
    """Its script starts with the first epoch like every script, and the epochs that are over have no samples left."""
    dataset = numbers(12)

    def late(address: str) -> list[int]:
        with worker(address) as session:
            loader = session.loader(DataLoader(dataset, 4))
            return [len([train(session, batch) for batch in loader]) for _ in range(4)]

    with job("asp") as running, worker(running.address) as session:
        loader = session.loader(DataLoader(dataset, 4))
        for _ in range(2):
            for batch in loader:
                train(session, batch)
        assert running.work(late) == [[0, 0, 3, 3]]


def test_a_loader_that_knows_its_epochs_finishes_after_the_last() -> None:
    """No other worker waits while this one tests and saves its model. It can still report how good the model is."""
    with job("bsp") as running:
        session = worker(running.address)
        loader = session.loader(DataLoader(numbers(8), 4), epochs=2)
        for _ in range(2):
            assert not running.coordinator.done.is_set()
            for batch in loader:
                train(session, batch)
        assert session.optimizer.finished
        session.log(accuracy=0.75)
        session.close()
        running.finish()
    measured = [event for event in running.events if isinstance(event, Measured)]
    assert [(event.kind, event.value) for event in measured] == [("accuracy", 0.75)]


def test_a_loader_does_not_finish_before_accumulated_gradients_are_pushed() -> None:
    with job("bsp") as running:
        session = worker(running.address)
        for batch in session.loader(DataLoader(numbers(8), 4), epochs=1):
            session.model(batch[0].float().unsqueeze(1)).mean().backward()
        assert not running.coordinator.done.is_set()
        session.step()
        session.close()
        running.finish()
        assert running.coordinator.samples is not None and running.coordinator.samples.all_done


class InterruptedJob(LocalBackend):
    """A job that sometimes gives up this worker. It assigns samples as the coordinator does."""

    alone = False

    def __init__(self, size: int, epochs: int) -> None:
        self.samples = Samples(size, epochs)
        self.joins = 1
        self.number = 0
        self.trained: list[int] = []

    def sample_source(self) -> SampleSource:
        def take(batch_size: int, size: int, epochs: int, planned: int | None) -> AssignedSamples | None:
            self.number += 1
            taken = self.samples.take(0, self.number, batch_size)
            if taken is None:
                return None
            return AssignedSamples(self.number, self.joins, *taken, size=taken.stop - taken.start)

        return take

    def exchange(self, computed: Any) -> bool:
        self.samples.arrived(0, computed.taken, len(self.trained))
        self.samples.done(len(self.trained))
        self.trained.append(computed.batch_size)
        return True

    def give_up(self) -> None:
        self.samples.abandoned(0)
        self.joins += 1


@FEW
@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 3), st.integers(0, 5), st.sets(st.integers(0, 30)))
def test_a_worker_that_is_given_up_discards_the_samples_that_it_had_fetched_ahead(
    size: int, batch: int, epochs: int, ahead: int, fatal: set[int]
) -> None:
    """Every sample is trained on once an epoch, whenever the worker is given up and however far ahead it fetches."""
    if batch > size:
        return
    backend = InterruptedJob(size, epochs)
    net = torch.nn.Linear(1, 1)
    optimizer = PacedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), backend)
    batches = JobBatches(loader_of(numbers(size), batch), optimizer, backend)
    # Like the processes of a DataLoader, request a few batches before the first one is needed.
    indices = batches.indices

    def eager() -> Iterator[list[int]]:
        waiting: list[list[int]] = []
        for batch_of in indices():
            waiting.append(batch_of)
            if len(waiting) > ahead:
                yield waiting.pop(0)
        yield from waiting

    batches.indices = eager  # type: ignore[method-assign]
    seen = Counter[int]()
    for step, got in enumerate(batches.batches(epochs)):
        if step in fatal:  # during this iteration
            backend.give_up()
            optimizer.step()  # the update of an incarnation that is over
            backend.trained.pop()
            continue
        optimizer.step()
        seen.update(got[0].tolist())
    left = list(batches.batches(0))
    while left:  # samples that returned to the job after the last batch was assigned
        seen.update(number for got in left for number in got[0].tolist())
        optimizer.step()
        left = list(batches.batches(0))
    assert set(seen) <= set(range(size)) and max(seen.values(), default=0) <= epochs
    assert sum(seen.values()) == sum(backend.trained)


def test_samples_that_return_to_the_job_after_the_loader_found_no_more_are_trained_on() -> None:
    """The loader looks ahead and finds no samples. Then an update is discarded, and its samples are assigned again."""

    class SamplesReturn(LocalBackend):
        def sample_source(self) -> SampleSource:
            assigned = [AssignedSamples(1, 1, 0, 0, 4, 4), None, AssignedSamples(2, 1, 0, 2, 4, 2), None, None]
            return lambda _batch_size, _size, _epochs, _planned: assigned.pop(0)

    net = torch.nn.Linear(1, 1)
    backend = SamplesReturn()
    optimizer = PacedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), backend)
    batches = JobBatches(DataLoader(numbers(4), 4), optimizer, backend)
    assert [batch[0].tolist() for batch in batches.batches(1)] == [[0, 1, 2, 3], [2, 3]]
