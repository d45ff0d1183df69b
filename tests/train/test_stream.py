"""Streams, samplers of one's own and data that is split already: each process takes its part."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import paceline
from paceline.observe.trace import Arrived, Progressed
from paceline.train.backend import ComputedGradient, LocalBackend
from paceline.train.data import EpochBatches, JobBatches, batches_of, loader_of
from paceline.train.optimizer import PacedOptimizer
from paceline.train.stream import StreamBatches, size_of
from train.jobs import job


class Stream(IterableDataset[Any]):
    """The numbers below `size`. The processes of a DataLoader divide them among each other."""

    def __init__(self, size: int, first: int = 0, step: int = 1) -> None:
        self.size, self.first, self.step = size, first, step
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is None:
            return iter(range(self.first, self.size, self.step))
        assert info.dataset is self, "the script's own dataset, and not a wrapper"
        return iter(range(info.id, self.size, info.num_workers))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


def numbers(size: int) -> Any:
    return TensorDataset(torch.arange(size))


class OneOf(LocalBackend):
    """One process of a job without a server. It records the gradients that are pushed."""

    alone = False

    def __init__(self, workers: int = 1, worker: int = 0, rank: int = 0, ranks: int = 1) -> None:
        self.workers, self.worker, self.rank, self.ranks = workers, worker, rank, ranks
        self.pushed: list[ComputedGradient] = []

    def exchange(self, computed: ComputedGradient) -> bool:
        self.pushed.append(computed)
        return True


def part(loader: Any, backend: LocalBackend | None = None, seed: int = 0, sharded: bool = False) -> EpochBatches:
    net = torch.nn.Linear(1, 1)
    backend = backend or LocalBackend()
    optimizer = PacedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), backend)
    return batches_of(loader, optimizer, backend, seed, sharded)


def parts(loader: Any, workers: int, epochs: int = 1, **more: Any) -> list[list[Any]]:
    """Return the batches of each process."""
    found = [part(loader, OneOf(workers, number), **more) for number in range(workers)]
    return [[_plain(batch) for batch in own.batches(epochs)] for own in found]


def _plain(batch: Any) -> Any:
    if isinstance(batch, list | tuple):
        return _plain(batch[0])
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


# Streams


def test_alone_a_stream_is_whole() -> None:
    net = torch.nn.Linear(1, 1)
    with paceline.join(net, torch.optim.SGD(net.parameters(), lr=0.0)) as session:
        assert (session.world_size, session.rank, session.worker, session.is_main) == (1, 0, 0, True)
        batches = [batch.tolist() for batch in session.batches(Stream(5), batch_size=2)]
        assert batches == [[0, 1], [2, 3], [4]]
        assert session.optimizer.samples_taken == 5
        loader = session.loader(DataLoader(Stream(5), 2, drop_last=True))
        assert [batch.tolist() for _ in range(2) for batch in loader] == [[0, 1], [2, 3]] * 2


def test_each_process_takes_every_nth_sample_of_a_stream() -> None:
    assert parts(DataLoader(Stream(11), 2), workers=3) == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8]]]
    assert parts(DataLoader(Stream(11), 2, drop_last=True), workers=3)[2] == [[2, 5]]
    assert parts(DataLoader(Stream(4), None), workers=2) == [[0, 2], [1, 3]], "the stream makes the batches"


def test_a_worker_beyond_the_first_ones_repeats_a_part() -> None:
    """The number of parts is that of the workers that the job starts with."""
    extra = part(DataLoader(Stream(4), 2), OneOf(workers=2, worker=3))
    assert [batch.tolist() for batch in extra.batches()] == [[1, 3]]


def test_data_that_is_split_already_is_used_as_it_is() -> None:
    def own(number: int) -> list[Any]:
        batches = part(DataLoader(Stream(6, number, 2), 2), OneOf(2, number), sharded=True)
        return [batch.tolist() for batch in batches.batches()]

    assert [own(0), own(1)] == [[[0, 2], [4]], [[1, 3], [5]]]
    dataset = numbers(6)
    samplers: list[Any] = [DistributedSampler(dataset, 2, number, shuffle=False) for number in range(2)]
    loaders = [DataLoader(dataset, 2, sampler=sampler) for sampler in samplers]
    assert [parts(loader, 1, sharded=True)[0] for loader in loaders] == [[[0, 2], [4]], [[1, 3], [5]]]
    assert isinstance(part(loaders[0]), JobBatches), "without sharded=True the job assigns the samples"


@pytest.mark.slow
def test_the_processes_of_a_loader_divide_the_stream_as_before() -> None:
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True}
    own = part(DataLoader(Stream(12), 2, worker_init_fn=dataset_is_known, **options), OneOf(2, 1))
    for _ in range(2):
        assert sorted(number for batch in own.batches() for number in batch.tolist()) == [2, 3, 6, 7, 10, 11]


def dataset_is_known(_: int) -> None:
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, Stream)


# Samplers


def test_torchs_random_samplers_have_the_same_order_in_all_processes() -> None:
    """Every batch is used once, as the sampler built it. Other epochs and other seeds have another order."""
    torch.manual_seed(0)
    weights = [1.0, 5.0] * 10
    for sampler in (WeightedRandomSampler(weights, 18), SubsetRandomSampler(range(1, 19))):
        loader = DataLoader(numbers(20), 4, sampler=sampler)
        sampler.generator = None
        (alone,) = parts(loader, workers=1, epochs=2)
        assert alone[:5] != alone[5:] and [len(batch) for batch in alone] == [4, 4, 4, 4, 2] * 2
        sampler.generator = None
        torch.rand(1)  # the state of torch's own generator has no influence
        zero, one = parts(loader, workers=2, epochs=2)
        assert zero == [alone[index] for index in (0, 2, 4, 5, 7, 9)]
        assert one == [alone[index] for index in (1, 3, 6, 8)]
        sampler.generator = None
        assert parts(loader, workers=1, epochs=2, seed=9)[0] != alone


def test_a_sampler_with_a_generator_of_its_own_keeps_it() -> None:
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(numbers(9), 3, sampler=WeightedRandomSampler([1.0] * 9, 9, generator=generator))
    batches = list(part(loader).batches())
    expected = list(WeightedRandomSampler([1.0] * 9, 9, generator=torch.Generator().manual_seed(7)))
    assert [number for batch in batches for number in batch[0].tolist()] == expected


def test_batches_of_a_batch_sampler_stay_as_they_were_built() -> None:
    loader = DataLoader(numbers(6), batch_sampler=[[0, 1], [2], [3, 4, 5]])
    assert parts(loader, workers=2) == [[[0, 1], [3, 4, 5]], [[2]]]
    single = DataLoader(numbers(5), batch_size=None)
    assert parts(single, workers=2) == [[0, 2, 4], [1, 3]]


def test_of_any_other_loader_each_process_takes_every_nth_batch() -> None:
    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (2 * batch for batch in super().__iter__())

    assert parts(Doubling(Stream(7), 2), workers=2) == [[[0, 2], [8, 10]], [[4, 6], [12]]]


# Epochs and lengths


def test_batches_of_several_epochs_tell_the_data_which_epoch_begins() -> None:
    """With a loader, the loop over the epochs is the script's, and so is `set_epoch`."""
    stream = Stream(4)
    list(part(DataLoader(stream, 2)).batches(3))
    assert stream.epochs == [0, 1, 2]
    own = part(DataLoader(stream, 2))
    list(own.batches())
    list(own.batches())
    assert stream.epochs == [0, 1, 2] and own.epochs == 2


