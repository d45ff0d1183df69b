"""All workers together train on each sample once an epoch, however the batches are fetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler

import paceline
from paceline.job.samples import Samples
from paceline.train.backend import AssignedSamples, LocalBackend, SampleSource
from paceline.train.data import JobBatches, loader_of
from paceline.train.optimizer import PacedOptimizer
from train.jobs import job

FAST = settings(max_examples=60, deadline=None, derandomize=True)


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


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield 1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DataLoader(numbers(9), 3, sampler=WeightedRandomSampler([1.0] * 9, 9)), "no sampler of its own"),
        (lambda: DataLoader(numbers(9), batch_sampler=[[0, 1], [2]]), "no sampler of its own"),
        (lambda: DataLoader(numbers(9), batch_size=None), "must have a batch size"),
        (lambda: DataLoader(Stream(), 3), "it cannot use an IterableDataset"),
        (lambda: DataLoader(numbers(9), 10), "9 samples, fewer than a batch of 10"),
    ],
)
def test_a_loader_whose_samples_cannot_be_assigned_is_refused(make: Callable[[], Any], sentence: str) -> None:
    with worker() as session:
        with pytest.raises(ValueError, match=sentence) as caught:
            session.loader(make())
        assert "\n" not in str(caught.value)
        with pytest.raises(ValueError, match=sentence):
            session.batches(make())


def test_bad_arguments_are_refused_at_once() -> None:
    with worker() as session:
        with pytest.raises(ValueError, match="3 samples, fewer than a batch of 4"):
            session.batches(numbers(3), batch_size=4)
        with pytest.raises(ValueError, match="batch_size must be a number of at least 1; got None"):
            session.batches(numbers(3))
        with pytest.raises(ValueError, match="The job assigns samples by number"):
            session.batches(iter([1, 2, 3]), batch_size=1)
        with pytest.raises(ValueError, match="The job assigns samples by number"):
            session.batches(Stream(), batch_size=1)
        with pytest.raises(ValueError, match="leave out batch_size"):
            session.batches(DataLoader(numbers(3), 2), batch_size=3)


# Together

PATIENT = "r2sp:patience=10000"


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


def test_a_loader_that_knows_its_epochs_leaves_after_the_last() -> None:
    """No other worker waits while this one tests and saves its model."""
    with job("bsp") as running:
        session = worker(running.address)
        loader = session.loader(DataLoader(numbers(8), 4), epochs=2)
        for _ in range(2):
            assert not running.coordinator.done.is_set()
            for batch in loader:
                train(session, batch)
        running.finish()


def test_a_loader_does_not_leave_before_accumulated_gradients_are_pushed() -> None:
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
        def take(batch_size: int, size: int, epochs: int) -> AssignedSamples | None:
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


@FAST
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
            return lambda _batch_size, _size, _epochs: assigned.pop(0)

    net = torch.nn.Linear(1, 1)
    backend = SamplesReturn()
    optimizer = PacedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), backend)
    batches = JobBatches(DataLoader(numbers(4), 4), optimizer, backend)
    assert [batch[0].tolist() for batch in batches.batches(1)] == [[0, 1, 2, 3], [2, 3]]
