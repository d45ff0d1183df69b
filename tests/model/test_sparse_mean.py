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
from paceline.model.slice import Slice
from paceline.model.sparse_mean import STATE, SparseMean
from paceline.serve.shard.store import WholeStore
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


class Straight:
    """The same rule for one element after another: the steps of rounds, as lists of (values, weight) of updates."""

    def __init__(self) -> None:
        self.last = [1.0] * SIZE  # the share of the senders in the last round

    def moved(self, steps: list[list[tuple[Any, float]]]) -> list[float]:
        """Return how far one round moves the model."""
        updates = [each for step in steps for each in step]
        found = []
        for element in range(SIZE):
            sent = [(-float(values[element]), weight) for values, weight in updates if values[element]]
            share = sum(weight for _, weight in sent) / sum(weight for _, weight in updates)
            found.append(sum(value * weight for value, weight in sent) / max(share, self.last[element], 1e-9))
            self.last[element] = share
        return found


@tries(40, 300)
@given(
    st.lists(st.lists(st.lists(st.floats(0.05, 2), min_size=1, max_size=4), min_size=1, max_size=4), max_size=4),
    st.integers(0, 2**20),
    st.booleans(),
)
def test_a_round_moves_each_element_by_the_mean_of_its_senders(
    rounds: list[list[list[float]]], seed: int, added_one_by_one: bool
) -> None:
    """A round is one step under a barrier, and several by turns. Fewer senders than in the last round count less."""
    whole, straight, number = new_slice(), Straight(), 0
    for batches in rounds:
        total, steps = sum(sum(step) for step in batches), []
        before = whole.weights.clone()
        for step in batches:
            updates = [(sparse_update(seed + number + place), batch / total) for place, batch in enumerate(step)]
            number += len(step)
            if added_one_by_one:
                running = None
                for update, weight in updates:
                    running = whole.add(Term.of(update.clone(), weight, (1.0,)), running)
                assert running is not None
                whole.step_by([running.term(1.0)])
            else:
                whole.step_by([Term.of(update, weight, (1.0,)) for update, weight in updates])
            steps.append(updates)
        assert (whole.weights - before).tolist() == pytest.approx(straight.moved(steps), abs=1e-4)


@pytest.mark.parametrize("senders", [1, 2, 4])
def test_by_turns_a_round_moves_an_element_as_far_as_its_senders_found(senders: int) -> None:
    """`senders` of four workers send an element in each round. The others send other elements."""
    whole, workers, ends = new_slice(), 4, []
    for turn in range(6 * workers):
        update = torch.zeros(SIZE)
        update[0 if turn % workers < senders else 1 + turn % workers] = -1.0
        before = float(whole.weights[0])
        whole.step_by([Term.of(update, 1 / workers, (1.0,))])
        assert 0 <= float(whole.weights[0]) - before <= 1 / senders + 1e-6, "no worker pulls what is too far"
        if turn % workers == workers - 1:
            ends.append(float(whole.weights[0]))
    first = senders / workers  # before the first round is over, all workers are expected to send all elements
    assert ends == pytest.approx([first + rounds for rounds in range(6)])


def test_an_element_that_all_begin_to_send_at_once_moves_to_their_mean() -> None:
    whole, found = new_slice(), [3.0, 1.0, 2.0, 6.0]
    for _ in range(4):  # a round in which nobody sends the element
        whole.step_by([Term.of(torch.zeros(SIZE), 0.25, (1.0,))])
    for turn, value in enumerate(found):
        update = torch.zeros(SIZE)
        update[7] = -value
        whole.step_by([Term.of(update, 0.25, (1.0,))])
        assert float(whole.weights[7]) == pytest.approx(sum(found[: turn + 1]) / (turn + 1))


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_updates_that_count_in_full_are_not_divided(weight: float) -> None:
    """With `weights=sum`, each update of a policy by turns is a round of its own."""
    ours, plain = new_slice(), new_slice(sparse=False)
    for seed in range(5):
        for each in (ours, plain):
            each.step_by([Term.of(sparse_update(seed), weight, (1.0,))])
    assert torch.equal(ours.weights, plain.weights)


@pytest.mark.parametrize("senders", [1, 2, 4])
def test_a_barrier_by_the_sum_sums_what_is_sent(senders: int) -> None:
    ours, plain = new_slice(), new_slice(sparse=False)
    updates = [sparse_update(seed, present=0.9) for seed in range(senders)]
    for _ in range(3):
        for each in (ours, plain):
            each.step_by([Term.of(update, 1.0, (1.0,)) for update in updates])
    assert torch.allclose(ours.weights, plain.weights, atol=1e-5)


@tries(40, 300)
@given(st.lists(st.floats(0.01, 1.5), min_size=1, max_size=40), st.integers(0, 2**20))
def test_a_step_moves_only_what_its_update_has(weights: list[float], seed: int) -> None:
    """Also if the weights of a round do not sum to 1, because members come and go or some updates are dropped."""
    ours, mean = new_slice(), SparseMean(torch.zeros(SIZE))
    for turn, weight in enumerate(weights):
        update, before = sparse_update(seed + turn), ours.weights.clone()
        ours.step_by([Term.of(update, weight, (1.0,))])
        moved = ours.weights - before
        assert not moved[update == 0].any()
        mean.of(weight * update, [Term.of(update, weight, (1.0,))])
        assert mean.weight <= max(weight, 1 + 1e-5), "a round ends before its weight passes 1"