def test_the_length_is_that_of_a_part() -> None:
    def length(loader: Any, **more: Any) -> int:
        return len(part(loader, OneOf(workers=2, worker=1), **more))

    assert length(DataLoader(SizedStream(9), 2)) == 3
    assert length(DataLoader(SizedStream(9), 2, drop_last=True)) == 2
    assert length(DataLoader(SizedStream(9), None)) == 5
    assert length(DataLoader(SizedStream(9), 2), sharded=True) == 5
    assert length(DataLoader(numbers(9), batch_sampler=[[1]] * 5)) == 3
    assert length(DataLoader(numbers(9), 2, sampler=WeightedRandomSampler([1.0] * 9, 20))) == 5
    with pytest.raises(TypeError, match="has no len"):
        length(DataLoader(Stream(9), 2))


# The number of samples in a batch


def test_the_number_of_samples_is_that_of_the_first_tensor() -> None:
    image = torch.zeros(3, 8, 8)
    assert size_of(torch.zeros(5, 2), None) == 5
    assert size_of([torch.tensor(1.0), {"a": "text", "b": (torch.zeros(4), torch.zeros(9))}], None) == 4
    assert size_of("text", 6) == size_of({}, 6) == 6
    assert size_of("text", None) == size_of(torch.zeros(0), None) == 1
    assert size_of(((image, image), ({}, {})), 2) == 2, "a list of images has no more samples than the batch size"


def test_a_gradient_counts_the_samples_of_its_batches() -> None:
    def ragged(samples: list[Any]) -> Any:
        return [torch.zeros(7, number) for number in samples]  # the first tensor does not tell how many there are

    backend = OneOf()
    net = torch.nn.Linear(1, 1)
    optimizer = PacedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), backend)
    batches = batches_of(DataLoader(Stream(5), 2, collate_fn=ragged), optimizer, backend, 0, False)
    for index, _ in enumerate(batches.batches()):
        assert batches.pending
        if index != 1:  # the second batch is accumulated with the third one
            optimizer.step()
            optimizer.zero_grad()
    assert [(each.batch_size, list(each.taken)) for each in backend.pushed] == [(2, []), (3, [])]


