"""Each sample is trained on once an epoch, even when workers join and leave."""

from __future__ import annotations

import json
from collections import Counter
from itertools import count as counting

from hypothesis import given
from hypothesis import strategies as st

from paceline.job.samples import Positions, Samples
from tries import tries


def test_ranges_follow_one_another_and_end_with_the_epoch() -> None:
    samples = Samples(size=10, epochs=2)
    assert samples.take(0, 1, 4) == Positions(0, 0, 4)
    assert samples.take(1, 1, 4) == Positions(0, 4, 8)
    assert samples.take(0, 2, 4) == Positions(0, 8, 10)
    assert samples.take(0, 3, 4) == Positions(1, 0, 4)


def test_a_repeated_request_gets_the_same_range() -> None:
    samples = Samples(size=10, epochs=1)
    assert samples.take(0, 1, 4) == samples.take(0, 1, 4) == Positions(0, 0, 4)
    assert samples.take(0, 2, 4) == Positions(0, 4, 8)


def test_the_main_worker_ends_the_samples_early() -> None:
    samples = Samples(size=8, epochs=3)
    assert samples.take(0, 1, 4) == Positions(0, 0, 4)
    samples.take(1, 1, 4)
    samples.end()
    assert samples.take(0, 1, 4) == Positions(0, 0, 4), "a repeated request"
    assert samples.take(0, 2, 4) is None
    samples.abandoned(1)
    assert samples.take(0, 3, 4) is None and not samples.all_done
    resumed = Samples.from_json(samples.as_json())
    assert resumed.take(0, 4, 4) is not None, "a resumed job trains on"


def test_the_samples_of_a_departed_worker_are_handed_out_again() -> None:
    samples = Samples(size=8, epochs=1)
    samples.take(0, 1, 4)
    samples.take(1, 1, 4)
    samples.abandoned(0)
    assert samples.take(1, 2, 3) == Positions(0, 0, 3)
    assert samples.take(1, 3, 3) == Positions(0, 3, 4)
    assert samples.take(1, 4, 3) is None
    samples.arrived(1, [1, 2, 3], "update")
    assert not samples.all_done
    samples.done("update")
    assert samples.all_done


def test_samples_taken_ahead_count_only_with_their_own_update() -> None:
    samples = Samples(size=8, epochs=1)
    samples.take(0, 1, 4)
    samples.take(0, 2, 4)
    samples.arrived(0, [1], "first")
    samples.done("first")
    assert not samples.all_done
    samples.abandoned(0)
    assert samples.take(1, 1, 9) == Positions(0, 4, 8)


def test_the_samples_of_an_arrived_update_are_not_handed_out_again() -> None:
    samples = Samples(size=4, epochs=1)
    samples.take(0, 1, 4)
    samples.arrived(0, [1], "update")
    samples.abandoned(0)  # the worker has left, but its update has arrived
    assert samples.take(1, 1, 4) is None
    samples.done("update")
    assert samples.all_done


def test_the_samples_of_a_discarded_update_are_handed_out_again() -> None:
    samples = Samples(size=4, epochs=1)
    samples.take(0, 1, 4)
    samples.arrived(0, [1], "update")
    samples.dropped("update")
    assert samples.take(1, 1, 4) == Positions(0, 0, 4)


def test_a_worker_cannot_claim_the_request_numbers_of_another() -> None:
    samples = Samples(size=4, epochs=1)
    samples.take(0, 1, 4)
    samples.arrived(1, [1], "update of another worker")
    samples.done("update of another worker")
    assert samples.trained == 0


@tries(50, 200)
@given(
    size=st.integers(1, 60),
    epochs=st.integers(1, 3),
    steps=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(("applied", "discarded", "cancelled", "left", "computing", "restored")),
            st.integers(1, 17),
        ),
        max_size=60,
    ),
)
def test_every_sample_is_done_once_an_epoch(size: int, epochs: int, steps: list[tuple[int, str, int]]) -> None:
    """This holds whatever happens to updates and workers, and if the samples are saved and restored in between."""
    samples = Samples(size, epochs)
    done: Counter[tuple[int, int]] = Counter()
    held: dict[int, dict[int, Positions]] = {}
    numbers = counting(1)

    def apply(worker: int) -> None:
        mine = held.pop(worker, {})
        samples.arrived(worker, mine, worker)
        samples.done(worker)
        for taken in mine.values():
            done.update((taken.epoch, position) for position in range(taken.start, taken.stop))

    for worker, then, count in steps:
        number = next(numbers)
        taken = samples.take(worker, number, count)
        if taken is not None:
            assert 0 < taken.stop - taken.start <= count
            held.setdefault(worker, {})[number] = taken
        if then == "applied":
            apply(worker)
        elif then == "discarded":
            samples.arrived(worker, held.pop(worker, {}), worker)
            samples.dropped(worker)
        elif then == "cancelled":
            samples.returned(worker, held.pop(worker, {}))
        elif then == "left":
            samples.abandoned(worker)
            held.pop(worker, None)
        elif then == "restored":
            samples = Samples.from_json(json.loads(json.dumps(samples.as_json())))
            held.clear()
    for worker in list(held):
        apply(worker)
    while (taken := samples.take(9, number := next(numbers), 7)) is not None:
        held.setdefault(9, {})[number] = taken
    apply(9)
    assert samples.all_done
    assert done == Counter((epoch, position) for epoch in range(epochs) for position in range(size))


def test_epochs_may_be_requested_one_after_the_other() -> None:
    """A script may loop over the epochs itself. Then a fast worker can be an epoch ahead of a slow one."""
    samples = Samples(size=4, epochs=1)
    assert samples.take(0, 1, 2, epochs=1) == Positions(0, 0, 2)
    assert samples.take(1, 1, 2, epochs=1) == Positions(0, 2, 4)
    assert samples.take(0, 2, 2, epochs=1) is None
    assert samples.take(0, 2, 2, epochs=2) == Positions(1, 0, 2)
    assert samples.take(1, 2, 2, epochs=1) is None, "this worker is still in the first epoch"
    samples.returned(0, [2])
    assert samples.take(1, 2, 2, epochs=1) is None
    assert samples.take(1, 2, 2, epochs=2) == Positions(1, 0, 2)


def test_a_plan_hands_out_no_samples_of_epochs_that_have_not_begun() -> None:
    samples = Samples(size=4, epochs=1)
    assert samples.total == 0, "unknown"
    samples.plan(3)
    samples.plan(None)
    samples.plan(2)
    assert samples.total == 12, "the longest plan counts"
    assert samples.take(0, 1, 9, epochs=1) == Positions(0, 0, 4)
    assert samples.take(0, 2, 9, epochs=1) is None
    samples.arrived(0, [1], "update")
    samples.done("update")
    assert not samples.all_done, "two epochs are still to come"


def test_a_plan_is_saved_and_an_older_checkpoint_has_none() -> None:
    samples = Samples(size=4, epochs=1)
    samples.plan(3)
    saved = json.loads(json.dumps(samples.as_json()))
    assert Samples.from_json(saved).total == 12
    del saved["planned"]
    assert Samples.from_json(saved).total == 0
