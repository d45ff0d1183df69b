"""Updates that have few of their elements each: a step is the mean over those that have an element."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch: Any = pytest.importorskip("torch")

from paceline.model.combination import Term
from paceline.model.layout import STATISTICS, Layout, Tensor
from paceline.model.optimizer_spec import SUMS
from paceline.model.recut import SavedPiece, cut_again
from paceline.model.slice import SHARES, Slice
from tries import tries

SIZE = 60
LAYOUT = Layout((Tensor("w", (SIZE,)),))


def new_slice(sparse: bool = True) -> Slice:
    return Slice(LAYOUT, 0, SIZE, SUMS, sparse=sparse)


def sparse_update(seed: int, present: float = 0.3) -> Any:
    """Return how far a worker has moved the model, with a part of its elements. A step adds it to the weights."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(SIZE).astype(np.float32) * (rng.random(SIZE) < present)
    return torch.from_numpy(-values)


@tries(40, 300)
@given(st.lists(st.floats(0.05, 2), min_size=1, max_size=6), st.integers(0, 2**20), st.booleans())
def test_a_barrier_takes_the_mean_over_the_senders_of_each_element(
    batches: list[float], seed: int, added_one_by_one: bool
) -> None:
    updates = [sparse_update(seed + number) for number in range(len(batches))]
    whole, total = new_slice(), sum(batches)
    if added_one_by_one:
        running = None
        for update, batch in zip(updates, batches, strict=True):
            running = whole.add(Term.of(update.clone(), batch, (1.0,)), running)
        assert running is not None
        whole.step_by([running.term(1 / total)])
    else:
        whole.step_by([Term.of(each, batch / total, (1.0,)) for each, batch in zip(updates, batches, strict=True)])
    for element in range(SIZE):
        pairs = zip(updates, batches, strict=True)
        sent = [(-float(update[element]), batch) for update, batch in pairs if update[element]]
        mean = sum(value * batch for value, batch in sent) / sum(batch for _, batch in sent) if sent else 0.0
        assert float(whole.weights[element]) == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize(("senders", "expected"), [(1, 0.68), (2, 0.87), (4, 1.0)])
def test_by_turns_a_round_moves_an_element_nearly_as_far_as_its_senders_mean(senders: int, expected: float) -> None:
    """`senders` of four workers send an element in each round. The others send other elements.

    Just after a worker has sent an element, the running mean of its senders is above its mean in time.
    """
    whole, workers, rounds = new_slice(), 4, 200
    for turn in range(rounds * workers):
        update = torch.zeros(SIZE)
        update[0 if turn % workers < senders else 1 + turn % workers] = -1.0
        before = float(whole.weights[0])
        whole.step_by([Term.of(update, 1 / workers, (1.0,))])
        moved = float(whole.weights[0]) - before
        assert 0 <= moved <= 1
    per_round = float(whole.weights[0]) / rounds
    assert per_round == pytest.approx(expected, abs=0.02), "the mean over all workers would be senders / 4"


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_updates_with_all_elements_are_applied_as_before(weight: float) -> None:
    updates = [torch.full((SIZE,), -1.0) + sparse_update(seed) / 8 for seed in range(5)]
    ours, plain = new_slice(), new_slice(sparse=False)
    for update in updates:
        for each in (ours, plain):
            each.step_by([Term.of(update, weight, (1.0,))])
    assert torch.equal(ours.weights, plain.weights)


def test_an_update_is_not_changed() -> None:
    update = sparse_update(1)
    before = update.clone()
    new_slice().step_by([Term.of(update, 1.0, (1.0,))])
    assert torch.equal(update, before)


def test_an_update_that_counts_nothing_changes_nothing() -> None:
    whole = new_slice()
    whole.step_by([Term.of(sparse_update(1), 0.0, (1.0,))])
    assert not whole.weights.any()
    assert torch.equal(whole.state()[0][SHARES], torch.ones(SIZE))


def test_a_loaded_slice_goes_on_in_the_same_way() -> None:
    ours, again = new_slice(), new_slice()
    for turn in range(6):
        ours.step_by([Term.of(sparse_update(turn), 0.25, (1.0,))])
    tensors, meta = ours.state()
    again.load({name: tensor.clone() for name, tensor in tensors.items()}, meta)
    for turn in range(6, 12):
        for each in (ours, again):
            each.step_by([Term.of(sparse_update(turn), 0.25, (1.0,))])
    assert torch.equal(ours.weights, again.weights)


def test_a_checkpoint_without_shares_begins_with_all_senders() -> None:
    plain, ours = new_slice(sparse=False), new_slice()
    plain.step_by([Term.of(sparse_update(1), 0.25, (1.0,))])
    ours.load(*plain.state())
    assert torch.equal(ours.state()[0][SHARES], torch.ones(SIZE))
    tensors, meta = ours.state()
    plain.load(tensors, meta)  # a job without topk goes on from it too
    with pytest.raises(ValueError, match="the shares of the senders"):
        ours.load(tensors | {SHARES: torch.ones(3)}, meta)


def test_shares_are_cut_again_with_the_weights() -> None:
    ours = new_slice()
    for turn in range(6):
        ours.step_by([Term.of(sparse_update(turn), 0.25, (1.0,))])
    tensors, meta = ours.state()
    piece = SavedPiece.of({name: tensor.numpy() for name, tensor in tensors.items()}, meta)
    found, _ = cut_again(LAYOUT, SUMS, [(0, 20), (20, SIZE)], [piece])
    assert np.array_equal(found[f"1/{SHARES}"], tensors[SHARES][20:].numpy())


def test_running_statistics_are_a_mean_over_all_workers() -> None:
    """They are never left out of an update, also if one is 0."""
    layout = Layout((Tensor("w", (4,)), Tensor("mean", (2,), group=STATISTICS)))
    whole = Slice(layout, 0, 6, SUMS, sparse=True)
    updates = [torch.tensor([-1.0, 0, 0, 0, 3, 0]), torch.tensor([0.0, -1, 0, 0, 1, 2])]
    whole.step_by([Term.of(update, 0.5, (1.0,)) for update in updates])
    assert whole.weights.tolist() == [1, 1, 0, 0, 2, 1]