def test_a_round_begins_when_the_weight_of_the_last_one_would_pass_1() -> None:
    """Seven of eight updates of a barrier, then all eight of the next one."""
    ours, update = new_slice(), torch.zeros(SIZE)
    for _ in range(2):
        ours.step_by([Term.of(update, 1.0, (1.0,))])
    sent = update.clone()
    sent[0] = -1
    ours.step_by([Term.of(each, 1 / 8, (1.0,)) for each in [sent] + 6 * [update]])
    assert ours.weights[0] == 1
    ours.step_by([Term.of(update, 1 / 8, (1.0,))] * 8)
    assert ours.weights[0] == 1


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_updates_with_all_elements_are_applied_as_before(weight: float) -> None:
    updates = [torch.full((SIZE,), -1.0) + sparse_update(seed) / 8 for seed in range(5)]
    ours, plain = new_slice(), new_slice(sparse=False)
    for update in updates:
        for each in (ours, plain):
            each.step_by([Term.of(update, weight, (1.0,))])
    assert torch.allclose(ours.weights, plain.weights, rtol=1e-5)


def test_an_update_is_not_changed() -> None:
    update = sparse_update(1)
    before = update.clone()
    new_slice().step_by([Term.of(update, 1.0, (1.0,))])
    assert torch.equal(update, before)


def test_an_update_that_counts_nothing_changes_nothing() -> None:
    whole = new_slice()
    before = [each.clone() for each in whole.state()[0].values()]
    whole.step_by([Term.of(sparse_update(1), 0.0, (1.0,))])
    assert all(torch.equal(*pair) for pair in zip(before, whole.state()[0].values(), strict=True))


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


def test_a_job_with_other_updates_goes_on_from_a_checkpoint() -> None:
    plain, ours, new = new_slice(sparse=False), new_slice(), new_slice()
    plain.step_by([Term.of(sparse_update(1), 0.25, (1.0,))])
    ours.load(*plain.state())
    for name in STATE:
        assert torch.equal(ours.state()[0][name], new.state()[0][name]), "a first round begins"
    plain.load(*ours.state())


@pytest.mark.parametrize("name", STATE)
def test_a_damaged_checkpoint_is_refused(name: str) -> None:
    ours = new_slice()
    tensors, meta = ours.state()
    lacking = {key: each for key, each in tensors.items() if key != name}
    for damaged in (lacking, lacking | {name: torch.ones(3)}, lacking | {name: torch.ones(SIZE, dtype=torch.int32)}):
        with pytest.raises(ValueError, match="the senders of each element"):
            ours.load(damaged, meta)
    for weight in (None, "1", -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the senders of each element"):
            ours.load(tensors, meta | {"round_weight": weight})


def test_the_senders_are_no_state_of_the_optimizer() -> None:
    """A worker that asks for the optimizer's state receives one entry for each parameter."""
    store = WholeStore(new_slice())
    assert any(name.endswith(STATE) for name in store.state()[0])
    assert not store.optimizer_state()[0]


def test_the_state_is_cut_again_with_the_weights() -> None:
    ours = new_slice()
    for turn in range(6):
        ours.step_by([Term.of(sparse_update(turn), 0.25, (1.0,))])
    tensors, meta = ours.state()
    piece = SavedPiece.of({name: tensor.numpy() for name, tensor in tensors.items()}, meta)
    found, described = cut_again(LAYOUT, SUMS, [(0, 20), (20, SIZE)], [piece])
    parts = [Slice(LAYOUT, 0, 20, SUMS, sparse=True), Slice(LAYOUT, 20, SIZE, SUMS, sparse=True)]
    for number, part in enumerate(parts):
        mine = {name.removeprefix(f"{number}/"): array for name, array in found.items() if name[0] == str(number)}
        part.load({name: torch.from_numpy(array) for name, array in mine.items()}, described["pieces"][number])
    for turn in range(6, 12):
        update = sparse_update(turn)
        ours.step_by([Term.of(update, 0.25, (1.0,))])
        for part in parts:
            part.step_by([Term.of(update[part.start : part.stop].clone(), 0.25, (1.0,))])
    assert torch.equal(torch.cat([part.weights for part in parts]), ours.weights)


def test_running_statistics_are_a_mean_over_all_workers() -> None:
    """They are never left out of an update, also if one is 0."""
    layout = Layout((Tensor("w", (4,)), Tensor("mean", (2,), group=STATISTICS)))
    whole = Slice(layout, 0, 6, SUMS, sparse=True)
    updates = [torch.tensor([-1.0, 0, 0, 0, 3, 0]), torch.tensor([0.0, -1, 0, 0, 1, 2])]
    for _ in range(2):
        whole.step_by([Term.of(update, 0.5, (1.0,)) for update in updates])
    assert whole.weights.tolist() == [1.5, 1.5, 0, 0, 2, 1], "half a step in the first round, and a whole one"