# Ranks


class Ranks:
    """The ranks of one worker, as threads."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks, timeout=20.0)
        self._values: list[list[float]] = [[] for _ in range(ranks)]

    def run(self, loader: Any, epochs: int = 2) -> list[Any]:
        """Return the batches of each rank with the samples that count, or the error that it raised."""
        found: list[Any] = [None] * self.ranks

        def work(rank: int) -> None:
            backend = OneOf(rank=rank, ranks=self.ranks)
            backend.sum_over_ranks = lambda values: self._sum(rank, values)  # type: ignore[method-assign]
            net = torch.nn.Linear(1, 1)
            optimizer = PacedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), backend)
            steps = []
            try:
                for batch in batches_of(loader, optimizer, backend, 0, False).batches(epochs):
                    optimizer.step()
                    optimizer.zero_grad()
                    steps.append((batch.tolist(), backend.pushed[-1].batch_size))
                found[rank] = steps
            except ValueError as error:
                found[rank] = str(error)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        return found

    def _sum(self, rank: int, values: list[float]) -> list[float]:
        self._values[rank] = values
        self._barrier.wait()
        sums = [sum(each) for each in zip(*self._values, strict=True)]
        self._barrier.wait()
        return sums


def test_all_ranks_of_a_worker_make_the_same_number_of_steps() -> None:
    """A rank whose part has ended repeats its last batch, and the repeated batch does not count."""
    epoch = [([0, 2], 2), ([4], 1)], [([1, 3], 2), ([1, 3], 0)]
    assert Ranks(2).run(DataLoader(Stream(5), 2)) == [epoch[0] * 2, epoch[1] * 2]


def test_a_rank_without_any_batch_is_an_error_in_all_ranks() -> None:
    found = Ranks(2).run(DataLoader(Stream(1), 2))
    assert found[0] == found[1] and "at least one batch for each process" in found[0]


# In a job


def connected(address: str) -> Any:
    net = torch.nn.Linear(1, 1)
    return paceline.join(net, torch.optim.SGD(net.parameters(), lr=0.0), connect=address)


def trained(session: Any, batch: Any) -> list[int]:
    values = batch[0] if isinstance(batch, list) else batch
    session.model(values.float().unsqueeze(1)).mean().backward()
    session.step()
    return list(values.tolist())


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_workers_with_unequal_parts_train_on_each_sample_once_an_epoch(policy: str) -> None:
    """The parts have three batches and two. The session does not know the number of epochs."""

    def run(address: str) -> tuple[int, int, list[list[int]]]:
        with connected(address) as session:
            loader = session.loader(DataLoader(Stream(9), 2))
            seen = [[number for batch in loader for number in trained(session, batch)] for _ in range(3)]
            assert session.world_size == session.optimizer.world_size == 2
            assert session.rank == session.optimizer.rank == session.worker
            assert session.is_main == session.optimizer.is_main == (session.rank == 0)
            return session.rank, session.world_size, seen

    with job(policy, workers=2) as running:
        outcomes = sorted(running.work(run, run))
        running.finish()
    assert [outcome[:2] for outcome in outcomes] == [(0, 2), (1, 2)]
    for epoch in range(3):
        assert Counter(outcomes[0][2][epoch] + outcomes[1][2][epoch]) == Counter(range(9))
    sizes = [event.batch_size for event in running.events if isinstance(event, Arrived)]
    assert Counter(sizes) == {2: 12, 1: 3}, "the small batch counts as one sample"
    assert not any(isinstance(event, Progressed) for event in running.events), "the size of a stream is unknown"


def test_a_stream_with_planned_epochs_is_finished_after_the_last() -> None:
    def run(address: str) -> int:
        session = connected(address)
        loader = session.loader(DataLoader(Stream(9), 2), epochs=2)
        steps = len([trained(session, batch) for _ in range(2) for batch in loader])
        assert session.optimizer.finished
        session.close()
        return steps

    with job("bsp", workers=2) as running:
        assert sorted(running.work(run, run)) == [4, 6]
        running.finish()


def test_a_stream_is_made_into_batches_by_the_session() -> None:
    assert isinstance(part(loader_of(Stream(3), 2)), StreamBatches)
    with pytest.raises(ValueError, match="batch_size must be a number of at least 1; got None"):
        loader_of(Stream(3), None)


def test_a_worker_that_joins_an_elastic_job_has_a_rank_beyond_its_size() -> None:
    with job("asp") as running:
        first, second = connected(running.address), connected(running.address)
        assert (first.world_size, first.rank, first.is_main) == (1, 0, True)
        assert (second.world_size, second.rank, second.is_main) == (1, 1, False)
        assert [batch.tolist() for batch in second.batches(Stream(3), batch_size=2)] == [[0, 1], [2]]
        first.close()
        second.close()
