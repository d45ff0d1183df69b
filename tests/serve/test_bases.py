"""A shard keeps the weights that workers train from, as long as models must be compared with them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from paceline.model.layout import Layout, Tensor
from paceline.model.optimizer_spec import SUMS
from paceline.model.slice import Slice
from paceline.serve.shard.bases import Bases
from paceline.serve.shard.store import HeldUpdate, WholeStore
from paceline.serve.wire.messages import ApplyUpdates, DropUpdate, Identity

SIZE = 4


class Mixing:
    """A store whose workers push models. The test plays the coordinator and the workers."""

    def __init__(self) -> None:
        self.bases = Bases()
        self.store = WholeStore(Slice(Layout((Tensor("w", (SIZE,)),)), 0, SIZE, SUMS), bases=self.bases)
        self.store.version = 0
        self.iteration = 0

    def pull(self, *workers: int, incarnation: int = 1) -> torch.Tensor:
        for worker in workers:
            self.store.note_pull(worker, incarnation)
        return self.store.slice.weights.clone()

    def push(self, worker: int, model: torch.Tensor, incarnation: int = 1) -> Identity:
        self.iteration += 1
        update = Identity(worker, incarnation, self.iteration)
        assert self.store.put(update, HeldUpdate(self.store.take_buffer().copy_(model), (1.0,)))
        return update

    def apply(self, *updates: Identity) -> list[float] | None:
        """Mix these models in. Return their cosines."""
        order = ApplyUpdates(self.store.version + 1, updates, (1 / len(updates),) * len(updates), 0.5, compare=True)
        self.store.keep_base()
        self.store.apply(order)
        self.store.applied(order)
        return self.store.products.cosines() if self.store.products else None

    @property
    def kept(self) -> set[int]:
        return set(self.bases._copies)


def one(at: int, value: float = 1.0) -> torch.Tensor:
    """Return a vector with one element that is not zero."""
    return torch.eye(SIZE)[at] * value


def test_each_model_is_compared_with_the_weights_that_its_own_worker_pulled() -> None:
    some = Mixing()
    old = some.pull(0, 1, 2, 3)
    assert some.apply(some.push(0, old + one(0, 50)), some.push(1, old + one(0, 50))) == pytest.approx([1, 1])
    assert torch.equal(some.store.slice.weights, one(0, 25))
    new = some.pull(0, 1)
    assert some.kept == {0}, "workers 2 and 3 still train from it"
    # Two groups: one began from version 0 and the other from version 1, and all have learned the same.
    updates = [some.push(2, old + one(1)), some.push(3, old + one(1)), some.push(0, new + one(1))]
    assert some.apply(*updates) == pytest.approx([1, 1, 1])
    assert some.kept == {1}, "worker 1 still trains from it"
    some.push(1, new)
    assert some.kept == {1}, "its update waits"


def test_a_copy_is_released_when_nothing_needs_it() -> None:
    some = Mixing()
    old = some.pull(0, 1, 2)
    some.apply(some.push(0, old))
    assert some.kept == {0}
    some.store.carry_out(DropUpdate(some.push(1, old)))  # it was late
    some.store.fence(2, 2)  # its lease has run out
    new = some.pull(0)
    some.apply(some.push(0, new))
    assert not some.kept
    assert len(some.store._spare[0]) >= 2, "the buffers are used again"


def test_a_pull_is_that_of_one_incarnation() -> None:
    some = Mixing()
    old = some.pull(0, 1)
    some.apply(some.push(1, old + one(0, 8)))
    new = some.pull(0, incarnation=2)
    some.store.fence(0, 2)
    both = some.push(0, new + one(1), incarnation=2), some.push(1, some.pull(1) + one(1))
    assert some.apply(*both) == pytest.approx([1, 1])


def test_nothing_is_compared_if_another_process_has_sent_the_weights() -> None:
    """That is so after the backup of a shard has taken over."""
    some = Mixing()
    old = some.pull(0)
    assert some.apply(some.push(0, old + one(0)), some.push(1, old + one(1))) is None
    new = some.pull(0, 1)
    assert some.apply(some.push(0, new + one(0)), some.push(1, new + one(0))) == pytest.approx([1, 1])


def test_without_a_comparison_nothing_is_kept() -> None:
    store = WholeStore(Slice(Layout((Tensor("w", (SIZE,)),)), 0, SIZE, SUMS))
    store.version = 0
    store.note_pull(0, 1)
    store.keep_base()
    assert not store._spare[0]
    store.put(Identity(0, 1, 1), HeldUpdate(store.take_buffer().zero_(), (1.0,)))
    assert store.held(Identity(0, 1, 1)).base is None
